"""Likelihood of a text under a model: perplexity, and bits per byte, which does not depend on the tokenizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float
from torch import Tensor

LogProbs = Sequence[float] | Sequence[Sequence[float]] | Float[Tensor, "..."] | Float[np.ndarray, "..."]
_ROUNDING = 1e-3  # how far above 0 a log-probability in half precision may come out


def perplexity(log_probs: LogProbs) -> float:
    r"""$\exp(-\frac1T \sum_t \log p_t)$ over all tokens of all sequences.

    Args:
        log_probs: Log-probability of each token, in nats; of one sequence, or of several, without padding (its 0 would
            count as certain): `Generation.sequence_log_probs` of what was generated.

    Raises:
        ValueError: If there is no token, or a number is no log-probability.
    """
    rows = log_probs_of(log_probs)
    count = sum(map(len, rows))
    if not count:
        raise ValueError("`log_probs` must hold at least one token, got none.")
    return _exp(-math.fsum(one for row in rows for one in row) / count)


def bits_per_byte(log_probs: LogProbs, texts: str | Sequence[str]) -> float:
    r"""$-\sum_t \log_2 p_t$ over the bytes of the text in UTF-8.

    Args:
        log_probs: Log-probability of each token, in nats; of one sequence, or of several.
        texts: The text of these tokens, or one a sequence.

    Raises:
        ValueError: If texts and sequences are not equally many, or hold no byte, or a number is no log-probability.
    """
    rows = log_probs_of(log_probs)
    texts = [texts] if isinstance(texts, str) else list(texts)
    if len(texts) != len(rows):
        raise ValueError(f"`texts` must hold one text for each of {len(rows)} sequences, got {len(texts)}.")
    size = sum(map(bytes_of, texts))
    if not size:
        raise ValueError("`texts` must hold at least one byte, got none.")
    return -math.fsum(one for row in rows for one in row) / math.log(2) / size


def bytes_of(text: str) -> int:
    """Bytes in UTF-8; a lone surrogate takes three."""
    return len(text.encode("utf-8", "surrogatepass"))


def log_probs_of(given: LogProbs) -> list[list[float]]:
    """One sequence or several, as lists of numbers of at most 0.

    Raises:
        ValueError: If a number is NaN, or more than rounding above 0.
    """
    rows: list[Any] = given.tolist() if isinstance(given, Tensor | np.ndarray) else list(given)
    if any(isinstance(row, list | tuple | Tensor | np.ndarray) and np.ndim(row) for row in rows):
        lists = [[float(one) for one in row] for row in rows]
    else:
        lists = [[float(one) for one in rows]] if rows else []
    for row in lists:
        for one in row:
            if not one <= _ROUNDING:
                raise ValueError(f"`log_probs` must be log-probabilities in nats, at most 0, got {one}.")
    return lists


def _exp(value: float) -> float:
    return math.exp(value) if value < 709 else math.inf
