"""UNE105 `saturation`: how the hidden states spread, and how sure the predictions are.

Anisotropy after (Ethayarajh, 2019, arXiv:1909.00512); the spectrum of hidden states after (Godey et al., 2024,
arXiv:2404.07647).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unembed.diagnostics._accumulator import Accumulator
from unembed.diagnostics._bootstrap import DocumentSums, interval
from unembed.diagnostics._chunk import Chunk
from unembed.diagnostics._effective import effective_ranks
from unembed.diagnostics._head import LinearHead
from unembed.results import Finding, Result, Table

_ENTROPY_BINS = 50
_NORM_DECADES, _NORM_BINS, _NORM_SHOWN = (-4.0, 6.0), 6000, 60  # bins of 0.4 %, grouped to what is shown
_NLL, _ENTROPY, _TOP, _CORRECT = 1, 2, 3, 4  # columns of the sums, after the count


class Saturation(Accumulator):
    r"""Anisotropy and norms of hidden states, entropy and loss of predictions.

    Anisotropy is the mean cosine of two different predictions' hidden states, all pairs:
    $(\|\sum u\|^2 - N) / (N (N - 1))$ with $u = h / \|h\|$. Directions spread evenly give 0; a hidden state of zero
    counts as cosine 0 with all others.

    Args:
        head: The head under measurement.
        seed: Seed of the bootstrap.
    """

    name = "saturation"
    code = "UNE105"
    title = "Hidden states and predictions"
    sums = (
        "_documents",
        "_padding",
        "_bytes",
        "_units",
        "_sum",
        "_second",
        "_norms",
        "_norm_sums",
        "_entropies",
    )

    def __init__(self, head: LinearHead, *, seed: int = 0) -> None:
        super().__init__(head)
        self._seed = seed
        self._documents = DocumentSums(4)
        self._padding = 0.0
        self._bytes = 0
        self._units = torch.zeros(head.width, dtype=torch.float64)
        self._sum = torch.zeros(head.width, dtype=torch.float64)
        self._second = torch.zeros(head.width, head.width, dtype=torch.float64)
        self._norms = torch.zeros(_NORM_BINS, dtype=torch.float64)
        self._norm_sums = torch.zeros(3, dtype=torch.float64)  # norms, squared norms, norms that are not 0
        self._entropies = torch.zeros(_ENTROPY_BINS, dtype=torch.float64)

    def add(self, chunk: Chunk) -> None:
        """Add one chunk."""
        hidden = chunk.hidden.cpu().to(torch.float64)
        norms = torch.linalg.vector_norm(hidden, dim=1)
        self._units += (hidden / norms.clamp(min=1e-300)[:, None]).sum(0)
        self._sum += hidden.sum(0)
        self._second += hidden.T @ hidden
        self._norm_sums += torch.stack([norms.sum(), norms.square().sum(), (norms > 0).sum()])
        low, high = _NORM_DECADES
        place = (norms.clamp(min=1e-300).log10() - low) / (high - low)
        self._norms += _histogram(place, _NORM_BINS)

        entropy = chunk.entropy.cpu().to(torch.float64)
        self._entropies += _histogram(entropy / max(math.log(self.head.vocab), 1e-300), _ENTROPY_BINS)
        top = (1 / chunk.total).cpu().to(torch.float64)
        correct = chunk.correct.cpu().to(torch.float64)
        self._documents.add(chunk.documents, torch.stack([chunk.nll.cpu().double(), entropy, top, correct], dim=1))
        extra = self.head.extra_scores(chunk.hidden)
        if extra is not None:
            log_padding = torch.logsumexp(extra.double() if extra.device.type != "mps" else extra, -1).cpu().double()
            log_real = (chunk.total.log() + chunk.peak).cpu().double()
            self._padding += float(torch.sigmoid(log_padding - log_real).sum())

    def add_bytes(self, count: int) -> None:
        """Say that the targets added so far stand for `count` more bytes of text; gives `bits_per_byte`."""
        self._bytes += count

    def result(self) -> Result:
        """Anisotropy with its null, spectrum of the hidden states, entropy and loss with intervals."""
        total = self._documents.total()
        count = int(total[0])
        if count == 0:
            return self._nothing("no prediction was seen")
        mean_norm = float(self._norm_sums[0]) / count
        variance = max(float(self._norm_sums[1]) / count - mean_norm**2, 0.0)
        pairs = count * (count - 1)
        values: dict[str, Any] = {
            "tokens": count,
            "anisotropy": float(self._units.square().sum() - self._norm_sums[2]) / pairs if pairs else None,
            "anisotropy_null": 0.0,
            "anisotropy_null_sd": math.sqrt(2 / (pairs * self.head.width)) if pairs else None,
            "hidden_norm": {"mean": mean_norm, "sd": math.sqrt(variance)},
            "hidden_ranks": effective_ranks(_singular_values(self._second).numpy()),
            "hidden_ranks_centred": effective_ranks(
                _singular_values(self._second - torch.outer(self._sum, self._sum) / count).numpy()
            ),
            "loss": self._mean(_NLL),
            "bits_per_byte": float(total[_NLL]) / math.log(2) / self._bytes if self._bytes else None,
            "entropy": self._mean(_ENTROPY),
            "entropy_uniform": math.log(self.head.vocab),
            "top_probability": self._mean(_TOP),
            "accuracy": self._mean(_CORRECT),
            "padding_probability": None if self.head.extra_rows is None else self._padding / count,
        }
        return Result(
            self.name, self.code, self.title, values, (self._entropy_table(), self._norm_table()), _findings(values)
        )

    def _mean(self, column: int) -> dict[str, Any]:
        total = self._documents.total()
        ends = interval(self._documents, lambda sums: sums[:, column] / sums[:, 0], seed=self._seed)
        return {"mean": float(total[column] / total[0]), "ci95": ends}

    def _entropy_table(self) -> Table:
        edges = np.linspace(0, math.log(self.head.vocab), _ENTROPY_BINS + 1)
        return Table(
            "saturation_entropy",
            "Predictions by entropy",
            {"from": edges[:-1], "to": edges[1:], "tokens": self._entropies.numpy().astype(np.int64)},
            {
                "from": "lower edge, nats",
                "to": "upper edge, nats; the last is log V",
                "tokens": "predictions in the bin",
            },
        )

    def _norm_table(self) -> Table:
        edges = np.logspace(*_NORM_DECADES, _NORM_BINS + 1)
        counts = self._norms.numpy().astype(np.int64)
        used = np.flatnonzero(counts)
        group = -(-(used[-1] + 1 - used[0]) // _NORM_SHOWN)
        starts = np.arange(used[0], used[-1] + 1, group)
        return Table(
            "saturation_norms",
            "Hidden states by norm",
            {
                "from": edges[starts],
                "to": edges[np.minimum(starts + group, _NORM_BINS)],
                "tokens": np.add.reduceat(counts, starts),
            },
            {"from": "lower edge of the norm", "to": "upper edge", "tokens": "predictions in the bin"},
        )


def _histogram(place: Tensor, bins: int) -> Tensor:
    """Counts by bin for places in [0, 1]; what lies outside goes to the first or last bin."""
    index = (place * bins).floor().clamp(0, bins - 1).to(torch.int64)
    return torch.bincount(index, minlength=bins).to(torch.float64)


def _singular_values(second: Tensor) -> Tensor:
    return torch.linalg.eigvalsh(second).clamp(min=0).sqrt().flip(0)


def _findings(values: dict[str, Any]) -> tuple[Finding, ...]:
    loss, entropy = values["loss"], values["entropy"]
    span = f" (95 % interval {loss['ci95'][0]:.3g} to {loss['ci95'][1]:.3g})" if loss["ci95"] else ""
    found = [
        Finding(
            Saturation.code,
            "info",
            "One hidden state has no neighbours to compare with"
            if values["anisotropy"] is None
            else f"Two hidden states have a cosine of {values['anisotropy']:.2f} on average",
            f"null 0 for evenly spread directions (standard deviation {values['anisotropy_null_sd'] or 0:.1g}); "
            f"90 % of the centred energy in {values['hidden_ranks_centred']['directions_90']:,} directions",
            f"Loss {loss['mean']:.3f} nats{span}, entropy {entropy['mean']:.3f} nats.",
            "Anisotropy alone is not a fault: a shared direction cancels in the softmax if W is centred.",
        )
    ]
    if (values["padding_probability"] or 0) > 1e-4:
        found.append(
            Finding(
                Saturation.code,
                "warning",
                "Padding rows draw probability",
                f"{values['padding_probability']:.2e} of the probability on average",
                "Sampling without a mask can return ids that no token has.",
                "The other numbers of this report leave these rows out.",
            )
        )
    return tuple(found)
