"""Tokens whose score is within some standard deviations of the best one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unembed.decoding._history import History
from unembed.decoding.filters._base import Selection, or_best
from unembed.decoding.filters._parameters import Number, at_least_one, column, within


def _reference(scores: Float[Tensor, " V"], n: float, min_keep: int = 1) -> Bool[Tensor, " V"]:
    """One row: `z >= max z - n std(z)` over finite scores, in float64, and the most probable ones."""
    finite = scores.double()[scores > -torch.inf]
    order = sorted(range(len(scores)), key=lambda v: (-float(scores[v]), v))
    kept = scores > -torch.inf
    if len(finite):
        kept &= scores.double() >= finite.max() - n * finite.std(correction=0)
    kept[order[:min_keep]] = True
    return kept


@dataclass(frozen=True)
class TopNSigma(Selection):
    """`z >= max z - n std(z)`, population standard deviation over finite scores (Tang et al., 2024, arXiv:2411.07641).

    Args:
        n: Standard deviations, from 0 on.
        min_keep: Kept at least.
    """

    n: Number
    min_keep: int = 1

    def __post_init__(self) -> None:
        at_least_one(self.min_keep)
        within("n", self.n, 0)

    def keep(self, scores: Float[Tensor, "B V"], history: History | None) -> Bool[Tensor, "B V"]:
        """Near enough to the largest."""
        finite = scores > -torch.inf
        peak = scores.amax(-1, keepdim=True)
        # Relative to the largest, or an offset of the scores would round their spread away.
        below = torch.where(finite, peak - scores, 0.0)
        count = finite.sum(-1, keepdim=True).clamp(min=1)
        mean = below.sum(-1, keepdim=True, dtype=torch.float64) / count
        spread = (
            torch.where(finite, below - mean.to(below.dtype), 0.0).square().sum(-1, keepdim=True, dtype=torch.float64)
        )
        n = column("n", self.n, scores)
        width = torch.where(n == torch.inf, torch.inf, n * (spread / count).sqrt()).to(
            below.dtype
        )  # inf * 0 is no number
        return or_best(finite & (below <= width), scores, self.min_keep)
