"""Softmax over a part of the classes: the k largest scores, or those above a threshold.

Shapes: any; one dimension holds the V classes of a row.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unembed.ops._require import require
from unembed.ops._scores import widened
from unembed.ops._softmax import broadcast, class_count, excluded_from, softmax

_Empty = Literal["raise", "largest", "zero"]


def _reference(
    x: Float[Tensor, "n V"], *, k: int | None = None, threshold: float | None = None, when_empty: _Empty = "raise"
) -> Float[Tensor, "n V"]:
    """What the two mean, in float64, a row at a time: which scores are kept, then softmax of those."""
    found = torch.zeros_like(x, dtype=torch.float64)
    for row, scores in zip(found, x.double(), strict=True):
        order = [v for v in range(len(scores)) if scores[v] != -torch.inf]
        order.sort(key=lambda v: (-float(scores[v]), v))
        kept = order[:k] if threshold is None else [v for v in order if scores[v] > threshold]
        if order and not kept:
            if when_empty == "raise":
                raise ValueError("`threshold` leaves a row without a score.")
            kept = order[:1] if when_empty == "largest" else []
        row[kept] = scores[kept].softmax(0)
    return found


def topk_softmax(
    x: Float[Tensor, ...],
    k: int,
    dim: int = -1,
    *,
    temperature: float | Float[Tensor, ...] = 1.0,
    mask: Bool[Tensor, ...] | None = None,
) -> Float[Tensor, ...]:
    """Softmax over exactly the k largest scores of a row, ties by the lowest index; the others have probability 0.

    With fewer than k scores that take part, over all of those. Which scores are kept is constant for a derivative. A
    row with NaN is NaN.

    Args:
        x: Scores; `-inf` takes no part.
        k: Scores to keep; more than V keeps all.
        dim: The dimension of the classes.
        temperature: As for `softmax`.
        mask: True where a class takes part; broadcasts to `x`.

    Raises:
        ValueError: If `k` is not positive, or as for `softmax`.
    """
    if k < 1:
        raise ValueError(f"`k` must be at least 1, got {k}.")
    excluded = excluded_from(x, mask)
    kept = largest(x.detach().masked_fill(excluded, -torch.inf), k, dim) & ~excluded
    return softmax(x, dim, temperature=temperature, mask=kept)


def largest(x: Tensor, k: int, dim: int) -> Tensor:
    """Which are the k largest of a row, ties by the lowest index; all where there are no more than k, or one is NaN."""
    if k >= class_count(x, dim):
        return torch.ones_like(x, dtype=torch.bool)
    least = x.topk(k, dim).values.amin(dim, keepdim=True)  # NaN counts as the largest, so it is among them
    above, equal = x > least, x == least
    room = k - above.sum(dim, keepdim=True)
    return above | (equal & (equal.cumsum(dim, dtype=torch.int32) <= room)) | least.isnan()


def threshold_softmax(
    x: Float[Tensor, ...],
    threshold: float | Float[Tensor, ...],
    dim: int = -1,
    *,
    temperature: float | Float[Tensor, ...] = 1.0,
    mask: Bool[Tensor, ...] | None = None,
    when_empty: _Empty = "raise",
) -> Float[Tensor, ...]:
    """Softmax over the scores above a threshold; the others have probability 0.

    Which scores are kept is constant for a derivative, so none goes to the threshold. A row with NaN is NaN.

    Args:
        x: Scores; `-inf` takes no part.
        threshold: Scores must be larger than this, before the temperature; a tensor broadcasts to `x`. Compared in
            float32 or wider.
        dim: The dimension of the classes.
        temperature: As for `softmax`.
        mask: True where a class takes part; broadcasts to `x`.
        when_empty: Of a row without a score above it: an error (zeros under vmap, where nothing can be looked at), all
            to its largest score (the first of equal ones), or zeros. A row where no class takes part is zeros in any
            case.

    Raises:
        ValueError: If a row has no score above the threshold, and `when_empty` is `raise`; if a threshold is NaN or
            does not broadcast; or as for `softmax`.
    """
    if when_empty not in ("raise", "largest", "zero"):
        raise ValueError(f"`when_empty` must be raise, largest or zero, got {when_empty!r}.")
    excluded = excluded_from(x, mask)
    scores = x.detach().to(widened(x.dtype)).masked_fill(excluded, -torch.inf)
    kept = (_above(scores, threshold) | scores.isnan().any(dim, keepdim=True)) & ~excluded
    empty = ~kept.any(dim, keepdim=True) & ~excluded.all(dim, keepdim=True)
    if when_empty == "raise":
        require(~empty, "`threshold` leaves a row without a score; lower it, or say what to do by `when_empty`.")
    elif when_empty == "largest":
        kept = torch.where(empty, largest(scores, 1, dim) & ~excluded, kept)
    return softmax(x, dim, temperature=temperature, mask=kept)


def _above(scores: Tensor, threshold: float | int | Tensor) -> Tensor:
    """Which scores are above a threshold that is not NaN."""
    if isinstance(threshold, Tensor):
        require(~threshold.detach().isnan(), "`threshold` must not be NaN.")
        return scores > broadcast("threshold", threshold.detach(), scores)
    if math.isnan(threshold):
        raise ValueError("`threshold` must not be NaN.")
    return scores > threshold
