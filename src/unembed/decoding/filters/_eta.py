"""Tokens of at least a probability that falls with the entropy."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unembed.decoding._history import History
from unembed.decoding.filters._base import Selection, or_best
from unembed.decoding.filters._parameters import Number, at_least_one, column, within


def _reference(scores: Float[Tensor, " V"], epsilon: float, min_keep: int = 1) -> Bool[Tensor, " V"]:
    """One row: `p >= min(e, sqrt(e) exp(-H))`, in float64, and the most probable ones."""
    probabilities = torch.softmax(scores.double(), -1)
    entropy = -torch.xlogy(probabilities, probabilities).sum()
    order = sorted(range(len(scores)), key=lambda v: (-float(scores[v]), v))
    kept = probabilities >= min(epsilon, epsilon**0.5 * float(torch.exp(-entropy)))
    kept[order[:min_keep]] = True
    return kept


@dataclass(frozen=True)
class Eta(Selection):
    """`p >= min(e, sqrt(e) exp(-H))` with the entropy H (Hewitt et al., 2022, arXiv:2210.15191).

    Args:
        epsilon: From 0 to 1.
        min_keep: Kept at least.
    """

    epsilon: Number
    min_keep: int = 1

    def __post_init__(self) -> None:
        at_least_one(self.min_keep)
        within("epsilon", self.epsilon, 0, 1)

    def keep(self, scores: Float[Tensor, "B V"], history: History | None) -> Bool[Tensor, "B V"]:
        """Probable enough ones."""
        probabilities = torch.softmax(scores, -1)
        entropy = -torch.special.xlogy(probabilities, probabilities).sum(-1, keepdim=True, dtype=torch.float64)
        e = column("epsilon", self.epsilon, scores)
        least = torch.minimum(e, e.sqrt() * (-entropy).exp())
        return or_best(probabilities >= least.to(scores.dtype), scores, self.min_keep)
