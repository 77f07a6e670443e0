"""UNE103 `gradient`: what part of the logit gradient the head lets through, against its null.

Definition and conventions: Eq. 10 of (Godey and Artzi, 2026, arXiv:2603.10145) is `destroyed`. Two conventions are
printed: raw `W`, and row-centred `W`, which does not change when a constant is added to all scores.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unembed import ops
from unembed.diagnostics._accumulator import Accumulator
from unembed.diagnostics._bootstrap import MIN_DOCUMENTS, RESAMPLES, DocumentSums, interval
from unembed.diagnostics._chunk import Chunk
from unembed.diagnostics._head import LinearHead
from unembed.diagnostics._logit_gradient import LogitGradient, kept_energy, kept_null, kept_null_sd
from unembed.results import Finding, Result, Table

_FULL, _RAW, _CENTRED = 1, 2, 3  # columns of the sums, after the count
_DIRECTIONS = 32  # random ones, along which the gradients are looked at for the spread of the null
_BANDS = (1, 2, 4, 10, 30, 100, 300, 1000)  # lower ends: how often the target occurs in the measured text


class Gradient(Accumulator):
    r"""Kept and destroyed share of the norm of the logit gradient.

    $$\text{kept} = \|G\Pi\|_F / \|G\|_F, \quad \text{destroyed} = \sqrt{1 - \text{kept}^2}, \quad
    \text{null} = \sqrt{r / V}$$

    The null is a mean over random subspaces. One of them keeps more or less, the more so the fewer directions the
    gradients go in; that spread is estimated too, from random directions.

    Args:
        head: The head under measurement.
        seed: Seed of the bootstrap and of the directions.
    """

    name = "gradient"
    code = "UNE103"
    title = "Logit gradient that passes the head"
    needs_basis = True
    sums = ("_documents", "_targets", "_seen_along")
    settings = ("_seed",)

    def __init__(self, head: LinearHead, *, seed: int = 0) -> None:
        super().__init__(head)
        self._seed = seed
        self._documents = DocumentSums(3)
        # by target: count, sums of the full, raw and centred energy, then the products the band intervals need
        self._targets = torch.zeros(head.vocab, 9, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        directions = torch.randn(head.vocab, _DIRECTIONS, generator=generator)
        self._directions = directions.to(head.weight.device, torch.promote_types(head.weight.dtype, torch.float32))
        self._seen_along = torch.zeros(_DIRECTIONS, _DIRECTIONS, dtype=torch.float64)

    def add(self, chunk: Chunk) -> None:
        """Add the energies of one chunk."""
        gradient = LogitGradient(chunk)
        full = gradient.energy()
        raw, centred = kept_energy(self.head, gradient.coordinates())
        energies = torch.stack([full, raw, torch.zeros_like(raw) if centred is None else centred], dim=1)
        self._documents.add(chunk.documents, energies)
        seen = gradient.along(self._directions).cpu().to(torch.float64)
        self._seen_along += seen.T @ seen
        products = [energies[:, :1] * energies, energies[:, 1:] ** 2]
        rows = torch.cat([torch.ones(len(chunk), 1, dtype=torch.float64), energies, *products], dim=1)
        self._targets.index_add_(0, chunk.targets.cpu(), rows)

    def result(self) -> Result:
        """Both conventions with null, ratio and interval; kept share by how often the target occurs."""
        if self.head.masked:
            return self._nothing("the bias masks ids with -inf: leave their rows out of the weight")
        total = self._documents.total()
        if not total[_FULL] > 0:
            return self._nothing("no prediction with a gradient was seen")
        values: dict[str, Any] = {
            "tokens": int(total[0]),
            "documents": len(self._documents),
            "raw": self._convention(_RAW),
            "centred": self._convention(_CENTRED) if self.head.softcap is None else None,
            "interval": f"expanded percentile bootstrap over documents, {RESAMPLES} resamples"
            if len(self._documents) >= MIN_DOCUMENTS
            else f"none: {len(self._documents)} document{'s'[: len(self._documents) != 1]}, at least {MIN_DOCUMENTS} "
            "are needed (a line of a .jsonl file is one)",
            "mean_squared_norm": float(total[_FULL] / total[0]),
            "before_softcap": self.head.softcap is not None,
        }
        return Result(self.name, self.code, self.title, values, (self._bands(),), tuple(_findings(values, self.head)))

    def _convention(self, column: int) -> dict[str, Any]:
        centre = column == _CENTRED
        null = kept_null(self.head, centre=centre)
        total = self._documents.total()
        kept_squared = min(float(total[column] / total[_FULL]), 1.0)
        ends = interval(self._documents, lambda sums: np.sqrt(sums[:, column] / sums[:, _FULL]), seed=self._seed)
        return {
            "rank": self.head.svd.rank if centre else self.head.svd.rank_raw,
            "kept": math.sqrt(kept_squared),
            "destroyed": math.sqrt(1 - kept_squared),
            "kept_null": null,
            "ratio": math.sqrt(kept_squared) / null if null else None,
            "ratio_ci95": [end / null for end in ends] if ends and null else None,
            "ratio_null_sd": kept_null_sd(self.head, self._alignment(), centre=centre),
        }

    def _alignment(self) -> float:
        """Estimate of `tr M^2 / (tr M)^2` with `M = G^T G`: for Gaussian s and t, `E (s^T M t)^2 = tr M^2`."""
        off_diagonal = ~torch.eye(_DIRECTIONS, dtype=torch.bool)
        return float(self._seen_along[off_diagonal].square().mean() / self._documents.total()[_FULL] ** 2)

    def _bands(self) -> Table:
        """Kept share by frequency band; the interval treats tokens as independent (delta method)."""
        centre = self.head.softcap is None
        column = _CENTRED if centre else _RAW
        null = kept_null(self.head, centre=centre)
        counts = self._targets[:, 0]
        leverage = ops.squared_norms(self.head.columns.centred)
        rows = []
        for low, high in zip(_BANDS, (*_BANDS[1:], math.inf), strict=True):
            members = (counts >= low) & (counts < high)
            if bool(members.any()):
                sums = self._targets[members].sum(0)
                kept, error = _ratio_with_error(sums, column)
                mean_leverage = float((leverage[members] * counts[members]).sum() / counts[members].sum())
                rows.append((low, high - 1, int(members.sum()), int(sums[0]), kept, error, mean_leverage))
        low, high, types, tokens, kept, error, lever = (np.array(column) for column in zip(*rows, strict=True))
        return Table(
            "gradient_bands",
            "Kept share by how often the target occurs in the measured text",
            {
                "occurrences_from": low.astype(np.int64),
                "occurrences_to": np.where(np.isinf(high), -1, high).astype(np.int64),
                "types": types,
                "tokens": tokens,
                "kept": kept,
                "kept_low": np.clip(kept - 1.96 * error, 0, 1),
                "kept_high": np.clip(kept + 1.96 * error, 0, 1),
                "ratio": kept / null if null else np.full_like(kept, np.nan),
                "kept_if_one_hot": np.sqrt(lever),
            },
            {
                "occurrences_to": "-1: no upper end",
                "types": "distinct targets",
                "tokens": "predictions",
                "kept": f"root of kept over full energy, {'row-centred' if centre else 'raw'} convention",
                "kept_low": "95 % interval, delta method over tokens taken as independent",
                "kept_high": "upper end",
                "ratio": f"kept over the null {null:.5g}",
                "kept_if_one_hot": "root of the mean leverage of the target's row: what a one-hot error keeps",
            },
        )


def _ratio_with_error(sums: Tensor, column: int) -> tuple[float, float]:
    """`sqrt(K / F)` and its standard error from per-token sums of F, K, F^2, F K and K^2."""
    full, kept = float(sums[_FULL]), float(sums[column])
    if full <= 0 or kept <= 0:
        return 0.0, 0.0
    ratio = kept / full
    full_squared, product = float(sums[4]), float(sums[3 + column])
    kept_squared = float(sums[5 + column])
    variance = max(kept_squared - 2 * ratio * product + ratio**2 * full_squared, 0.0) / full**2
    return math.sqrt(ratio), math.sqrt(variance) / (2 * math.sqrt(ratio))


def _findings(values: dict[str, Any], head: LinearHead) -> list[Finding]:
    name, numbers = ("raw", values["raw"]) if values["centred"] is None else ("row-centred", values["centred"])
    if numbers["ratio"] is None:
        return [
            Finding(
                Gradient.code,
                "warning",
                "Nothing of the gradient passes the head",
                f"rank {numbers['rank']:,} in {head.vocab:,} ({name} convention, {values['tokens']:,} tokens)",
                "All rows of the matrix are equal within its rounding, so hidden states do not move a probability.",
            )
        ]
    ends, sd = numbers["ratio_ci95"], numbers["ratio_null_sd"]
    span = f", 95 % interval {ends[0]:.3g} to {ends[1]:.3g} over {values['documents']:,} documents" if ends else ""
    evidence = (
        f"kept {numbers['kept']:.4f} of the norm, a random subspace of rank {numbers['rank']:,} in {head.vocab:,} "
        f"keeps {numbers['kept_null']:.4f}: ratio {numbers['ratio']:.3g}{span}; random subspaces have 1 "
        f"with a standard deviation of {sd:.2g} ({name} convention, {values['tokens']:,} tokens)"
    )
    low, high = ends or (numbers["ratio"], numbers["ratio"])
    below, above = high < 1 - 1.96 * sd, low > 1 + 1.96 * sd
    return [
        Finding(
            Gradient.code,
            "warning" if below and ends else "info",
            "The head passes less of the gradient than a random subspace would"
            if below
            else f"The head passes {numbers['ratio']:.3g} times what a random subspace of its rank would"
            if above
            else f"The head passes about what a random subspace of its rank would: {numbers['ratio']:.3g} times",
            evidence,
            f"{100 * numbers['destroyed']:.2f} % of the norm of the logit gradient is outside what the body can be "
            "told in one step; a random head of this rank leaves out "
            f"{100 * math.sqrt(1 - numbers['kept_null'] ** 2):.2f} %.",
            "Compression measured, not learning lost: whether it harms training is for controlled experiments to say. "
            "The ratio pools all targets and leans on the frequent ones; the bands tell them apart.",
        )
    ]
