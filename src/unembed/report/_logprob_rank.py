"""The figure of `logprob_rank`: singular values against bound and tolerance."""

from __future__ import annotations

import numpy as np

from unembed.report._figure import Figure, axis, line, reference, toggled
from unembed.report._words import number
from unembed.results import Record, Result


def figures(result: Result, record: Record) -> list[Figure]:
    """The spectrum of the log-probability matrix."""
    table, values = result.table("logprob_rank_values"), result.values or {}
    index, raw, centred = (table.columns[name] for name in ("index", "singular_value", "row_centred"))
    tolerance, bound = values.get("tolerance"), values.get("bound")
    traces = [line("as it is", "raw", index, raw)]
    if values.get("centred") is not None:
        traces.append(line("row-centred", "centred", index, centred))
    # What lies far below the tolerance is rounding noise and would squeeze the rest.
    floor = (tolerance or 0) / 10
    positive = np.concatenate([raw[raw > floor], centred[centred > floor], [tolerance] if tolerance else []])
    if tolerance:
        traces.append(reference("tolerance", [1, max(index[-1], bound or 0)], [tolerance] * 2, "null"))
    if bound is not None and len(positive):
        ends = [float(positive.min()), float(positive.max())]
        traces.append(reference(f"bound {number(bound)}", [bound, bound], ends, "limit", hovertemplate="bound"))
    limit = (
        f"No value can lie above the tolerance to the right of the bound {number(bound)} (dash-dotted), which "
        "is the null of this figure: a head without a bottleneck would go on to min(N, V)."
        if bound is not None
        else "There is no bound under a soft-cap. These are the values of a random sketch: a larger one would not show."
    )
    figure = Figure(
        "Singular values of the log-probability matrix",
        f"The rank is the number of values above the tolerance {number(tolerance)} (dotted). {limit} Look for "
        "how steeply the values fall: few large ones mean that the contexts seen differ in few ways.",
        f"Line chart with a logarithmic vertical axis: {number(len(index))} singular values from "
        f"{number(raw[0])} to {number(raw[-1])}; tolerance {number(tolerance)}, bound {number(bound)}, rank "
        f"{number(values.get('rank'))}.",
        traces,
        {
            "xaxis": axis("index of the singular value, largest first"),
            "yaxis": axis("singular value (nats)", positive, type="log", range=_decades(positive)),
        },
        (table.name,),
        log_toggle=toggled("xaxis", [1, max(index[-1], bound or 0)]),
    )
    return [figure]


def _decades(values: np.ndarray) -> list[float] | None:
    """Range of a logarithmic axis around `values`, with a margin."""
    if not len(values):
        return None
    low, high = np.log10(values.min()), np.log10(values.max())
    margin = 0.04 * (high - low) + 0.05
    return [round(float(low - margin), 4), round(float(high + margin), 4)]
