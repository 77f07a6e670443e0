"""`audit`: from a model to a record of findings, and from the record to files."""

from __future__ import annotations

import importlib.metadata
import math
import platform
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from unembed import diagnostics, integrations
from unembed._version import __version__
from unembed.models import Unembedding
from unembed.results import InputError, IntegrityError, Record, Result
from unembed.text import read_files, read_topics

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
DEMONSTRATION = Path(__file__).parent / "assets" / "demonstration"
Progress = Callable[[str, int, int], None]
_SAMPLED = 256  # predictions that the sampling measurements take at most


class Audit:
    """A finished audit.

    Args:
        record: Everything that was found, as data.
    """

    def __init__(self, record: Record) -> None:
        self.record = record

    @property
    def results(self) -> dict[str, Result]:
        """Measurement name -> result."""
        return self.record.results

    def save(self, folder: str | Path) -> Path:
        """Write `audit.json`, `tables.npz`, `tables/*.csv` and `report.html`: all of them or none.

        Raises:
            OSError: If the folder cannot be written.
        """
        from unembed import report

        return self.record.save(folder, extra={"report.html": report.render(self.record)})

    def _repr_html_(self) -> str:
        from html import escape

        from unembed import report

        page = escape(report.render(self.record), quote=True)
        return (
            f'<iframe srcdoc="{page}" style="width:100%;height:60em;border:0" sandbox="allow-scripts allow-downloads">'
        )


@dataclass(frozen=True)
class _Options:
    tokens: int
    checks: tuple[str, ...]
    context: int
    device: str
    dtype: str
    seed: int
    say: Progress
    phases: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def phase(self, name: str, total: int = 1) -> Iterator[None]:
        """Report a phase and keep its time."""
        self.say(name, 0, total)
        start = time.perf_counter()
        yield
        self.phases[name] = round(time.perf_counter() - start, 3)
        self.say(name, total, total)


def audit(
    source: str | Path | nn.Module | None = None,
    *,
    text: Any = None,
    tokenizer: Any = None,
    tokens: int = 8192,
    checks: Sequence[str] | None = None,
    context: int = 512,
    device: str = "cpu",
    dtype: str = "float32",
    seed: int = 0,
    norm: str | None = None,
    revision: str | None = None,
    progress: Progress | None = None,
) -> Audit:
    """Measure the output layer of a model.

    Args:
        source: Hugging Face folder, hub id, GGUF file, or a model in memory; the demonstration model when None.
        text: Paths of text files, or documents (`text.Document`) that can be iterated again; the English of the
            standard library's `pydoc_data.topics` when None.
        tokenizer: Needed with a model in memory.
        tokens: Predictions to measure on.
        checks: Names of the measurements to make; all when None. `["spectrum"]` reads the weights only.
        context: Longest window of a document, in tokens.
        device: `cpu`, `cuda`, `cuda:1`, `mps` or `auto`. A model in memory stays where it is.
        dtype: In what the body runs: `float32`, `bfloat16`, `float16`, `float64`. Measurements use float32 or wider.
        seed: Seed of the document order, the bootstrap and the sketch.
        norm: Kind of the final norm where the model's family is unknown: `rms`, `rms1p`, `layer` or `none`.
        revision: Branch, tag or commit of a hub model.
        progress: Called with a phase, the work done and the work in all.

    Raises:
        InputError: If something given cannot be used; the message is one line that says what would do.
        IntegrityError: If the head fails a check, so that no number would be worth printing.
    """
    started, clock = datetime.now(UTC), time.perf_counter()
    if tokens < 1:
        raise InputError(f"`tokens` must be at least 1, got {tokens}.")
    say = progress or (lambda _phase, _done, _total: None)
    options = _Options(tokens, _chosen(checks), context, device, dtype, seed, say)
    source = DEMONSTRATION if source is None else source
    with options.phase("load head"):
        unembedding = Unembedding.load(source, revision=revision, norm=norm, tokenizer=tokenizer)
    record = _described(unembedding, revision)
    record.provenance = {"checks": list(options.checks), "seed": seed, "device": device}
    if any(MEASUREMENTS[name].needs_text for name in options.checks):
        _measure_on_text(record, source, unembedding, _documents(text), tokenizer, revision, options)
    else:
        head = diagnostics.LinearHead.of(unembedding, device=integrations.resolve_device(device))
        _finish(record, _accumulators(head, options), options)
    record.provenance["versions"] = _versions()
    seconds = {"total": round(time.perf_counter() - clock, 3), **options.phases}
    record.timing = {"started": started.isoformat(timespec="seconds"), "seconds": seconds}
    return Audit(record)


def _measure_on_text(
    record: Record,
    source: Any,
    unembedding: Unembedding,
    documents: Any,
    tokenizer: Any,
    revision: str | None,
    options: _Options,
) -> None:
    """Run the model over documents, prove that its scores are those of the head, and measure."""
    with options.phase("load model"):
        model, tokenizer = _model(source, tokenizer, revision, options)
    with options.phase("parity"):
        parity = integrations.check_parity(model, tokenizer, unembedding, documents)
    record.integrity.append(parity)
    if parity.status == "failed":
        raise IntegrityError(f"{parity.code}: {parity.message}")
    weight = model.get_output_embeddings().weight
    head = diagnostics.LinearHead.of(
        unembedding, weight=weight if _equal(weight, unembedding.weight) else None, device=weight.device
    )
    del unembedding  # a dequantised copy of the matrix would stay alive beside the model's own

    accumulators = _accumulators(head, options)
    with options.phase("orthonormal basis"):
        _ = head.columns
    saturation = [one for one in accumulators if isinstance(one, diagnostics.Saturation)]
    done = 0
    with options.phase("measure", options.tokens), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The text is exhausted")  # the record says so
        stream = integrations.hidden_states(
            model, tokenizer, documents, tokens=options.tokens, context=options.context, seed=options.seed
        )
        for block in stream:
            index = torch.arange(done, done + len(block))
            for chunk in diagnostics.chunks(head, block.hidden, block.targets, documents=block.documents, index=index):
                for accumulator in accumulators:
                    accumulator.add(chunk)
                done += len(chunk)
                options.say("measure", done, options.tokens)
            for one in saturation:
                one.add_bytes(_text_bytes(tokenizer, block))
    record.provenance |= {
        "device": str(weight.device),
        "dtype": str(next(model.parameters()).dtype).removeprefix("torch."),
        "context": options.context,
        "tokens": done,
        "tokens_requested": options.tokens,
        "text": documents.describe() if hasattr(documents, "describe") else {"kind": type(documents).__name__},
    }
    _finish(record, accumulators, options)


def _model(source: Any, tokenizer: Any, revision: str | None, options: _Options) -> tuple[Any, Any]:
    if not isinstance(source, nn.Module):
        return integrations.open_model(source, revision=revision, device=options.device, dtype=options.dtype)
    if tokenizer is None:
        raise InputError("A model in memory needs `tokenizer=`, or `checks=['spectrum']` to read the weights only.")
    return source, tokenizer


def _accumulators(head: diagnostics.LinearHead, options: _Options) -> list[diagnostics.Accumulator]:
    every = math.ceil(options.tokens / _SAMPLED)
    eps = torch.finfo(getattr(torch, options.dtype)).eps
    made = {
        "spectrum": lambda: diagnostics.Spectrum(head),
        "logprob_rank": lambda: diagnostics.LogprobRank(head, every=every, seed=options.seed, hidden_eps=eps),
        "gradient": lambda: diagnostics.Gradient(head, seed=options.seed),
        "coefficients": lambda: diagnostics.Coefficients(head, every=every),
        "saturation": lambda: diagnostics.Saturation(head, seed=options.seed),
    }
    return [made[name]() for name in options.checks]


def _finish(record: Record, accumulators: list[diagnostics.Accumulator], options: _Options) -> None:
    with options.phase("results", len(accumulators)):
        for done, accumulator in enumerate(accumulators, 1):
            record.results[accumulator.name] = accumulator.result()
            options.say("results", done, len(accumulators))


def _described(unembedding: Unembedding, revision: str | None) -> Record:
    model = {
        "source": unembedding.source,
        "kind": unembedding.kind,
        "architecture": unembedding.architecture,
        "hash": unembedding.hash,
        "revision": revision,
    }
    return Record(model=model, head=unembedding.describe(), integrity=list(unembedding.integrity))


def _chosen(checks: Sequence[str] | None) -> tuple[str, ...]:
    """Names of the measurements in the order of the report."""
    if checks is None:
        return tuple(MEASUREMENTS)
    unknown = [name for name in checks if name not in MEASUREMENTS]
    if unknown or not checks:
        raise InputError(f"`checks` takes names from {', '.join(MEASUREMENTS)}; got {', '.join(unknown) or 'none'}.")
    return tuple(name for name in MEASUREMENTS if name in checks)


def _documents(source: Any) -> Any:
    """The documents to measure on."""
    if source is None:
        return read_topics()
    if isinstance(source, str | Path):
        return read_files([source])
    if isinstance(source, Sequence) and source and all(isinstance(item, str | Path) for item in source):
        return read_files(source)
    if isinstance(source, Iterable):
        return source
    raise InputError(f"`text` must be file paths or an iterable of Document, got {type(source).__name__}.")


def _equal(mine: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two matrices hold the same numbers, whatever their dtypes."""
    if mine.shape != other.shape:
        return False
    wide = torch.promote_types(mine.dtype, other.dtype)
    pairs = zip(mine.detach().split(4096), other.detach().split(4096), strict=True)
    return all(torch.equal(a.to(wide), b.to(a.device, wide)) for a, b in pairs)


def _text_bytes(tokenizer: Any, block: integrations.Block) -> int:
    """Bytes of the text that the targets of a block stand for."""
    starts = (block.windows.diff() != 0).nonzero().flatten().add(1).tolist()
    ids = block.targets.tolist()
    bounds = [0, *starts, len(ids)]
    pieces = (ids[start:end] for start, end in zip(bounds[:-1], bounds[1:], strict=True))
    return sum(len(tokenizer.decode(piece).encode("utf-8", errors="replace")) for piece in pieces)


def _versions() -> dict[str, str]:
    found = {"unembed": __version__, "python": platform.python_version(), "torch": torch.__version__}
    for package in ("numpy", "safetensors", "transformers", "tokenizers", "gguf"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found
