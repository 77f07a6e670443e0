"""Tokens that are not too much less probable than the best one."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unembed.decoding._history import History
from unembed.decoding.filters._base import Selection, or_best
from unembed.decoding.filters._parameters import Number, at_least_one, column, within


def _reference(scores: Float[Tensor, " V"], m: float, min_keep: int = 1) -> Bool[Tensor, " V"]:
    """One row: `p >= m max p`, in float64, and the most probable ones."""
    probabilities = torch.softmax(scores.double(), -1)
    order = sorted(range(len(scores)), key=lambda v: (-float(scores[v]), v))
    kept = probabilities >= m * probabilities.max()
    kept[order[:min_keep]] = True
    return kept


@dataclass(frozen=True)
class MinP(Selection):
    """`p >= m max p` (Nguyen et al., 2024, arXiv:2407.01082), found from the scores: `max z - z <= -log m`.

    Args:
        m: From 0, which keeps all, to 1.
        min_keep: Kept at least.
    """

    m: Number
    min_keep: int = 1

    def __post_init__(self) -> None:
        at_least_one(self.min_keep)
        within("m", self.m, 0, 1)

    def keep(self, scores: Float[Tensor, "B V"], history: History | None) -> Bool[Tensor, "B V"]:
        """Scores near enough to the largest."""
        most = -column("m", self.m, scores).log().to(scores.dtype)
        # Relative to the largest: beside a large offset `log m` would be rounded away.
        kept = (scores.amax(-1, keepdim=True) - scores <= most) & (scores > -torch.inf)
        return or_best(kept, scores, self.min_keep)
