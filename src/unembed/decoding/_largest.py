"""The k largest of a row without a sort of it: of parts by their maxima first, then of what the best parts hold.

Equal values go by the lowest index. Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.decoding import _compiled


class Largest(NamedTuple):
    """Values, the largest first, and where they are."""

    values: Float[Tensor, "B k"]
    indices: Int[Tensor, "B k"]


def _reference(x: Float[Tensor, "B V"], k: int) -> Largest:
    """What `largest` means: a stable sort."""
    found = x.sort(dim=-1, descending=True, stable=True)
    return Largest(found.values[:, :k], found.indices[:, :k])


def largest(x: Float[Tensor, "B V"], k: int) -> Largest:
    """The k largest of each row in order, equal ones by the lowest index, NaN before all; k is at most V.

    A value of the k largest lies in one of the k parts of the row whose maxima are the largest, if these differ.
    """
    if _compiled.can_list(x, k) and (found := _compiled.best(x, k)) is not None:
        return Largest(torch.from_numpy(found.values), torch.from_numpy(found.ids))
    width = x.shape[-1]
    size = _size(width, k)
    if size == 1 or not len(x):
        return _ordered(x, k)
    if x.device.type == "cpu" and x.dtype in (torch.float32, torch.float64):
        return _on_host(x.detach(), k, size) or _by_blocks(x, k, size)
    parts = width // size
    # Part j is every `parts`-th value from j on: their maxima are found along whole lines of memory.
    maxima = x[:, : parts * size].unflatten(1, (size, parts)).amax(1)
    most = maxima.topk(k + 1, -1)
    if not _distinct(most.values):
        return _by_blocks(x, k, size)
    best = most.indices[:, :k].sort(-1).values
    ids = (torch.arange(0, parts * size, parts, device=x.device)[:, None] + best[:, None]).flatten(1)
    return _among(x, ids, parts * size, k)


def _on_host(x: Float[Tensor, "B V"], k: int, size: int) -> Largest | None:
    """`largest` by numpy, whose selection takes a third of PyTorch's time; None where equal values are in the way."""
    width, parts = x.shape[-1], x.shape[-1] // size
    best = _chosen(x[:, : parts * size].unflatten(1, (size, parts)).amax(1).numpy(), k)
    if best is None:
        return None
    ids = np.empty((x.shape[0], size * k + width - parts * size), dtype=np.int64)
    ids[:, : size * k] = (best[:, None] + np.arange(0, parts * size, parts)[:, None]).reshape(x.shape[0], size * k)
    ids[:, size * k :] = np.arange(parts * size, width)  # what no part covers
    rows = np.arange(x.shape[0])[:, None]
    values = x.numpy()[rows, ids]
    best = _chosen(values, k)
    if best is None:
        return None
    values, ids = values[rows, best], ids[rows, best]
    order = (-values).argsort(1)
    values = values[rows, order]
    if not (values[:, 1:] < values[:, :-1]).all():
        return None
    return Largest(torch.from_numpy(values), torch.from_numpy(ids[rows, order]))


def _chosen(values: np.ndarray, k: int) -> np.ndarray | None:
    """Where the k largest of each row are, in the order of ids; None if they are not told apart from the next one."""
    width = values.shape[1]
    if k == width:
        return np.broadcast_to(np.arange(k), values.shape)
    cut = np.partition(values, width - k, axis=1)  # of one place: a second one takes numpy ten times as long
    least = cut[:, width - k]
    if not (cut[:, : width - k].max(1) < least).all():
        return None
    found = (values >= least[:, None]).nonzero()[1]
    return found.reshape(len(values), k) if len(found) == k * len(values) else None  # fewer where there is NaN


def _by_blocks(x: Float[Tensor, "B V"], k: int, size: int) -> Largest:
    """By blocks of neighbours: of blocks with equal maxima the first comes first, as of values inside them."""
    blocks = x.shape[-1] // size
    maxima = x[:, : blocks * size].unflatten(1, (blocks, size)).amax(-1)
    best = _ordered(maxima, k).indices.sort(-1).values
    ids = (best[..., None] * size + torch.arange(size, device=x.device)).flatten(1)
    return _among(x, ids, blocks * size, k)


def _among(x: Float[Tensor, "B V"], ids: Int[Tensor, "B n"], covered: int, k: int) -> Largest:
    """The largest among candidates, in the order of ids, and what the parts do not cover."""
    if covered < x.shape[-1]:
        rest = torch.arange(covered, x.shape[-1], device=x.device).expand(len(x), -1)
        ids = torch.cat([ids, rest], 1)
    found = _ordered(x.gather(1, ids), k)
    return Largest(found.values, ids.gather(1, found.indices))


def _size(width: int, k: int) -> int:
    """Values of a part so that maxima and candidates are about as many; 1 where nothing would be won."""
    size = 1
    while 2 * size * 2 * size * k <= width:
        size *= 2
    return size if size >= 8 else 1


def _ordered(x: Float[Tensor, "B V"], k: int) -> Largest:
    """`largest` by PyTorch, which says nothing about equal values: where there are any, by keys without equals."""
    found = x.topk(min(k + 1, x.shape[-1]), -1)
    if _distinct(found.values):
        return Largest(found.values[:, :k], found.indices[:, :k])
    if x.dtype != torch.float32:
        return _reference(x, k)
    bits = torch.where(x.isnan(), torch.nan, x + 0.0).view(torch.int32)  # -0 becomes 0, as they are equal; one NaN
    ordered = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    key = (ordered << 32) - torch.arange(x.shape[-1], device=x.device)
    indices = key.topk(k, -1).indices
    return Largest(x.gather(1, indices), indices)


def _distinct(values: Float[Tensor, "B k"]) -> bool:
    """Whether values that fall do so at each step."""
    if values.device.type == "cpu":
        found = values.detach().numpy()  # a third of the time for a few hundred numbers
        return bool((found[:, 1:] < found[:, :-1]).all())
    return bool((values[:, 1:] < values[:, :-1]).all())
