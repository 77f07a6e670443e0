"""What the gradient measurements of linear and of other heads share: sums by target, bands, findings.

A row of energies is `full, raw, centred`; sums of them carry the count in front.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unembed.diagnostics._bootstrap import DocumentSums
from unembed.results import MIN_DOCUMENTS, RESAMPLES, Finding, Table

FULL, RAW, CENTRED = 1, 2, 3  # columns of the sums, after the count
DIRECTIONS = 32  # random ones, along which the gradients are looked at for the spread of the null
CODE = "UNE103"
_BANDS = (1, 2, 4, 10, 30, 100, 300, 1000)  # lower ends: how often the target occurs in the measured text


def target_sums(energies: Float[Tensor, "n 3"]) -> Float[Tensor, "n 9"]:
    """What is summed by target: count, energies, and the products that the intervals of the bands need."""
    products = [energies[:, :1] * energies, energies[:, 1:] ** 2]
    return torch.cat([torch.ones(len(energies), 1, dtype=torch.float64), energies, *products], dim=1)


def interval_words(documents: DocumentSums) -> str:
    """How the interval was made, or why there is none."""
    count = len(documents)
    if count >= MIN_DOCUMENTS:
        return f"expanded percentile bootstrap over documents, {RESAMPLES} resamples"
    plural = "s"[: count != 1]
    return f"none: {count} document{plural}, at least {MIN_DOCUMENTS} are needed (a line of a .jsonl file is one)"


def alignment(seen: Float[Tensor, "k k"], energy: float) -> float:
    """Estimate of `tr M^2 / (tr M)^2` with `M = G^T G`: for Gaussian s and t, `E (s^T M t)^2 = tr M^2`.

    Args:
        seen: `S^T M S` for k Gaussian directions S.
        energy: `tr M`.
    """
    off_diagonal = ~torch.eye(len(seen), dtype=torch.bool)
    return float(seen[off_diagonal].square().mean() / energy**2)


def bands(sums: Float[Tensor, "V 9"], leverage: Float[Tensor, " V"], null: float, *, column: int) -> Table:
    """Kept share by how often the target occurs; the interval treats tokens as independent (delta method).

    Args:
        sums: By target, of `target_sums`.
        leverage: By target, the sum of the leverages of its row.
        null: What a random subspace keeps.
        column: The convention.
    """
    counts, rows = sums[:, 0], []
    for low, high in zip(_BANDS, (*_BANDS[1:], math.inf), strict=True):
        members = (counts >= low) & (counts < high)
        if bool(members.any()):
            total = sums[members].sum(0)
            kept, error = ratio_with_error(total, column)
            mean_leverage = float(leverage[members].sum() / total[0])
            rows.append((low, high - 1, int(members.sum()), int(total[0]), kept, error, mean_leverage))
    low, high, types, tokens, kept, error, lever = (np.array(column) for column in zip(*rows, strict=True))
    return Table(
        "gradient_bands",
        "Kept share by how often the target occurs in the measured text",
        {
            "occurrences_from": low.astype(np.int64),
            "occurrences_to": np.where(np.isinf(high), -1, high).astype(np.int64),
            "types": types,
            "tokens": tokens,
            "kept": kept,
            "kept_low": np.clip(kept - 1.96 * error, 0, 1),
            "kept_high": np.clip(kept + 1.96 * error, 0, 1),
            "ratio": kept / null if null else np.full_like(kept, np.nan),
            "kept_if_one_hot": np.sqrt(lever),
        },
        {
            "occurrences_to": "-1: no upper end",
            "types": "distinct targets",
            "tokens": "predictions",
            "kept": f"root of kept over full energy, {'row-centred' if column == CENTRED else 'raw'} convention",
            "kept_low": "95 % interval, delta method over tokens taken as independent",
            "kept_high": "upper end",
            "ratio": f"kept over the null {null:.5g}",
            "kept_if_one_hot": "root of the mean leverage of the target's row: what a one-hot error keeps",
        },
    )


def ratio_with_error(sums: Tensor, column: int) -> tuple[float, float]:
    """`sqrt(K / F)` and its standard error from per-token sums of F, K, F^2, F K and K^2."""
    full, kept = float(sums[FULL]), float(sums[column])
    if full <= 0 or kept <= 0:
        return 0.0, 0.0
    ratio = kept / full
    full_squared, product = float(sums[4]), float(sums[3 + column])
    kept_squared = float(sums[5 + column])
    variance = max(kept_squared - 2 * ratio * product + ratio**2 * full_squared, 0.0) / full**2
    return math.sqrt(ratio), math.sqrt(variance) / (2 * math.sqrt(ratio))


def findings(values: dict[str, Any], vocab: int) -> list[Finding]:
    """What the numbers say, in words.

    Args:
        values: Of the result.
        vocab: V.
    """
    name, numbers = ("raw", values["raw"]) if values["centred"] is None else ("row-centred", values["centred"])
    if numbers["ratio"] is None:
        return [
            Finding(
                CODE,
                "warning",
                "Nothing of the gradient passes the head",
                f"rank {numbers['rank']:,} in {vocab:,} ({name} convention, {values['tokens']:,} tokens)",
                "All rows of the matrix or Jacobian are equal within rounding, so hidden states move no probability.",
            )
        ]
    ends, sd = numbers["ratio_ci95"], numbers["ratio_null_sd"]
    least = numbers.get("rank_least", numbers["rank"])
    rank = f"rank {numbers['rank']:,}" if least == numbers["rank"] else f"ranks {least:,} to {numbers['rank']:,}"
    span = f", 95 % interval {ends[0]:.3g} to {ends[1]:.3g} over {values['documents']:,} documents" if ends else ""
    evidence = (
        f"kept {numbers['kept']:.4f} of the norm, a random subspace of {rank} in {vocab:,} "
        f"keeps {numbers['kept_null']:.4f}: ratio {numbers['ratio']:.3g}{span}; random subspaces have 1 "
        f"with a standard deviation of {sd:.2g} ({name} convention, {values['tokens']:,} tokens)"
    )
    low, high = ends or (numbers["ratio"], numbers["ratio"])
    below, above = high < 1 - 1.96 * sd, low > 1 + 1.96 * sd
    return [
        Finding(
            CODE,
            "warning" if below and ends else "info",
            "The head passes less of the gradient than a random subspace would"
            if below
            else f"The head passes {numbers['ratio']:.3g} times what a random subspace of its rank would"
            if above
            else f"The head passes about what a random subspace of its rank would: {numbers['ratio']:.3g} times",
            evidence,
            f"{100 * numbers['destroyed']:.2f} % of the norm of the logit gradient is outside what the body can be "
            "told in one step; a random head of this rank leaves out "
            f"{100 * math.sqrt(1 - numbers['kept_null'] ** 2):.2f} %.",
            "Compression measured, not learning lost: whether it harms training is for controlled experiments to say. "
            "The ratio pools all targets and leans on the frequent ones; the bands tell them apart.",
        )
    ]
