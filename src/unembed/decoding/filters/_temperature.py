"""Scores over a temperature."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from unembed.decoding._history import History
from unembed.decoding._largest import largest
from unembed.decoding.filters._base import Filter
from unembed.decoding.filters._parameters import Number, column, within


def _reference(scores: Float[Tensor, " V"], temperature: float) -> Float[Tensor, " V"]:
    """One row: `z / T`; 0 for the first of the largest at `T = 0`, 0 for all that take part at `T = inf`."""
    taking = scores > -torch.inf
    if temperature == 0:
        alone = torch.full_like(scores, -torch.inf)
        alone[int(scores.argmax())] = 0.0
        return alone if bool(taking.any()) else scores
    return torch.where(taking, scores / temperature, -torch.inf)


@dataclass(frozen=True)
class Temperature(Filter):
    """`z / T`. `T = 0` keeps the first of the largest scores alone; at `T = inf` all that take part become 0.

    Where a quotient would overflow, scores are first taken relative to their largest, which changes no probability.

    Args:
        temperature: T, from 0 to infinity.
    """

    temperature: Number

    def __post_init__(self) -> None:
        within("temperature", self.temperature, 0)

    def apply(self, scores: Float[Tensor, "B V"], history: History | None) -> Float[Tensor, "B V"]:
        """Scores over T."""
        if not isinstance(self.temperature, Tensor) and self.temperature == 1:
            return scores
        wide = scores.dtype
        t = column("temperature", self.temperature, scores)
        frozen = t == 0
        t = torch.where(frozen, 1.0, t).clamp(min=torch.finfo(wide).tiny).to(wide)  # float32 would make less 0
        peak = scores.detach().amax(-1, keepdim=True)
        inverse = 1 / t
        large = ~(peak.abs() * inverse).isfinite() | (inverse == torch.inf)
        offset = torch.where(large & (peak > -torch.inf), peak, 0.0)
        quotient = ((scores - offset) / t).clamp(min=torch.finfo(wide).min)
        found = torch.where(scores == -torch.inf, -torch.inf, quotient)
        if bool(frozen.any()):
            first = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, largest(scores.detach(), 1).indices, True)
            found = torch.where(frozen, torch.where(first, (scores - peak), -torch.inf), found)
            found = torch.where(peak == -torch.inf, -torch.inf, found)
        return found
