"""Effective ranks: one number for a spectrum, by the name of its formula."""

from __future__ import annotations

import math

import numpy as np


def effective_ranks(values: np.ndarray) -> dict[str, float | int]:
    r"""Effective ranks of singular values `s`, largest first.

    `stable_rank` $\|W\|_F^2 / s_1^2$; `entropy_rank` $\exp(-\sum p \ln p)$ with $p = s / \sum s$ (Roy and
    Vetterli, 2007); `entropy_rank_energy` the same with $p = s^2 / \sum s^2$; `participation_ratio`
    $(\sum s^2)^2 / \sum s^4$;
    `directions_90`, `_99`, `_999`: how many directions hold that share of the energy $s^2$.

    Returns:
        Zero everywhere for a zero spectrum.
    """
    values = np.asarray(values, dtype=np.float64)
    energy = values**2
    total = energy.sum()
    if not total > 0:
        names = ["stable_rank", "entropy_rank", "entropy_rank_energy", "participation_ratio"]
        return dict.fromkeys([*names, "directions_90", "directions_99", "directions_999"], 0)
    share = energy / total
    cumulative = np.cumsum(np.sort(share)[::-1])
    counts = {
        f"directions_{name}": int(min(np.searchsorted(cumulative, level - 1e-12) + 1, len(values)))
        for name, level in [("90", 0.9), ("99", 0.99), ("999", 0.999)]
    }
    return {
        "stable_rank": float(1 / share.max()),
        "entropy_rank": _exp_entropy(values / values.sum()),
        "entropy_rank_energy": _exp_entropy(share),
        "participation_ratio": float(1 / (share**2).sum()),
        **counts,
    }


def _exp_entropy(p: np.ndarray) -> float:
    p = p[p > 0]
    return math.exp(-float((p * np.log(p)).sum()))
