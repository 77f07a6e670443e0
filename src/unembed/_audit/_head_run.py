"""A run over a model in memory whose output layer is a head of `unembed.heads`, not a plain matrix."""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from unembed import diagnostics, integrations
from unembed._audit._run import MEASUREMENTS, Run
from unembed.heads import Head, Linear
from unembed.models import check_vocabulary, tokens_of
from unembed.results import Check, InputError, IntegrityError, Record, Result

_JACOBIANS = 64  # predictions at which the Jacobian is taken, at most: a second each, and more at a large vocabulary


def own_head(source: Any) -> Head | None:
    """The output layer of a model in memory where it is one of ours that is more than a matrix."""
    if not isinstance(source, nn.Module):
        return None
    give: Any = getattr(source, "get_output_embeddings", None)
    head = give() if give is not None else None
    return head if isinstance(head, Head) and type(head) is not Linear else None


@dataclass(frozen=True)
class HeadRun(Run):
    """Measures `gradient` through the Jacobian; what is measured on a matrix does not apply."""

    def _measured(self) -> Record:
        head = own_head(self.source)
        assert head is not None, "who makes this run has looked"
        model, tokenizer = self._model()
        record = self._described(head, model, tokenizer)
        with self.phase("parity"):
            record.integrity.append(self._parity(head, model, tokenizer))
        results: dict[str, Result] = {}
        if "gradient" in self.checks:
            every = math.ceil(self.tokens / _JACOBIANS)
            gradient = diagnostics.HeadGradient(head, every=every, seed=self.seed)
            self._stream(record, model, tokenizer, [gradient])
            results["gradient"] = gradient.result()
        reason = f"it is measured on a matrix, and this head is a {type(head).__name__}"
        for name in self.checks:
            kind = MEASUREMENTS[name]
            record.results[name] = results.get(name) or Result(name, kind.code, kind.title, None, reason=reason)
        return record

    def _add(
        self,
        block: integrations.Block,
        done: int,
        tokenizer: Any,
        accumulators: list[diagnostics.Accumulator],
        workspace: diagnostics.Workspace,
    ) -> None:
        """One block of predictions; progress after each that is taken."""
        index = torch.arange(done, done + len(block))
        for part in torch.arange(len(block)).split(64):
            for accumulator in accumulators:
                accumulator.update(
                    block.hidden[part], block.targets[part], documents=block.documents[part], index=index[part]
                )
            self.say("measure", int(index[part[-1]]) + 1, self.tokens)

    def _described(self, head: Head, model: Any, tokenizer: Any) -> Record:
        """What is known of model and head."""
        weight = getattr(head, "weight", None)
        embedding = model.get_input_embeddings().weight
        tokens = tokens_of(tokenizer)
        size, holes = (None, ()) if tokens is None else (len(tokens.strings), tokens.holes)
        architecture = str(getattr(model.config, "model_type", None) or type(model).__name__)
        described = {
            "kind": type(head).names[0] if type(head).names else type(head).__name__,
            "in_features": head.in_features,
            "vocab_rows": head.out_features,
            "vocab_tokens": size,
            "tied": weight is embedding,
            "bias": getattr(head, "bias", None) is not None,
            "softcap": getattr(head, "softcap", None),
            "scale": getattr(head, "scale", 1.0),
            "dtype": str(next(head.parameters()).dtype).removeprefix("torch."),
            "padding_rows": 0,  # all classes are in the head's distribution
            "holes": len(holes),
            "norm": None,
            "rank_bound": head.rank_bound,
            "options": head.options(),
        }
        named = {
            "source": getattr(model.config, "name_or_path", "") or "memory",
            "kind": "object",
            "architecture": architecture,
            "hash": _digest(head),
            "revision": None,
        }
        provenance = {"checks": list(self.checks), "seed": self.seed, "device": self.device}
        return Record(named, described, check_vocabulary(head.out_features, size, None, holes), provenance=provenance)

    def _parity(self, head: Head, model: Any, tokenizer: Any) -> Check:
        """Whether the model's scores are the head's: nothing may follow it, such as a soft-cap of the model.

        Raises:
            IntegrityError: If their log-probabilities differ by more than rounding.
        """
        try:
            entered, scores = integrations.head_and_scores(model, tokenizer, self.text)
            with torch.no_grad(), integrations.evaluating(model):
                mine = head.log_prob(entered).double()
        except ValueError as error:  # what the head says of the shape
            raise InputError(f"A {type(head).__name__} cannot stand as this model's output layer: {error}") from None
        theirs = scores.double().log_softmax(-1)
        out = mine == -torch.inf
        gap = torch.where(out & (theirs == -torch.inf), 0.0, mine - theirs)  # a class that both take out is no gap
        error = float(gap.abs().amax())
        # The same product twice: what is left is the rounding of a score to the dtype of the model's.
        allowed = max(1e-4, 2 * torch.finfo(scores.dtype).eps * float(mine.masked_fill(out, 0.0).abs().amax()))
        said = f"largest difference of a log-probability {error:.2g} nats (tolerance {allowed:.2g})"
        if not error <= allowed:
            raise IntegrityError(
                f"The model's scores are not those of its head, a {type(head).__name__}: {said}. Does the model apply "
                "a soft-cap or a scale of its own after it? [UNE020]"
            )
        return Check("UNE020", "ok", f"The model's scores are those of its head: {said}.")


def _digest(head: Head) -> str:
    """SHA-256 of all numbers of a head, with their names."""
    digest = hashlib.sha256()
    for name, tensor in head.state_dict().items():
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
