"""The figures of `saturation`: entropy of the predictions, norms of the hidden states."""

from __future__ import annotations

from typing import Any

from unembed.report._figure import Figure, axis, bars, reference
from unembed.report._words import number
from unembed.results import Record, Result


def figures(result: Result, record: Record) -> list[Figure]:
    """Two histograms."""
    return [_entropy(result), _norms(result)]


def _entropy(result: Result) -> Figure:
    table, values = result.table("saturation_entropy"), result.values or {}
    low, high, tokens = (table.columns[name] for name in ("from", "to", "tokens"))
    tallest, uniform = float(tokens.max()), values.get("entropy_uniform")
    mean, loss = ((values.get(name) or {}).get("mean") for name in ("entropy", "loss"))
    traces = [bars("predictions", "full", low, high, tokens)]
    for name, place, style in (("mean entropy", mean, "limit"), ("null: uniform", uniform, "null")):
        if place is not None:
            traces.append(reference(f"{name} {number(place)}", [place, place], [0, tallest], style))
    return Figure(
        "Entropy of the predictions",
        f"Left is sure, right is undecided. Null: the uniform distribution, log V = {number(uniform)} nats. "
        f"Compare the mean entropy {number(mean)} with the loss {number(loss)}: a loss well above it says that "
        "the model is surer than it is right on this text, a loss well below it the reverse.",
        f"Histogram of {number(int(tokens.sum()))} predictions; mean entropy {number(mean)} of at most "
        f"{number(uniform)} nats.",
        traces,
        {
            "xaxis": axis("entropy of the prediction (nats)"),
            "yaxis": axis("predictions in the bin", rangemode="tozero"),
            "bargap": 0,
            "hovermode": "closest",
        },
        (table.name,),
        height=300,
    )


def _norms(result: Result) -> Figure:
    table, values = result.table("saturation_norms"), result.values or {}
    low, high, tokens = (table.columns[name] for name in ("from", "to", "tokens"))
    about = values.get("hidden_norm") or {}
    mean, sd = about.get("mean"), about.get("sd")
    wide = high[-1] / low[0] > 30
    x: dict[str, Any] = {"type": "log", "values": [low[0], high[-1]]} if wide else {}
    traces = [bars("hidden states", "full", low, high, tokens)]
    if mean is not None:
        traces.append(reference(f"mean {number(mean)}", [mean, mean], [0, float(tokens.max())], "limit"))
    if not wide:  # a handful of bins would fill the picture and look like a finding
        margin = 3 * float(high[-1] - low[0])
        x["range"] = [max(0.0, float(low[0]) - margin), float(high[-1]) + margin] if len(tokens) < 6 else None
        x = {key: value for key, value in x.items() if value is not None}
    return Figure(
        "Norms of the hidden states",
        f"Hidden states as the head sees them, after the final norm: mean {number(mean)}, standard deviation "
        f"{number(sd)}. With the same direction, a longer state makes a surer prediction. Null: an RMSNorm "
        "with equal gains gives every state the norm √D times the gain. Look for a tail: states that the "
        "norm's gains treat differently.",
        f"Histogram of {number(int(tokens.sum()))} hidden states with norms from {number(float(low[0]))} to "
        f"{number(float(high[-1]))}.",
        traces,
        {
            "xaxis": axis("norm of the hidden state", **x),
            "yaxis": axis("predictions in the bin", rangemode="tozero"),
            "bargap": 0,
            "hovermode": "closest",
        },
        (table.name,),
        height=280,
    )
