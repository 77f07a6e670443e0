"""The figure of `logprob_rank`: singular values against bound and tolerance."""

from __future__ import annotations

import numpy as np

from unembed.report._figure import Figure, axis, line, reference
from unembed.report._words import number
from unembed.results import Record, Result


def figures(result: Result, record: Record) -> list[Figure]:
    """The spectrum of the log-probability matrix."""
    table, values = result.table("logprob_rank_values"), result.values or {}
    index, raw, centred = (table.columns[name] for name in ("index", "singular_value", "row_centred"))
    tolerance, bound = values.get("tolerance"), values.get("bound")
    traces = [line("as it is", "raw", index, raw), line("row-centred", "centred", index, centred)]
    positive = np.concatenate([raw[raw > 0], centred[centred > 0], [tolerance] if tolerance else []])
    if tolerance:
        traces.append(reference("tolerance", [1, max(index[-1], bound or 0)], [tolerance] * 2, "null"))
    if bound is not None and len(positive):
        ends = [float(positive.min()), float(positive.max())]
        traces.append(reference(f"bound {number(bound)}", [bound, bound], ends, "limit", hovertemplate="bound"))
    limit = (
        f"No value can lie above the tolerance to the right of the bound {number(bound)} (dash-dotted), which is the null "
        "of this figure: a head without a bottleneck would go on to min(N, V)."
        if bound is not None
        else "There is no bound under a soft-cap, and the values are those of a random sketch, so a larger rank would not show."
    )
    figure = Figure(
        "Singular values of the log-probability matrix",
        f"The rank is the number of values above the tolerance {number(tolerance)} (dotted). {limit} Look for how steeply "
        "the values fall: few large ones mean that the contexts seen differ in few ways.",
        f"Line chart with a logarithmic vertical axis: {number(len(index))} singular values from {number(raw[0])} to "
        f"{number(raw[-1])}; tolerance {number(tolerance)}, bound {number(bound)}, rank {number(values.get('rank'))}.",
        traces,
        {
            "xaxis": axis("index of the singular value, largest first"),
            "yaxis": axis("singular value (nats)", positive, type="log"),
        },
        (table.name,),
        log_toggle=("xaxis",),
    )
    return [figure]
