"""A draw from all scores of each row, without a sort whatever top-p keeps.

A class is drawn from all by sums of blocks, and the mass in front of it, in the order of probability, says whether
top-p keeps it. If not, the next attempt draws from what is in front of it. A draw that is accepted has the distribution
of what top-p keeps exactly: given that an attempt lands in a set, it has the distribution of that set. At least the
mass p is kept, so that a first attempt fails with probability `1 - p` at most.

Marks are floats: on a CPU, booleans and `torch.where` take four to ten times as long. Equal scores go by the lowest
index. Shapes: n rows, V vocabulary, G blocks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.decoding._largest import largest
from unembed.decoding._settings import Settings, cooled, part, require_finite
from unembed.ops import Noise
from unembed.ops._draw import block_sums, picked

_CHUNK = 1 << 21  # numbers of rows that go together on a CPU: what is read again is in its cache then


def draw_all(
    rows: Float[Tensor, "n V"], settings: Settings, which: Int[Tensor, " n"], noise: Noise
) -> Int[Tensor, " n"]:
    """A class a row.

    Args:
        rows: Scores, float32 or wider.
        settings: Its `top_k` is not looked at.
        which: Numbers of the rows in the batch, for noise and errors.
        noise: Uniform draws.
    """
    step = max(1, _CHUNK // rows.shape[-1]) if rows.device.type == "cpu" else len(rows)
    if len(rows) <= step:
        return _chunk(rows, settings, which, noise)
    places = torch.arange(len(rows), device=rows.device).split(step)
    return torch.cat([_chunk(rows[own[0] : own[-1] + 1], settings.at(own), which[own], noise) for own in places])


def _chunk(rows: Float[Tensor, "n V"], settings: Settings, which: Int[Tensor, " n"], noise: Noise) -> Int[Tensor, " n"]:
    peak = rows.amax(-1, keepdim=True)
    require_finite(peak, which)
    t, frozen = cooled(settings.temperature, rows)
    weights = rows - peak
    if isinstance(t, Tensor) or t != 1:
        weights.div_(t)
    weights.exp_()
    goal = sums = None
    if settings.top_p is not None:
        sums = block_sums(weights)
        goal = part(settings.top_p, rows.dtype) * sums.sum(-1, keepdim=True)
    if settings.min_p is not None:
        if isinstance(settings.min_p, Tensor):
            weights.mul_(_marks(torch.ge, weights, settings.min_p))
        else:
            least = torch.tensor(settings.min_p, dtype=weights.dtype)  # the number below it, in this dtype: 1 is kept
            torch.threshold_(weights, torch.nextafter(least, torch.zeros_like(least)).item(), 0.0)
    if sums is None or settings.min_p is not None:
        sums = block_sums(weights)
    found = picked(weights, sums, noise.at(which)())
    if goal is not None:
        _draw_again(rows, weights, goal.squeeze(-1), found, which=which, noise=noise)
    if frozen is not None and bool(frozen.any()):
        found = torch.where(frozen.squeeze(-1), largest(rows, 1).indices.squeeze(-1), found)
    return found


def _draw_again(
    rows: Float[Tensor, "n V"],
    weights: Float[Tensor, "n V"],
    goal: Float[Tensor, " n"],
    found: Int[Tensor, " n"],
    *,
    which: Tensor,
    noise: Noise,
) -> None:
    """Replace, in place, draws that have at least the mass `goal` in front of them."""
    left, attempt = torch.arange(len(weights), device=weights.device), 0
    while len(left):
        drawn = found[left][:, None]
        own = rows.gather(-1, drawn)
        # A bound in one pass: all that is not smaller is in front at most, but for the class itself.
        most = block_sums(_marks(torch.ge, rows, own).mul_(weights)).sum(-1) - weights.gather(-1, drawn).squeeze(-1)
        unsure = (most >= goal).nonzero().squeeze(1)
        if not len(unsure):
            return
        front = _in_front(rows[unsure], own[unsure], drawn[unsure]).mul_(weights[unsure])
        sums = block_sums(front)
        mass = sums.sum(-1)
        again = ((mass >= goal[unsure]) & (mass > 0)).nonzero().squeeze(1)
        rows, weights, goal, left = rows[unsure[again]], front[again], goal[unsure[again]], left[unsure[again]]
        attempt += 1
        if len(left):
            found[left] = picked(weights, sums[again], noise.at(which[left])(attempt))


def _in_front(rows: Float[Tensor, "n V"], own: Tensor, drawn: Tensor) -> Float[Tensor, "n V"]:
    """1 for classes that come before one, of a larger score, or an equal one and a lower index; 0 else."""
    index = torch.arange(rows.shape[-1], device=rows.device, dtype=torch.int32)
    equal = _marks(torch.eq, rows, own).mul_((index < drawn).to(rows.dtype))
    return _marks(torch.gt, rows, own).add_(equal)


def _marks(compare: Callable[..., Tensor], values: Tensor, other: Tensor) -> Tensor:
    """1 where a comparison holds, 0 elsewhere."""
    return compare(values, other.to(values.dtype), out=torch.empty_like(values))
