"""The longest span of a text that comes twice, exactly, in n log^2 n."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

import numpy as np
from jaxtyping import Int

from unembed.decoding.metrics._sequences import Sequences, sequences_of


def _reference(sequence: Sequence[Hashable]) -> int:
    """What it means: the largest length at which two spans that start at different places are equal."""
    for length in range(len(sequence) - 1, 0, -1):
        spans = [tuple(sequence[start : start + length]) for start in range(len(sequence) - length + 1)]
        if len(set(spans)) < len(spans):
            return length
    return 0


def longest_repeat(sequence: Sequences) -> int:
    """Tokens of the longest span that occurs at two places or more, which may overlap: 3 for `a a a a`.

    Spans of one length get equal numbers where they are equal; from the numbers of two lengths follow those of their
    sum. If spans of a length repeat, those of each smaller length do, so the answer is built from powers of two, the
    largest first. Nothing is hashed.

    Args:
        sequence: Token ids or words of one sequence.

    Raises:
        ValueError: If there are several sequences.
    """
    rows = sequences_of(sequence)
    if len(rows) > 1:
        raise ValueError(f"`sequence` must be one sequence, got {len(rows)}.")
    return longest(rows[0]) if rows else 0


def longest(sequence: Sequence[Hashable]) -> int:
    """The same for a list of tokens."""
    known: dict[Hashable, int] = {}
    names = np.array([known.setdefault(token, len(known)) for token in sequence], dtype=np.int64)
    if len(known) == len(names):
        return 0
    powers = [names]  # names of the spans of 1, 2, 4, ... tokens, as long as some are equal
    while (doubled := _joined(powers[-1], powers[-1], 1 << (len(powers) - 1))) is not None:
        powers.append(doubled)
    length, found = 1 << (len(powers) - 1), powers[-1]
    for power in range(len(powers) - 2, -1, -1):
        longer = _joined(found, powers[power], length)
        if longer is not None:
            length, found = length + (1 << power), longer
    return length


def _joined(first: Int[np.ndarray, " a"], second: Int[np.ndarray, " b"], step: int) -> Int[np.ndarray, " c"] | None:
    """Names of spans made of one in `first` and the one in `second` that starts `step` later; None if all differ."""
    later = second[step:]
    if len(later) < 2:
        return None
    pairs = first[: len(later)] * (second.max() + 1) + later
    distinct, names = np.unique(pairs, return_inverse=True)
    return None if len(distinct) == len(pairs) else names
