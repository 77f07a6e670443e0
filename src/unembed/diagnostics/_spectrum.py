"""UNE101 `spectrum`: singular values and effective ranks of the unembedding matrix, raw and row-centred."""

from __future__ import annotations

from typing import Any

import numpy as np

from unembed import ops
from unembed.diagnostics._accumulator import Accumulator
from unembed.diagnostics._chunk import Chunk
from unembed.diagnostics._effective import effective_ranks
from unembed.diagnostics._head import LinearHead
from unembed.results import Finding, Result, Table
from unembed.text import visible

_EXTREMES = 20
_BINS = 60


class Spectrum(Accumulator):
    """Spectrum of `W` and of `W - 1 mean^T`; needs no text.

    Centring takes away the part of `W` that adds the same amount to every score and so never moves a probability.
    """

    name = "spectrum"
    code = "UNE101"
    title = "Spectrum of the unembedding matrix"
    needs_text = False

    def add(self, chunk: Chunk) -> None:
        """Nothing to add: this measurement reads the weights only."""

    def result(self) -> Result:
        """Spectra, effective ranks, condition and norms by token."""
        head, svd = self.head, self.head.svd
        raw, centred = svd.values_raw.numpy(), svd.values.numpy()
        norms = ops.squared_norms(head.weight).sqrt().numpy()
        values: dict[str, Any] = {
            "rows": head.vocab,
            **_summary(raw, svd.rank_raw),
            "tolerance": svd.noise,
            "tolerance_rule": "||W||_F * max(eps(stored dtype) * (1/sqrt(D) + 1/sqrt(V)) / sqrt(3), 8 eps(float64))",
            "method": svd.method,
            "centred": _summary(centred, svd.rank),
            "mean_row_share": float(svd.rows * (svd.mean**2).sum() / (raw**2).sum()) if raw.any() else 0.0,
            "all_rows": self._all_rows(),
            "norm": _quantiles(norms),
        }
        return Result(
            self.name,
            self.code,
            self.title,
            values,
            tables=(_spectra(raw, centred), _histogram(norms), _extremes(norms, head)),
            findings=tuple(_findings(values, head)),
        )

    def _all_rows(self) -> dict[str, Any] | None:
        """The same with the padding rows, where there are any."""
        if self.head.extra_rows is None:
            return None
        svd = ops.tall_svd([self.head.weight, self.head.extra_rows], noise_eps=self.head.noise_eps)
        return {
            "rows": svd.rows,
            **_summary(svd.values_raw.numpy(), svd.rank_raw),
            "centred": _summary(svd.values.numpy(), svd.rank),
        }


def _summary(values: np.ndarray, rank: int) -> dict[str, Any]:
    return {
        "rank": rank,
        "largest": float(values[0]),
        "smallest": float(values[-1]),
        # of the directions that count; a rank-deficient matrix has no finite condition otherwise
        "condition": float(values[0] / values[rank - 1]) if rank else None,
        "frobenius": float(np.sqrt((values**2).sum())),
        **effective_ranks(values),
    }


def _quantiles(norms: np.ndarray) -> dict[str, float]:
    levels = {"min": 0.0, "q05": 0.05, "median": 0.5, "q95": 0.95, "max": 1.0}
    return {name: float(np.quantile(norms, level)) for name, level in levels.items()}


def _spectra(raw: np.ndarray, centred: np.ndarray) -> Table:
    def outside(values: np.ndarray) -> np.ndarray:
        energy = values**2
        return 1 - np.cumsum(energy) / max(energy.sum(), np.finfo(float).tiny)

    return Table(
        "spectrum_values",
        "Singular values, largest first",
        {
            "index": np.arange(1, len(raw) + 1),
            "raw": raw,
            "centred": centred,
            "raw_energy_left": outside(raw).clip(0),
            "centred_energy_left": outside(centred).clip(0),
        },
        {
            "raw": "singular value of W",
            "centred": "singular value of W less its mean row",
            "raw_energy_left": "share of the energy in smaller directions",
            "centred_energy_left": "the same for the centred matrix",
        },
    )


def _histogram(norms: np.ndarray) -> Table:
    low, high = float(norms.min()), float(norms.max())
    # One value for all (or nearly): widen, or floating point cannot tell the bins apart.
    margin = max((high - low) * 1e-9, abs(high) * 1e-6, 1e-12)
    counts, edges = np.histogram(norms, bins=_BINS, range=(low - margin, high + margin))
    return Table(
        "spectrum_norms",
        "Rows of W by their norm",
        {"from": edges[:-1], "to": edges[1:], "tokens": counts},
        {"from": "lower edge of the norm", "to": "upper edge", "tokens": "rows in the bin"},
    )


def _extremes(norms: np.ndarray, head: LinearHead) -> Table:
    order = np.argsort(norms, kind="stable")
    count = min(_EXTREMES, len(order) // 2)
    ids = np.concatenate([order[:count], order[len(order) - count :]])
    return Table(
        "spectrum_extremes",
        "Tokens with the smallest and the largest rows",
        {
            "id": ids,
            "token": np.array([visible(head.tokens[i]) if head.tokens else "" for i in ids], dtype=str),
            "norm": norms[ids],
            "over_median": norms[ids] / max(float(np.median(norms)), np.finfo(float).tiny),
        },
        {"norm": "norm of the row", "over_median": "norm over the median norm"},
    )


def _findings(values: dict[str, Any], head: LinearHead) -> list[Finding]:
    rank, width = values["rank"], min(head.width, head.vocab)
    evidence = (
        f"rank {rank:,} of {width:,} raw, {values['centred']['rank']:,} row-centred; "
        f"tolerance {values['tolerance']:.3g} (the noise of rounding to the stored dtype)"
    )
    full = rank == width
    spread = values["centred"]["directions_90"]
    return [
        Finding(
            Spectrum.code,
            "info" if full else "warning",
            "The matrix uses all its directions" if full else f"{width - rank:,} of {width:,} directions are empty",
            evidence,
            "The rank is what bounds the head, not D."
            if not full
            else f"90 % of the centred energy lies in {spread:,} of {width:,} directions.",
            "A full rank does not say that the directions are used well, nor that a larger D would help.",
        )
    ]
