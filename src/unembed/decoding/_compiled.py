"""The door to `_kernels`, where numba is installed (the extra `fast`): for float32 scores on a CPU, and for beams.

They find what the ways of PyTorch and NumPy find, with the same noise, and differ where rounding decides.
`UNEMBED_FAST=0` in the environment leaves them alone. Many scores go to threads in parts of rows, as many as PyTorch
may use; the threads end with the call, so that a process can be forked between calls.

Shapes: n rows, V vocabulary, k largest, c candidates, B prompts.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.ops import Noise

if TYPE_CHECKING:
    from unembed.decoding._settings import Settings

_SPLIT = 1 << 22  # scores of a thread; threads of PyTorch that still wait for work make fewer take longer
_FIRST = np.zeros(1, np.uint64)  # the position where none is given


@functools.cache
def kernels() -> Any:
    """The module of compiled functions; None where there is no numba, or none is wanted."""
    if os.environ.get("UNEMBED_FAST") == "0" or importlib.util.find_spec("numba") is None:
        return None
    try:
        import numba

        options: Any = numba.config
        if options.DISABLE_JIT:  # for a debugger: what is not compiled cannot run
            return None
        from unembed.decoding import _kernels
    except (ImportError, OSError) as error:  # of another NumPy than it knows, or too old, or without its library
        warnings.warn(f"numba is installed but cannot be loaded, so decoding goes on without it: {error}", stacklevel=2)
        return None
    return _kernels


def can_draw(scores: Float[Tensor, "*b V"]) -> bool:
    """Whether there is a compiled way for these scores."""
    return scores.dtype == torch.float32 and scores.is_cpu and scores.numel() > 0 and kernels() is not None


def draw(scores: Float[Tensor, "*b V"], settings: Settings, noise: Noise) -> Int[Tensor, "*b"] | None:
    """A class a row; None where there is one that cannot be drawn from.

    Args:
        scores: Those that `can_draw`; equal ones where the temperature is infinite.
        settings: What is asked.
        noise: With seeds.
    """
    rows, asked, seeds = _rows(scores), settings.asked, noise.seeds
    assert seeds is not None
    places, found = _FIRST if noise.positions is None else noise.positions, np.empty(len(rows), np.int64)
    run = kernels().draw

    def some(at: slice) -> int:
        lines, counts = (one[at] if len(one) > 1 else one for one in (asked, places))
        return run(rows[at], lines, settings.joint, seeds[at], counts, found[at])

    if rows.size < 2 * _SPLIT:  # a row of a small vocabulary takes less time than these calls
        failed = run(rows, asked, settings.joint, seeds, places, found)
    else:
        failed = sum(_split(some, rows))
    if failed:
        return None
    return torch.from_numpy(found if scores.ndim == 2 else found.reshape(scores.shape[:-1]))


def can_list(rows: Float[Tensor, "n V"], k: int) -> bool:
    """Whether there is a compiled way for their k largest, and no faster one."""
    return can_draw(rows) and (k == 1 or 4 * k <= rows.shape[-1])


class Best(NamedTuple):
    """The k largest of each row in order, and the logarithm of the sum of exponentials, relative to the largest one."""

    values: Float[np.ndarray, "n k"]
    ids: Int[np.ndarray, "n k"]
    log_sums: Float[np.ndarray, " n"]


def best(rows: Float[Tensor, "n V"], k: int, *, sums: bool = False) -> Best | None:
    """The k largest, and the sums where they are asked for; None for NaN, and where a sum would not be finite."""
    scores = _rows(rows)
    found = Best(
        np.empty((len(scores), k), np.float32),
        np.empty((len(scores), k), np.int64),
        np.empty(len(scores) if sums else 0),
    )

    def some(at: slice) -> int:
        return kernels().best(scores[at], found.ids[at], found.values[at], found.log_sums[at])

    return found if max(_split(some, scores)) <= (0 if sums else 1) else None


def log_probs(
    rows: Float[Tensor, "n V"], ids: Int[np.ndarray, "n k"], peaks: Float[Tensor, "n 1"], sums: Float[Tensor, "n 1"]
) -> Float[np.ndarray, "n k"]:
    """Of some classes of scores that there is a compiled way for: `row - peak - sum`, at most 0."""
    found = np.empty(ids.shape)
    kernels().log_probs(_rows(rows), ids, peaks.numpy(), sums.double().numpy(), found)
    return found


def costs(
    total: Float[np.ndarray, " n"], drawn: Float[np.ndarray, "n c"], tokens: Int[np.ndarray, "n c"], ends: int
) -> tuple[Float[np.ndarray, "n c"], bool]:
    """Sums of log-probabilities, negative, infinite for ends beyond column `ends`; whether no row has only such."""
    found = np.empty_like(drawn)
    return found, kernels().costs(total, drawn, tokens, ends, found)


def ends_above(
    cost: Float[np.ndarray, "n c"], ends: int, factor: float, worst: Float[np.ndarray, " B"], owner: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of ends whose score is above the worst of their owner, the best first."""
    rows, columns = np.empty((2, len(cost) * ends), np.int64)
    count = kernels().ends_above(cost, ends, factor, worst, owner, rows, columns)
    return rows[:count], columns[:count]


def ranked(
    cost: Float[np.ndarray, "n c"], ends: int, owner: Int[np.ndarray, " n"], width: int
) -> tuple[np.ndarray, np.ndarray]:
    """Rows and columns of the `width` least costs of each owner, in order; those of a row grow from `ends` on."""
    rows, columns = np.empty((2, min(len(owner) * width, cost.size)), np.int64)
    count = kernels().ranked(cost, ends, owner, width, rows, columns)
    return rows[:count], columns[:count]


def _rows(scores: Float[Tensor, "*b V"]) -> np.ndarray:
    """Scores with the classes side by side."""
    if scores.requires_grad or scores.is_neg():
        scores = scores.detach().resolve_neg()
    found = scores.numpy()
    return np.ascontiguousarray(found if found.ndim == 2 else found.reshape(-1, found.shape[-1]))


def _split(work: Callable[[slice], Any], rows: np.ndarray) -> list[Any]:
    """What the work on parts of the rows gives, in threads where that pays."""
    threads = min(torch.get_num_threads(), len(rows), rows.size // _SPLIT)
    if threads <= 1:
        return [work(slice(0, len(rows)))]
    edges = [len(rows) * place // threads for place in range(threads + 1)]
    with ThreadPoolExecutor(threads) as pool:
        return list(pool.map(work, itertools.starmap(slice, itertools.pairwise(edges))))
