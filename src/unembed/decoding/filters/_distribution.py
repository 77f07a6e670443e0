"""What is left of a distribution after a filter, and what it dropped.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor

if TYPE_CHECKING:
    from unembed.decoding.filters._base import Filter


@dataclass(frozen=True)
class Distribution:
    """What a row can still become after a stage.

    Args:
        stage: The filter.
        ids: Kept ids of each row, the most probable first, equal ones by number.
        probabilities: The same in probability; each row sums to one.
        dropped: Mass that this stage excluded, of the distribution it was given; 0 where that had none.
    """

    stage: str
    ids: list[Int[Tensor, " kept"]]
    probabilities: list[Float[Tensor, " kept"]]
    dropped: Float[Tensor, " B"]

    @classmethod
    def between(cls, stage: str, before: Float[Tensor, "B V"], after: Float[Tensor, "B V"]) -> Distribution:
        """From the scores that went in and came out."""
        gone = (after == -torch.inf).detach()
        mass = torch.softmax(before.detach().double(), -1).nan_to_num(nan=0.0)  # NaN: a row without any score
        dropped = mass.masked_fill(~gone, 0.0).sum(-1)
        ids, probabilities = [], []
        for row in after.detach().double():
            order = row.sort(descending=True, stable=True)
            kept = int((order.values > -torch.inf).sum())
            ids.append(order.indices[:kept])
            probabilities.append(torch.softmax(order.values[:kept], 0))
        return cls(stage, ids, probabilities, dropped)


def described(given: Filter) -> str:
    """The filter as one would write it, tensors by their shape."""
    shown = []
    for one in fields(given):
        value = getattr(given, one.name)
        if value != one.default if not isinstance(value, Tensor) else True:
            shown.append(f"{one.name}={f'[{len(value)}]' if isinstance(value, Tensor) and value.ndim else value}")
    return f"{type(given).__name__}({', '.join(shown)})"
