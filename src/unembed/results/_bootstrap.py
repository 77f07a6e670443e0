"""The bootstrap interval of a statistic of sums over independent units: documents, prompts, texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import numpy as np

RESAMPLES = 2000
MIN_DOCUMENTS = 8
_BLOCK = 100


def bootstrap_interval(
    table: np.ndarray, statistic: Callable[[np.ndarray], np.ndarray], *, seed: int = 0, level: float = 0.95
) -> list[float] | None:
    """Expanded percentile bootstrap interval of a statistic of the summed columns (Hesterberg, 2015, arXiv:1411.5279).

    The plain percentile interval of n documents is too narrow by what Student's t and n / (n - 1) would add; the
    quantiles are moved out by that much. Its coverage at 8 and at 40 simulated documents is tested, to some percent.

    Args:
        table: Sums per document [documents, columns].
        statistic: Maps resampled totals [resamples, columns] to values [resamples].
        seed: Seed of the resampling.
        level: Coverage aimed at.

    Returns:
        Lower and upper end, or None with fewer than `MIN_DOCUMENTS` documents, and where a resample is not finite:
        leaving it out would give the interval of another text.
    """
    count = len(table)
    if count < MIN_DOCUMENTS:
        return None
    random = np.random.default_rng(seed)
    weights = np.full(count, 1 / count)
    values = []
    for _ in range(RESAMPLES // _BLOCK):  # in blocks: counts of all resamples at once are 16 kB a document
        with np.errstate(invalid="ignore", divide="ignore"):
            values.append(statistic(random.multinomial(count, weights, size=_BLOCK) @ table))
    drawn = np.concatenate(values)
    if not np.isfinite(drawn).all():
        return None
    tail = _expanded((1 - level) / 2, count)
    return [float(end) for end in np.quantile(drawn, [tail, 1 - tail])]


def _expanded(tail: float, count: int) -> float:
    """The tail that makes a percentile interval of `count` documents as wide as a t interval."""
    normal = NormalDist()
    return normal.cdf(_t_quantile(normal.inv_cdf(tail), count - 1) * math.sqrt(count / (count - 1)))


def _t_quantile(z: float, freedom: int) -> float:
    """Student's t quantile at the level of the normal quantile `z` (Fisher and Cornish, 1960): 3 digits from 7 on."""
    terms = (
        (z**3 + z) / 4,
        (5 * z**5 + 16 * z**3 + 3 * z) / 96,
        (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / 384,
        (79 * z**9 + 776 * z**7 + 1482 * z**5 - 1920 * z**3 - 945 * z) / 92160,
    )
    return z + sum(term / freedom**power for power, term in enumerate(terms, 1))
