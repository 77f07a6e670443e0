"""One draw a row from scores, by sums of blocks: no sort, no noise a class, and no floor under long tails.

A uniform number a row is looked up in the running sum of the weights: of blocks in float64 first, then in the one block
where it falls. So float32 noise cannot hide classes whose mass is small one by one and large together.

Shapes: n rows, V classes, G blocks of S classes.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.ops._scores import widened

_BLOCK, _FEW = 64, 16  # S; rows that cost less one by one than what a vectorised call has to start


def _reference(scores: Float[Tensor, "n V"], uniform: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """What `draw` means: the first class at which the running sum of the probabilities is above the number."""
    total = torch.softmax(scores.double(), -1).cumsum(-1)
    goal = inside(uniform.double()[:, None], total[:, -1:])
    return (total <= goal).sum(-1)


def draw(scores: Float[Tensor, "n V"], uniform: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    """One class a row from the softmax of its scores; never one of probability 0.

    Args:
        scores: `-inf` is excluded; computed in float32 or wider.
        uniform: In [0, 1), float64 (float32 on MPS).

    Raises:
        ValueError: If a row has no finite score, or one of NaN or +inf.
    """
    scores = scores.to(widened(scores.dtype))
    best = scores.amax(-1, keepdim=True)
    fine = best.isfinite()
    if not bool(fine.all()):
        row = int((~fine).flatten().nonzero()[0])
        raise ValueError(f"Row {row} of `scores` has the largest score {float(best[row])}: expected a finite one.")
    weights = (scores - best).exp_()
    return picked(weights, block_sums(weights), uniform)


def picked(weights: Float[Tensor, "n V"], sums: Tensor, uniform: Tensor) -> Int[Tensor, " n"]:
    """The class at which the running sum of the weights passes a part of the whole: first its block, then itself.

    Few rows on a CPU go by numpy, which takes half the time there and finds the same classes.
    """
    if weights.device.type == "cpu" and len(weights) <= _FEW:
        on_host = (one.detach().numpy() for one in (weights, sums, uniform))
        return torch.from_numpy(_picked_on_host(*on_host))
    return _picked_on_device(weights, sums, uniform)


def _picked_on_device(weights: Tensor, sums: Tensor, uniform: Tensor) -> Tensor:
    total = sums.cumsum(-1)
    goal = inside(uniform[:, None], total[:, -1:])
    block = torch.searchsorted(total, goal, right=True)
    ids = block * _BLOCK + torch.arange(_BLOCK, device=weights.device)
    found = torch.where(ids < weights.shape[-1], weights.gather(-1, ids.clamp(max=weights.shape[-1] - 1)), 0.0)
    within_block = found.to(total.dtype).cumsum(-1)
    own = sums.gather(-1, block)
    share = (goal - (total.gather(-1, block) - own)) / own
    goal = inside(share.clamp(min=0), within_block[:, -1:])
    return block.squeeze(-1) * _BLOCK + torch.searchsorted(within_block, goal, right=True).squeeze(-1)


def _picked_on_host(weights: np.ndarray, sums: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    found = np.empty(len(weights), dtype=np.int64)
    totals = sums.cumsum(1)
    for row, total in enumerate(totals):
        goal = place_inside(uniform[row], total[-1])
        block = int(total.searchsorted(goal, "right"))
        start = block * _BLOCK
        within_block = weights[row, start : start + _BLOCK].astype(np.float64).cumsum()
        own = sums[row, block]
        share = max((goal - (total[block] - own)) / own, 0.0)
        goal = place_inside(share, within_block[-1])
        found[row] = start + int(within_block.searchsorted(goal, "right"))
    return found


def place_inside(uniform: float, total: float) -> float:
    """`inside` of two numbers."""
    return min(uniform * total, math.nextafter(total, 0.0))


def block_sums(weights: Float[Tensor, "n V"]) -> Float[Tensor, "n G"]:
    """Sums of blocks of classes, float64; the last block may be shorter."""
    width = weights.shape[-1]
    blocks = width // _BLOCK
    sums = weights[:, : blocks * _BLOCK].unflatten(1, (blocks, _BLOCK)).sum(-1)
    if blocks * _BLOCK < width:
        sums = torch.cat([sums, weights[:, blocks * _BLOCK :].sum(-1, keepdim=True)], -1)
    return sums if sums.device.type == "mps" else sums.double()


def inside(uniform: Tensor, total: Tensor) -> Tensor:
    """A part of a total that is less than all of it, whatever the rounding."""
    return (uniform * total).minimum(torch.nextafter(total, torch.zeros_like(total)))
