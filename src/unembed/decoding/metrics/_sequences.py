"""Sequences of tokens as plain lists, whatever they came in."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int
from torch import Tensor

# Token ids, or words; one sequence, or several.
Sequences = Sequence[Hashable] | Sequence[Sequence[Hashable]] | Int[Tensor, "..."] | Int[np.ndarray, "..."]


def sequences_of(given: Sequences) -> list[list[Hashable]]:
    """One sequence or several, as lists.

    Raises:
        ValueError: If it is a text, or something else than tokens or sequences of tokens.
    """
    rows = _plain(given)
    if any(isinstance(row, list | tuple | Tensor | np.ndarray) for row in rows):
        return [_tokens(_plain(row)) for row in rows]
    return [_tokens(rows)] if rows else []


def grams(sequence: Sequence[Hashable], n: int) -> Iterable[tuple[Hashable, ...]]:
    """Runs of n tokens, in order."""
    return zip(*(sequence[start:] for start in range(n)), strict=False)


def need_size(name: str, value: int) -> None:
    """Refuse a length of less than one token."""
    if not isinstance(value, int) or value < 1:
        raise ValueError(f"`{name}` must be a whole number of at least 1, got {value!r}.")


def _plain(given: Any) -> list[Any]:
    if isinstance(given, str | bytes) or not isinstance(given, Iterable):
        came = "a text" if isinstance(given, str | bytes) else type(given).__name__
        raise ValueError(f"`sequences` must be token ids or words, or lists of them, got {came}.")
    return given.tolist() if isinstance(given, Tensor | np.ndarray) else list(given)


def _tokens(row: list[Any]) -> list[Hashable]:
    for token in row:
        if isinstance(token, float | bool) or not isinstance(token, Hashable):
            raise ValueError(f"`sequences` must hold token ids or words, got {token!r:.40} of {type(token).__name__}.")
    return row
