"""The figures of a decoding study, each with the table behind it."""

from __future__ import annotations

from typing import Any

import numpy as np

from unembed.report._figure import STYLES, Figure, axis, line, plain, reference, toggled
from unembed.report._words import number
from unembed.results import Table

HUMAN = "human"
_FIXED = ("greedy", "beam", "contrastive")  # strategies that draw nothing
# Metric -> its name, what it is, and what the axis says.
METRICS = {
    "perplexity": ("Perplexity", "exp of the mean negative log-probability of a token, under this same model", ""),
    "bits_per_byte": ("Bits per byte", "the same likelihood over the bytes of the text", ""),
    "seq_rep_4": (
        "Repeated 4-grams",
        "1 − distinct over all 4-grams of a continuation (Welleck et al., 2019)",
        "share",
    ),
    "rep_32": ("Repeated tokens", "tokens that are among the 32 before them (after Welleck et al., 2019)", "share"),
    "longest_repeat": ("Longest repeat", "longest span that comes twice in a text; the two may overlap", "tokens"),
    "distinct_2": ("Distinct bigrams", "distinct over all bigrams of all texts (after Li et al., 2016)", "share"),
    "zipf_coefficient": ("Zipf coefficient", "fall of log frequency with log rank (Holtzman et al., 2020)", ""),
    "self_bleu_4": ("Self-BLEU", "BLEU of each continuation against all others (Zhu et al., 2018)", ""),
}


def compared(study: dict[str, Any], name: str) -> tuple[Figure, Table]:
    """One metric of all strategies, with the human text as a line."""
    title, what, unit = METRICS[name]
    unit = unit or title.lower().replace("bleu", "BLEU").replace("zipf", "Zipf")
    names, found = _values(study["rows"], name)
    listed = [str(one) for one in names if one != HUMAN]
    log = {"type": "log"} if name == "perplexity" else {}
    finite = found[0][np.isfinite(found[0])]
    table = Table(
        f"study_{name}",
        f"{title} of each strategy",
        {"strategy": names, "value": found[0], "low": found[1], "high": found[2]},
        {"low": "95 % bootstrap interval over prompts", "value": unit},
    )
    ticks = {"tickmode": "array", "tickvals": listed, "ticks": ""}
    figure = Figure(
        title,
        f"{what[0].upper()}{what[1:]}. Bars are 95 % bootstrap intervals over prompts. The dotted line is what the "
        "human text has, the fainter ones its interval.",
        f"Points with intervals, one a strategy. {_extremes(names, found[0])}",
        [*_strategies(study["rows"], names, found), *_human(names, found, listed)],
        {
            "xaxis": axis(unit, found, **log),
            "yaxis": {"type": "category", "categoryorder": "array", "categoryarray": listed[::-1]} | ticks,
            "hovermode": "closest",
        },
        (table.name,),
        height=110 + 26 * len(listed),
        log_toggle={} if log or not (finite > 0).all() else toggled("xaxis", found),
    )
    return figure, table


def _values(rows: list[dict[str, Any]], name: str) -> tuple[np.ndarray, np.ndarray]:
    """Names of all rows, and a metric of each as a column: the value and the ends of its interval."""
    found = [row["metrics"][name] for row in rows]
    values = [np.nan if one["value"] is None else one["value"] for one in found]
    low, high = ([one["ci95"][end] if one["ci95"] else np.nan for one in found] for end in (0, 1))
    return np.array([row["name"] for row in rows]), np.array([values, low, high], dtype=float)


def _strategies(rows: list[dict[str, Any]], names: np.ndarray, found: np.ndarray) -> list[dict[str, Any]]:
    """Points of the strategies that draw nothing, and of those that draw."""
    fixed = np.isin([(row["settings"] or {}).get("strategy", "") for row in rows], _FIXED)
    kinds = (("draws nothing", "centred", fixed), ("draws", "raw", ~fixed & (names != HUMAN)))
    return [_points(label, style, names[which], found[:, which]) for label, style, which in kinds]


def _human(names: np.ndarray, found: np.ndarray, listed: list[str]) -> list[dict[str, Any]]:
    """The human text across all strategies, and its interval."""
    people = np.flatnonzero(names == HUMAN)
    if not len(people) or not np.isfinite(found[0, people[0]]) or not listed:
        return []
    value, *ends = found[:, people[0]]
    across = {"y": [listed[0], listed[-1]]}
    fainter = across | {"showlegend": False, "opacity": 0.45}
    traces = [reference("human", [value, value], [0, 1]) | across]
    return traces + [reference("its interval", [end, end], [0, 1]) | fainter for end in ends if np.isfinite(end)]


def _points(name: str, style: str, names: np.ndarray, found: np.ndarray) -> dict[str, Any]:
    """Markers with intervals; a column of `found` is a value with its ends."""
    values, low, high = found
    look = STYLES[style]
    words = [f"{number(value)} ({number(a)} to {number(b)})" for value, a, b in zip(values, low, high, strict=True)]
    return {
        "type": "scatter",
        "name": name,
        "mode": "markers",
        "x": plain(values),
        "y": names.tolist(),
        "customdata": words,
        "marker": {"color": look["colour"], "size": 9, "symbol": look["symbol"]},
        "error_x": {
            "type": "data",
            "symmetric": False,
            "array": plain(high - values),
            "arrayminus": plain(values - low),
            "color": look["colour"],
            "thickness": 1.5,
            "width": 4,
        },
        "hovertemplate": "%{y}: %{customdata}<extra></extra>",
    }


def _extremes(names: np.ndarray, values: np.ndarray) -> str:
    if not np.isfinite(values).any():
        return "No strategy has a value."
    least, most = int(np.nanargmin(values)), int(np.nanargmax(values))
    return f"From {number(values[least])} ({names[least]}) to {number(values[most])} ({names[most]})."


def positions(study: dict[str, Any]) -> tuple[Figure, Table]:
    """How likely the text is to the model as it goes on."""
    columns: dict[str, list[Any]] = {"strategy": [], "from": [], "nats": [], "low": [], "high": []}
    for row in study["rows"]:
        found = row["positions"]
        columns["strategy"] += [row["name"]] * len(found["from"])
        for key in ("from", "nats", "low", "high"):
            columns[key] += [np.nan if one is None else one for one in found[key]]
    kinds = {name: int if name == "from" else float for name in columns if name != "strategy"}
    table = Table(
        "study_positions",
        "Mean negative log-probability of blocks of tokens",
        {name: np.array(column, dtype=kinds.get(name)) for name, column in columns.items()},
        {"from": "first token of the block", "nats": "a token", "low": "95 % bootstrap interval over prompts"},
    )
    drawn = [(row, style) for row, style in _chosen(study["rows"]) if row["positions"]["from"]]
    traces = []
    for row, style in drawn:
        found = row["positions"]
        traces.append(line(row["name"], style, np.array(found["from"]), np.array(found["nats"], dtype=float)))
    ends = [
        f"{row['name']} from {number(row['positions']['nats'][0])} to {number(row['positions']['nats'][-1])}"
        for row, _ in drawn
    ]
    figure = Figure(
        "Likelihood as the text goes on",
        "Mean negative log-probability of a token under this model, in blocks of tokens. A curve that falls is a text "
        "that becomes ever more likely to the model. All strategies and their intervals are in the table.",
        f"Line chart over the position in the continuation: {'; '.join(ends)}.",
        traces,
        {"xaxis": axis("first token of the block"), "yaxis": axis("nats a token", rangemode="tozero")},
        (table.name,),
    )
    return figure, table


def _chosen(rows: list[dict[str, Any]]) -> list[tuple[dict[str, Any], str]]:
    """The human text and one strategy of each kind, with a style each: more lines could not be told apart."""
    wanted = {
        "null": lambda one, row: row["name"] == HUMAN,
        "centred": lambda one, row: one == {"strategy": "greedy"},
        "limit": lambda one, row: one.get("strategy") == "beam",
        "full": lambda one, row: one.get("strategy") == "sample" and set(one) == {"strategy", "top_p"},
        "raw": lambda one, row: one.get("strategy") == "sample" and one.get("temperature") == 1 and len(one) == 2,
    }
    found = []
    for style, wants in wanted.items():
        first = next((row for row in rows if wants(row["settings"] or {}, row)), None)
        if first is not None:
            found.append((first, style))
    return found
