"""One run: the model over the text, chunk by chunk, into the accumulators."""

from __future__ import annotations

import hashlib
import math
import time
import warnings
from collections.abc import Callable, Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unembed import diagnostics, integrations
from unembed._audit._resume import Progressed
from unembed._version import __version__
from unembed.integrations import Dtype
from unembed.models import Unembedding
from unembed.results import Check, InputError, IntegrityError, Record

MEASUREMENTS: dict[str, type[diagnostics.Accumulator]] = {
    kind.name: kind
    for kind in (
        diagnostics.Spectrum,
        diagnostics.LogprobRank,
        diagnostics.Gradient,
        diagnostics.Coefficients,
        diagnostics.Saturation,
    )
}
Progress = Callable[[str, int, int], None]
_SAMPLED = 256  # predictions that the sampling measurements take at most


@dataclass(frozen=True)
class Run:
    """What `audit` was asked, and the seconds each phase took. The arguments are those of `audit`."""

    source: str | Path | nn.Module
    text: Any
    tokenizer: Any
    tokens: int
    checks: tuple[str, ...]
    context: int
    device: str
    dtype: Dtype
    seed: int
    revision: str | None
    norm: Any
    resume: Path | None
    say: Progress
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, total: int = 1) -> Generator[None]:
        """Report a phase and keep its time."""
        self.say(name, 0, total)
        start = time.perf_counter()
        yield
        self.phases[name] = round(time.perf_counter() - start, 3)
        self.say(name, total, total)

    def measure(self) -> Record:
        """Load, check, measure.

        Raises:
            InputError: If memory runs out, beside what `audit` lists.
        """
        try:
            return self._measured()
        except torch.OutOfMemoryError as error:
            raise InputError(
                f"{self.device}: out of memory while measuring; use --device cpu or a smaller --dtype."
            ) from error

    def _measured(self) -> Record:
        if any(MEASUREMENTS[name].needs_text for name in self.checks):
            record, head, model, tokenizer = self._opened()
            eps = torch.finfo(next(model.parameters()).dtype).eps
            accumulators = self._accumulators(head, eps)
            self._stream(record, model, tokenizer, accumulators)
        else:
            record, unembedding = self._loaded()
            head = diagnostics.LinearHead.of(unembedding, device=integrations.resolve_device(self.device))
            accumulators = self._accumulators(head, 0.0)
        with self.phase("results", len(accumulators)):
            for done, accumulator in enumerate(accumulators, 1):
                record.results[accumulator.name] = accumulator.result()
                self.say("results", done, len(accumulators))
        return record

    def _loaded(self) -> tuple[Record, Unembedding]:
        """The head alone, and a record that describes it."""
        with self.phase("load head"):
            unembedding = Unembedding.load(
                self.source, revision=self.revision, norm=self.norm, tokenizer=self.tokenizer
            )
        model = {
            "source": unembedding.source,
            "kind": unembedding.kind,
            "architecture": unembedding.architecture,
            "hash": unembedding.hash,
            "revision": self.revision,
        }
        provenance = {"checks": list(self.checks), "seed": self.seed, "device": self.device}
        described = unembedding.describe()
        return Record(model, described, list(unembedding.integrity), provenance=provenance), unembedding

    def _opened(self) -> tuple[Record, diagnostics.LinearHead, Any, Any]:
        """The model, and its head once the model's scores are proved to be those of the head."""
        record, unembedding = self._loaded()
        model, tokenizer = self._model()
        with self.phase("parity"):
            parity = integrations.check_parity(model, tokenizer, unembedding, self.text)
        if parity.status == "failed":
            raise IntegrityError(f"{parity.message} [{parity.code}]")
        record.integrity.append(parity)
        weight = model.get_output_embeddings().weight
        # One copy of the matrix is enough: what was loaded for the checks goes when this function ends.
        shared = weight if _equal(weight, unembedding.weight) else None
        return record, diagnostics.LinearHead.of(unembedding, weight=shared, device=weight.device), model, tokenizer

    def _model(self) -> tuple[Any, Any]:
        """Model and tokenizer."""
        with self.phase("load model"):
            if not isinstance(self.source, nn.Module):
                return integrations.open_model(
                    self.source, revision=self.revision, device=self.device, dtype=self.dtype
                )
            if self.tokenizer is None:
                raise InputError(
                    "A model in memory needs `tokenizer=`, or `checks=['spectrum']` to read the weights only."
                )
            return self.source, self.tokenizer

    def _accumulators(self, head: diagnostics.LinearHead, eps: float) -> list[diagnostics.Accumulator]:
        every = math.ceil(self.tokens / _SAMPLED)
        made: dict[str, Callable[[], diagnostics.Accumulator]] = {
            "spectrum": lambda: diagnostics.Spectrum(head),
            "logprob_rank": lambda: diagnostics.LogprobRank(head, every=every, seed=self.seed, hidden_eps=eps),
            "gradient": lambda: diagnostics.Gradient(head, seed=self.seed),
            "coefficients": lambda: diagnostics.Coefficients(head, every=every),
            "saturation": lambda: diagnostics.Saturation(head, seed=self.seed),
        }
        with self.phase("spectrum and basis"):
            _ = head.columns if any(MEASUREMENTS[name].needs_basis for name in self.checks) else head.svd
        return [made[name]() for name in self.checks]

    def _stream(self, record: Record, model: Any, tokenizer: Any, accumulators: list[diagnostics.Accumulator]) -> None:
        """Every prediction of the text through every accumulator."""
        described = _described_text(self.text)
        progressed = Progressed(self.resume, self._identity(record, model, tokenizer, described), accumulators)
        done, window = progressed.restore(), 0
        workspace = diagnostics.Workspace()
        with self.phase("measure", self.tokens), diagnostics.full_precision(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The text is exhausted")  # UNE021 says so
            blocks = integrations.hidden_states(
                model, tokenizer, self.text, tokens=self.tokens, context=self.context, seed=self.seed, skip=done
            )
            try:
                for block in blocks:
                    window = max(window, int(block.windows.unique(return_counts=True)[1].max()))
                    self._add(block, done, tokenizer, accumulators, workspace)
                    done += len(block)
                    progressed.keep(done)
            except BaseException:
                progressed.write()
                raise
        if done < self.tokens:
            message = f"The text is exhausted after {done:,} of {self.tokens:,} predictions."
            record.integrity.append(Check("UNE021", "note", message))
        record.provenance |= {
            "device": str(accumulators[0].device),
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
            "context": self.context,
            "window": window,
            "tokens": done,
            "tokens_requested": self.tokens,
            "text": described,
        }

    def _add(
        self,
        block: integrations.Block,
        done: int,
        tokenizer: Any,
        accumulators: list[diagnostics.Accumulator],
        workspace: diagnostics.Workspace,
    ) -> None:
        """One block of predictions, the first of them number `done`, into all accumulators."""
        cut = diagnostics.chunks(
            accumulators[0].head,
            block.hidden,
            block.targets,
            documents=block.documents,
            index=torch.arange(done, done + len(block)),
            workspace=workspace,
        )
        for chunk in cut:
            for accumulator in accumulators:
                accumulator.add(chunk)
            self.say("measure", int(chunk.index[-1]) + 1, self.tokens)
        for accumulator in accumulators:
            if isinstance(accumulator, diagnostics.Saturation):
                accumulator.add_bytes(_text_bytes(tokenizer, block))

    def _identity(self, record: Record, model: Any, tokenizer: Any, text: dict[str, Any]) -> dict[str, Any]:
        """What must be equal for the sums of an interrupted run to go on with."""
        names = ("tokens", "checks", "context", "device", "dtype", "seed", "revision")
        return {
            "version": __version__,
            "head": record.model["hash"],
            "body": _fingerprint(model),
            "tokenizer": [type(tokenizer).__name__, len(tokenizer)],
            "text": text,
            **{name: getattr(self, name) for name in names},
        }


def _described_text(documents: Any) -> dict[str, Any]:
    """What identifies a text: its own description, or the number and digest of documents in memory."""
    if hasattr(documents, "describe"):
        return documents.describe()
    if not isinstance(documents, Collection):
        return {"kind": type(documents).__name__}
    digest = hashlib.sha256()
    for document in documents:
        digest.update(f"{document.id}\0{document.text}\0".encode("utf-8", errors="surrogatepass"))
    return {"kind": "documents", "number": len(documents), "sha256": digest.hexdigest()}


def _fingerprint(model: nn.Module) -> str:
    """Digest of the first numbers of every parameter: tells two checkpoints apart without reading them whole."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        first = parameter.detach().flatten()[:16].cpu().to(torch.float64)
        digest.update(f"{name} {tuple(parameter.shape)} {first.tolist()}".encode())
    return digest.hexdigest()


def _equal(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two matrices hold the same numbers, whatever their dtypes."""
    if mine.shape != other.shape:
        return False
    wide = torch.promote_types(mine.dtype, other.dtype)
    pairs = zip(mine.detach().split(4096), other.detach().split(4096), strict=True)
    return all(torch.equal(a.to(wide), b.to(a.device, wide)) for a, b in pairs)


def _text_bytes(tokenizer: Any, block: integrations.Block) -> int:
    """Bytes of the text that the targets of a block stand for; off by up to 3 a window where it cuts a character."""
    starts = (block.windows.diff() != 0).nonzero().flatten().add(1).tolist()
    ids = block.targets.tolist()
    pieces = (ids[start:end] for start, end in pairwise([0, *starts, len(ids)]))
    texts = (tokenizer.decode(piece, skip_special_tokens=True) for piece in pieces)
    return sum(len(text.encode("utf-8", errors="replace")) for text in texts)
