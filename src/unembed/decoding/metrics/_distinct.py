"""How many n-grams of a set of texts are distinct."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float

from unembed.decoding.metrics._sequences import Sequences, grams, need_size, sequences_of


def distinct_n(sequences: Sequences, n: int = 2, *, per: Literal["ngrams", "tokens"] = "ngrams") -> float:
    """Distinct n-grams of all sequences together, over the number of n-grams (after Li et al., 2016, arXiv:1510.03055).

    The paper divides by the number of tokens, `per="tokens"`; by n-grams a text without any repeat has 1. It falls
    with the amount of text: compare sets of like size only.

    Args:
        sequences: Token ids or words; one sequence, or several.
        n: Length of the runs; none goes over the end of a sequence.
        per: What is divided by.

    Raises:
        ValueError: If no sequence has n tokens.
    """
    need_size("n", n)
    if per not in ("ngrams", "tokens"):
        raise ValueError(f"`per` must be 'ngrams' or 'tokens', got {per!r}.")
    rows = sequences_of(sequences)
    runs = sum(max(0, len(row) - n + 1) for row in rows)
    if not runs:
        raise ValueError(f"`sequences` must hold one of at least {n} tokens, got none.")
    return len({gram for row in rows for gram in grams(row, n)}) / (runs if per == "ngrams" else sum(map(len, rows)))


def without_each(rows: Sequence[Sequence[Hashable]], n: int) -> Float[np.ndarray, " s"]:
    """The same, by n-grams, of the other sequences, without each one in turn; NaN where they have no n-gram."""
    sets = [set(grams(row, n)) for row in rows]
    holders = Counter(gram for own in sets for gram in own)
    alone = np.array([sum(holders[gram] == 1 for gram in own) for own in sets], dtype=float)
    runs = np.array([max(0, len(row) - n + 1) for row in rows], dtype=float)
    with np.errstate(invalid="ignore"):
        return (len(holders) - alone) / (runs.sum() - runs)
