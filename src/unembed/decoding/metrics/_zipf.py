"""How steeply the frequency of a token falls with its rank."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Float, Int

from unembed.decoding.metrics._sequences import Sequences, need_size, sequences_of

RANKS = 5000


def _reference(rows: Sequence[Sequence[Hashable]], ranks: int) -> float:
    """What it means: the slope of least squares, by sums."""
    counts = sorted(Counter(token for row in rows for token in row).values(), reverse=True)[:ranks]
    x = [math.log(rank) for rank in range(1, len(counts) + 1)]
    y = [math.log(count) for count in counts]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    rise = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True))
    return -rise / sum((a - mean_x) ** 2 for a in x)


def zipf_coefficient(sequences: Sequences, *, ranks: int = RANKS) -> float:
    r"""The s of $\log f_r = a - s \log r$, by least squares over the most frequent tokens.

    As Holtzman et al. (2020, arXiv:1904.09751), over the ranks 1 to 5,000, or as many as there are; tokens of one
    frequency have following ranks, and each rank counts alike, so the many rare tokens weigh most. It depends on the
    amount of text: compare sets of like size only.

    Args:
        sequences: Token ids or words; one sequence, or several, counted together.
        ranks: Last rank of the fit.

    Raises:
        ValueError: If there are fewer than two different tokens.
    """
    need_size("ranks", ranks)
    counts = counted(sequences_of(sequences)).sum(0)
    if np.count_nonzero(counts) < 2 or ranks < 2:
        raise ValueError(f"A slope needs two different tokens and ranks, got {np.count_nonzero(counts)} and {ranks}.")
    return slope(counts, ranks)


def without_each(rows: Sequence[Sequence[Hashable]], ranks: int = RANKS) -> Float[np.ndarray, " s"]:
    """The same of the other sequences, without each one in turn; NaN where they have fewer than two tokens."""
    counts = counted(rows)
    whole = counts.sum(0)
    return np.array([slope(whole - own, ranks) for own in counts])


def counted(rows: Sequence[Sequence[Hashable]]) -> Int[np.ndarray, "s types"]:
    """How often each token occurs in each sequence."""
    known: dict[Hashable, int] = {}
    names = [[known.setdefault(token, len(known)) for token in row] for row in rows]
    return np.array([np.bincount(row, minlength=len(known)) for row in names], dtype=np.int64).reshape(len(rows), -1)


def slope(counts: Int[np.ndarray, " types"], ranks: int) -> float:
    """The coefficient from counts in any order; NaN with fewer than two."""
    found = np.sort(counts[counts > 0])[::-1][:ranks]
    if len(found) < 2:
        return math.nan
    x, y = np.log(np.arange(1, len(found) + 1)), np.log(found)
    x = x - x.mean()
    return float(-(x @ y) / (x @ x))
