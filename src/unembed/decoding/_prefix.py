"""The shortest prefix of a row, in the order of a key, that has a given mass: top-p and typical without a sort.

The bits of a float that is not negative grow with it, so their upper half says in which of 32,768 bins a key lies. The
masses of the bins give the one where the prefix ends, and only what lies in that one is sorted.

Shapes: B rows, V vocabulary, M entries of the fullest last bin.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

_BINS = 1 << 15
_ROWS = 256  # at a time: bins of float64 take a quarter of a megabyte a row


def _reference(
    keys: Float[Tensor, "B V"], weights: Float[Tensor, "B V"], mass: Float[Tensor, " B"]
) -> Bool[Tensor, "B V"]:
    """What `shortest_prefix` means: a stable sort and a running sum, in float64."""
    order = keys.argsort(dim=-1, stable=True)
    heavy = weights.double().gather(-1, order)
    before = heavy.cumsum(-1) - heavy
    return torch.zeros_like(keys, dtype=torch.bool).scatter_(-1, order, before < mass.double()[:, None])


def shortest_prefix(
    keys: Float[Tensor, "B V"], weights: Float[Tensor, "B V"], mass: Float[Tensor, " B"]
) -> Bool[Tensor, "B V"]:
    """Which are needed to reach a mass, the smallest keys first, equal ones by the lowest index.

    Sums are float64, and those of a row do not depend on the others.

    Args:
        keys: At least +0; infinity comes last.
        weights: At least 0.
        mass: To reach; nothing is kept where it is not positive, all where it is more than there is.
    """
    if keys.dtype != torch.float32 or keys.shape[-1] < 64:  # wide keys have no bits to spare; short rows nothing to win
        return _reference(keys, weights, mass)
    parts = (_by_bins(*part) for part in zip(keys.split(_ROWS), weights.split(_ROWS), mass.split(_ROWS), strict=True))
    return torch.cat(list(parts)) if len(keys) > _ROWS else next(parts)


def _by_bins(
    keys: Float[Tensor, "B V"], weights: Float[Tensor, "B V"], mass: Float[Tensor, " B"]
) -> Bool[Tensor, "B V"]:
    """`shortest_prefix` of a few rows of float32."""
    rows = len(keys)
    bins = keys.view(torch.int32) >> 16
    first = torch.arange(rows, device=keys.device)[:, None] * _BINS
    heavy, goal = weights.double(), mass.double()[:, None]
    summed = torch.bincount((bins + first).flatten(), heavy.flatten(), rows * _BINS).view(rows, _BINS).cumsum(-1)
    last = torch.searchsorted(summed, goal)  # the first bin with which the mass is reached
    kept = bins < last
    row, place = (bins == last).nonzero(as_tuple=True)
    if not len(row):
        return kept
    order = keys[row, place].argsort(stable=True)
    order = order[row[order].argsort(stable=True)]  # by row, then by key; nonzero had them by index
    row, place = row[order], place[order]
    start = torch.searchsorted(row, torch.arange(rows, device=keys.device))  # where each row begins
    rank = torch.arange(len(row), device=keys.device) - start[row]
    # A line of its own for each row, or its sums would carry the rounding of the rows before.
    part: Float[Tensor, "B M"] = heavy.new_zeros(rows, int(rank.amax()) + 1)
    part[row, rank] = heavy[row, place]
    reached = torch.where(last > 0, summed.gather(-1, (last - 1).clamp(min=0)), 0.0)
    before = part.cumsum(-1) - part + reached
    kept[row, place] = (before < goal)[row, rank]
    return kept
