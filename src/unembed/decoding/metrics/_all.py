"""All metrics of a set of texts at once, each with a bootstrap interval over the texts.

Metrics that are means over sequences, or ratios of sums, are resampled as they are. Those of the whole set (distinct
n-grams, Zipf's coefficient, self-BLEU) cannot be: a sequence that is drawn twice holds nothing new, and matches itself.
For them the influence of each sequence is taken from the metric without it (the infinitesimal jackknife in its finite
form: Efron, 1982), and the mean influence is resampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float

from unembed.decoding.metrics import _distinct, _self_bleu, _zipf
from unembed.decoding.metrics._likelihood import LogProbs, bytes_of, log_probs_of
from unembed.decoding.metrics._longest_repeat import longest
from unembed.decoding.metrics._repetition import near, repeated
from unembed.decoding.metrics._sequences import Sequences, need_size, sequences_of
from unembed.results import MIN_DOCUMENTS, bootstrap_interval

_WIDTH = 1e-12  # an interval this narrow, relative to the value, is rounding


@dataclass(frozen=True)
class Measured:
    """A metric of a set of texts.

    Args:
        value: None where the texts do not define it.
        ci95: 95 % bootstrap interval over sequences, expanded percentiles.
        reason: Why there is no value, or no interval.
    """

    value: float | None
    ci95: tuple[float, float] | None = None
    reason: str = ""


def text_metrics(
    sequences: Sequences,
    *,
    log_probs: LogProbs | None = None,
    texts: Sequence[str] | None = None,
    window: int = 32,
    orders: Sequence[int] = (1, 2, 3, 4),
    bleu_order: int | None = _self_bleu.ORDER,
    seed: int = 0,
) -> dict[str, Measured]:
    """Every metric that the input allows, by name.

    `perplexity` (with `log_probs`), `bits_per_byte` (with `texts` too), `rep_32` (for `window`), `seq_rep_N` and
    `distinct_N` (for `orders`), `longest_repeat` (mean over sequences), `zipf_coefficient`, `self_bleu_4`.

    Args:
        sequences: Token ids or words, of several sequences that do not depend on each other.
        log_probs: Log-probability of each token, in nats.
        texts: The text of each sequence.
        window: How far back `rep_N` looks.
        orders: Lengths of n-grams.
        bleu_order: Longest n-grams of self-BLEU; not measured when None.
        seed: Of the resampling.

    Raises:
        ImportError: If self-BLEU is asked for and sacrebleu is not installed.
        ValueError: If log-probabilities or texts do not fit the sequences.
    """
    for name, value in (("window", window), *(("orders", n) for n in orders)):
        need_size(name, value)
    rows = sequences_of(sequences)
    tables = _likelihood(rows, log_probs, texts)
    tables[f"rep_{window}"] = [[len(row), near(row, window, row)] for row in rows]
    tables |= {f"seq_rep_{n}": [[1, repeated(row, n)] if len(row) >= n else [0, 0] for row in rows] for n in orders}
    found = {name: _ratio(np.array(table, dtype=float).reshape(-1, 2), name, seed) for name, table in tables.items()}
    for n in orders:
        enough = any(len(row) >= n for row in rows)
        value = _distinct.distinct_n(rows, n) if enough else None
        again = _pooled(value, lambda n=n: _distinct.without_each(rows, n), len(rows), seed)
        found[f"distinct_{n}"] = _share(again)
    lengths = [[1, longest(row)] if row else [0, 0] for row in rows]
    found["longest_repeat"] = _ratio(np.array(lengths, dtype=float).reshape(-1, 2), "longest_repeat", seed)
    types = len({token for row in rows for token in row})
    value = _zipf.zipf_coefficient(rows) if types > 1 else None
    found["zipf_coefficient"] = _pooled(value, lambda: _zipf.without_each(rows), len(rows), seed)
    if bleu_order is not None:
        value = _self_bleu.self_bleu(rows, order=bleu_order) if len(rows) > 1 else None
        again = _pooled(value, lambda: _self_bleu.without_each(rows, bleu_order), len(rows), seed)
        found[f"self_bleu_{bleu_order}"] = _share(again)
    return found


def _likelihood(
    rows: list[list[Hashable]], log_probs: LogProbs | None, texts: Sequence[str] | None
) -> dict[str, list[list[float]]]:
    """Tables of what is divided by, and nats."""
    if log_probs is None:
        if texts is not None:
            raise ValueError("`texts` is for bits per byte: give `log_probs` too.")
        return {}
    listed = log_probs_of(log_probs) or [[] for _ in rows]
    if [len(one) for one in listed] != [len(row) for row in rows]:
        raise ValueError("`log_probs` must hold one number for each token of `sequences`.")
    nats = [-math.fsum(one) for one in listed]
    found = {"perplexity": [[len(row), own] for row, own in zip(rows, nats, strict=True)]}
    if texts is not None:
        if isinstance(texts, str) or len(texts) != len(rows):
            raise ValueError(f"`texts` must hold one text for each of {len(rows)} sequences.")
        found["bits_per_byte"] = [[bytes_of(text), own] for text, own in zip(texts, nats, strict=True)]
    return found


def _ratio(table: Float[np.ndarray, "s 2"], name: str, seed: int) -> Measured:
    """Second sum over the first; through `exp` for perplexity, in bits for bits per byte."""
    scale = 1 / math.log(2) if name == "bits_per_byte" else 1.0

    def statistic(sums: np.ndarray) -> np.ndarray:
        with np.errstate(over="ignore"):
            value = scale * sums[:, 1] / sums[:, 0]
            return np.exp(value) if name == "perplexity" else value

    if not table[:, 0].any():
        return Measured(None, reason="no sequence is long enough")
    return _with_interval(float(statistic(table.sum(0, keepdims=True))[0]), table, statistic, seed)


def _pooled(value: float | None, without_each: Callable[[], np.ndarray], count: int, seed: int) -> Measured:
    """A metric of the whole set, with the interval from what it would be without each sequence."""
    if value is None:
        return Measured(None, reason="too few tokens or sequences")
    if count < MIN_DOCUMENTS:
        return Measured(value, reason=_few(count))
    others = without_each()
    influence = (count - 1) * (others.mean() - others)
    table = np.stack([np.ones(count), influence], 1)
    return _with_interval(value, table, lambda sums: value + sums[:, 1] / sums[:, 0], seed)


def _share(found: Measured) -> Measured:
    """With an interval inside [0, 1], where the metric lies: influences are linear and may lead out of it."""
    if found.ci95 is None:
        return found
    return replace(found, ci95=(max(found.ci95[0], 0.0), min(found.ci95[1], 1.0)))


def _with_interval(
    value: float, table: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], seed: int
) -> Measured:
    ends = bootstrap_interval(table, statistic, seed=seed)
    if ends is None:
        few = len(table) < MIN_DOCUMENTS
        return Measured(value, reason=_few(len(table)) if few else "a resample has no finite value")
    if ends[1] - ends[0] <= _WIDTH * abs(value):
        reason = "no interval: resampling changes nothing, so it cannot tell how far other texts may lie"
        return Measured(value, reason=reason)
    return Measured(value, (ends[0], ends[1]))


def _few(count: int) -> str:
    return f"no interval: {count} sequences, at least {MIN_DOCUMENTS} are needed"
