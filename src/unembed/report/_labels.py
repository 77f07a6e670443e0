"""What the keys of a record are called for a person. A key without an entry shows as its own words."""

from __future__ import annotations

import re

from unembed.report._words import power

_LABELS = {
    # sizes and ranks
    "tokens": "Predictions measured",
    "documents": "Documents",
    "rows": "Rows",
    "rank": "Rank at the tolerance",
    "rank_is": "The rank is",
    "limit": "Largest rank that could show",
    "bound": "Bound on the rank",
    "tolerance": "Tolerance",
    "tolerance_rule": "How the tolerance is set",
    "method": "Method",
    "largest": "Largest singular value",
    "smallest": "Smallest singular value",
    "smallest_above_tolerance": "Smallest singular value above the tolerance",
    "condition": "Condition, largest over smallest that counts",
    "frobenius": "Frobenius norm",
    "stable_rank": "Stable rank, ‖·‖² / s₁²",
    "entropy_rank": "Entropy rank, p = s / Σ s",
    "entropy_rank_energy": "Entropy rank, p = s² / Σ s²",
    "participation_ratio": "Participation ratio, (Σ s²)² / Σ s⁴",
    "directions_90": "Directions with 90 % of the energy",
    "directions_99": "Directions with 99 % of the energy",
    "directions_999": "Directions with 99.9 % of the energy",
    "mean_row_share": "Share of the energy in the mean row",
    "norm": "Norms of the rows",
    "min": "Smallest",
    "q05": "5 % quantile",
    "median": "Median",
    "q95": "95 % quantile",
    "max": "Largest",
    "all_rows": "With padding rows",
    "rank_at": "Rank at a tolerance relative to the largest value",
    "distinct_contexts": "Distinct contexts, where few enough to limit the rank",
    "residual": "Share of the scores outside the span of the bound",
    "residual_tokens": "Predictions it was measured on",
    # gradient
    "raw": "Raw W",
    "centred": "Row-centred W",
    "kept": "Kept share of the norm",
    "destroyed": "Destroyed, √(1 − kept²)",
    "kept_null": "Null: kept by a random subspace",
    "ratio": "Kept / null",
    "ratio_ci95": "95 % interval of the ratio",
    "ratio_null_sd": "Standard deviation of the ratio over random subspaces",
    "interval": "How the interval is made",
    "mean_squared_norm": "Mean squared norm of the gradient",
    "before_softcap": "Gradient taken before the soft-cap",
    # coefficients
    "every": "One prediction in",
    "full": "Full gradient",
    "kept_raw": "Kept, raw W",
    "kept_centred": "Kept, row-centred W",
    "null_raw": "Null, rank of W",
    "null_centred": "Null, rank of row-centred W",
    "energy_top_1": "Energy in the largest coefficient",
    "energy_top_10": "Energy in the 10 largest",
    "energy_top_100": "Energy in the 100 largest",
    # saturation
    "anisotropy": "Anisotropy, mean cosine of two hidden states",
    "anisotropy_null": "Null: directions spread evenly",
    "anisotropy_null_sd": "Standard deviation of the null",
    "hidden_norm": "Norm of the hidden states",
    "hidden_ranks": "Hidden states",
    "hidden_ranks_centred": "Hidden states less their mean",
    "loss": "Loss (nats a token)",
    "bits_per_byte": "Loss (bits a byte)",
    "entropy": "Entropy of the predictions (nats)",
    "entropy_uniform": "Null: entropy of the uniform distribution, log V",
    "top_probability": "Largest probability",
    "accuracy": "Accuracy of the argmax",
    "padding_probability": "Probability on padding rows",
    # head, model and provenance
    "source": "Model",
    "kind": "Kind",
    "architecture": "Architecture",
    "hash": "SHA-256 of head, bias and norm",
    "revision": "Revision",
    "in_features": "Width D",
    "vocab_rows": "Rows of the matrix",
    "vocab_tokens": "Ids of the tokenizer, V",
    "tied": "Tied to the embedding",
    "bias": "Bias",
    "softcap": "Soft-cap",
    "scale": "Scale of the scores",
    "dtype": "Number format",
    "padding_rows": "Padding rows",
    "holes": "Ids without a token",
    "rank_bound": "Bound on the rank of log P",
    "unembed": "unembed",
    "python": "Python",
    "torch": "PyTorch",
    "numpy": "NumPy",
    "transformers": "Transformers",
    "tokens_requested": "Predictions asked for",
    "context": "Longest window allowed (tokens)",
    "text": "Text",
    "checks": "Measurements",
    "sha256": "SHA-256",
    "seconds": "Seconds",
    # columns of tables
    "index": "Index",
    "raw_energy_left": "Energy left, raw",
    "centred_energy_left": "Energy left, row-centred",
    "from": "From",
    "to": "To",
    "id": "Id",
    "token": "Token",
    "over_median": "Over median",
    "singular_value": "Singular value",
    "relative": "Relative",
    "row_centred": "Row-centred",
    "occurrences_from": "Occurrences from",
    "occurrences_to": "Occurrences to",
    "types": "Targets",
    "kept_low": "Kept, low",
    "kept_high": "Kept, high",
    "kept_if_one_hot": "Kept if one-hot",
    "rank_from": "Rank from",
    "rank_to": "Rank to",
}
# The same key means something else in these places.
_IN_TABLES = {
    "tokens": "Tokens",
    "kept": "Kept",
    "ratio": "Kept / null",
    "norm": "Norm",
    "raw": "Raw",
    "centred": "Row-centred",
}
_IN_FACTS = {"norm": "Final norm", "documents": "Documents read"}
_PLACES = {"values": {}, "table": _IN_TABLES, "facts": _IN_FACTS}


def label(key: str, place: str = "values") -> str:
    """The name of `key` in a place: `values` of a result, columns of a `table`, `facts` about model and run."""
    known = _PLACES[place].get(key) or _LABELS.get(key)
    if known:
        return known
    tolerance = re.fullmatch(r"1e-(\d+)", key)
    if tolerance:
        return f"10{power(-int(tolerance[1]))}"
    words = key.replace("_", " ").strip() or "(no name)"
    return words[0].upper() + words[1:]
