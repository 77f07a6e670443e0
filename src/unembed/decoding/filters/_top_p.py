"""The most probable tokens that together have a given mass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unembed.decoding._history import History
from unembed.decoding._prefix import shortest_prefix
from unembed.decoding.filters._base import Selection, or_best
from unembed.decoding.filters._parameters import Number, at_least_one, column, within

SLACK = 4  # roundings of a running sum that count as having reached the mass


def _reference(scores: Float[Tensor, " V"], p: float, min_keep: int = 1) -> Bool[Tensor, " V"]:
    """One row, by a sort in float64; the mass counts as reached within 4 of float64's roundings."""
    probabilities = torch.softmax(scores.double(), -1)
    order = sorted(range(len(scores)), key=lambda v: (-float(scores[v]), v))
    kept, mass = torch.zeros_like(scores, dtype=torch.bool), 0.0
    for place, v in enumerate(order):
        if place >= min_keep and mass >= p - SLACK * torch.finfo(torch.float64).eps and p < 1:
            break
        kept[v] = True
        mass += float(probabilities[v])
    return kept


@dataclass(frozen=True)
class TopP(Selection):
    """The shortest run of most probable tokens whose mass is at least p (Holtzman et al., 2020, arXiv:1904.09751).

    Equal scores go by the lowest index. The mass counts as reached at `p - 4 eps` of float32 (of float64 for scores
    of that). `p >= 1` keeps all, `p <= 0` the most probable one.

    Args:
        p: Mass to keep.
        min_keep: Kept at least.
    """

    p: Number
    min_keep: int = 1

    def __post_init__(self) -> None:
        at_least_one(self.min_keep)
        within("p", self.p)

    def keep(self, scores: Float[Tensor, "B V"], history: History | None) -> Bool[Tensor, "B V"]:
        """The shortest prefix of each row that has the mass."""
        if not isinstance(self.p, Tensor) and self.p >= 1:
            return torch.ones_like(scores, dtype=torch.bool)
        peak = scores.amax(-1, keepdim=True)
        below = torch.where(scores > -torch.inf, peak - scores, torch.inf) + 0.0  # -0 has other bits
        weights = (-below).exp()
        p = column("p", self.p, scores)
        part = p - SLACK * torch.finfo(scores.dtype).eps
        kept = shortest_prefix(below, weights, (part * weights.double().sum(-1, keepdim=True)).squeeze(-1))
        return or_best(kept | (p >= 1), scores, self.min_keep)
