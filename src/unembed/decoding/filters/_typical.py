"""Tokens whose information is nearest to the entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unembed.decoding._history import History
from unembed.decoding._largest import largest
from unembed.decoding._prefix import shortest_prefix
from unembed.decoding.filters._base import Selection
from unembed.decoding.filters._parameters import Number, at_least_one, column, within
from unembed.decoding.filters._top_p import SLACK


def _reference(scores: Float[Tensor, " V"], p: float, min_keep: int = 1) -> Bool[Tensor, " V"]:
    """One row, by a sort in float64."""
    log_p = torch.log_softmax(scores.double(), -1)
    entropy = -torch.xlogy(log_p.exp(), log_p.exp()).sum()
    order = sorted(range(len(scores)), key=lambda v: (abs(float(-log_p[v] - entropy)), v))
    kept, mass = torch.zeros_like(scores, dtype=torch.bool), 0.0
    for place, v in enumerate(order):
        if place >= min_keep and mass >= p - SLACK * torch.finfo(torch.float64).eps and p < 1:
            break
        kept[v] = True
        mass += float(log_p[v].exp())
    return kept


@dataclass(frozen=True)
class Typical(Selection):
    """Nearest to the entropy first, by `|-log p - H|`, until the mass is at least p (Meister et al., 2023).

    Slack and ends are those of `TopP`; equal distances go by the lowest index (arXiv:2202.00666).

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
        """The shortest prefix in the order of distance."""
        p = column("p", self.p, scores)
        log_p = torch.log_softmax(scores, -1)
        log_p = torch.where(scores > -torch.inf, log_p, -torch.inf)  # a row of only -inf would hold NaN
        weights = log_p.exp()
        entropy = -torch.where(weights > 0, weights * log_p, 0.0).sum(-1, keepdim=True, dtype=torch.float64)
        distance = torch.where(log_p > -torch.inf, (log_p + entropy.to(log_p.dtype)).abs(), torch.inf)
        heavy = weights.double().sum(-1, keepdim=True)
        mass = (p - SLACK * torch.finfo(scores.dtype).eps) * heavy
        kept = shortest_prefix(distance, weights, mass.squeeze(-1)) | (p >= 1)
        first = largest(-distance, min(self.min_keep, scores.shape[-1])).indices
        return kept.scatter_(-1, first, True)
