"""The figures of `coefficients`: mean and spread by rank, and the energy by rank with its null."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from unembed.report._figure import STYLES, Figure, axis, line, plain
from unembed.report._words import number, power
from unembed.results import Record, Result, Table

_KINDS = {"kept_raw": ("raw", "kept, raw W"), "kept_centred": ("centred", "kept, row-centred W")}


def figures(result: Result, record: Record) -> list[Figure]:
    """The profile of the full and of the kept coefficients."""
    table = result.table("coefficients_profile")
    kinds = [kind for kind in _KINDS if f"{kind}_mean" in table.columns]
    return [_profile(table, kinds), _energy(table, kinds)]


def _profile(table: Table, kinds: list[str]) -> Figure:
    columns = table.columns
    spread = np.median([columns[f"{kind}_sd"] for kind in kinds])
    unit = 10.0 ** math.floor(math.log10(spread)) if spread > 0 else 1e-3
    traces, layout = _panels(columns, kinds, unit)
    return Figure(
        "Coefficients by rank: mean and one standard deviation",
        "Lines and the points at rank 1 are means over the sampled tokens, bands and bars one standard "
        f"deviation to each side. The vertical axis is linear within ±{unit:g} and logarithmic beyond. The "
        "full gradient starts with the target (near −1) and goes on with its rivals (positive). Look for how "
        "much of that order is left after the head. Null: after a random subspace the means shrink to r / V "
        "of their size and an even spread lies over all ranks.",
        f"Line chart with bands. The first full coefficient is {number(columns['full_mean'][0])} on average; "
        "kept, it is "
        + " and ".join(f"{number(columns[f'{kind}_mean'][0])} ({_KINDS[kind][1]})" for kind in kinds)
        + ".",
        traces,
        layout,
        (table.name,),
        height=160 + 220 * len(kinds),
    )


def _panels(
    columns: dict[str, np.ndarray], kinds: list[str], unit: float
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Traces and layout: a panel for each kind of kept coefficients, the full ones in all of them."""
    traces: list[dict[str, Any]] = []
    layout: dict[str, Any] = {"hovermode": "closest", "legend": {"traceorder": "normal"}}
    share = (1 - 0.08 * (len(kinds) - 1)) / len(kinds)
    ticks = _symlog_ticks(_reach(columns, kinds), unit)
    for panel, kind in enumerate(kinds):
        style, name = _KINDS[kind]
        bottom = (len(kinds) - 1 - panel) * (share + 0.08)
        key = "y" if panel == 0 else f"y{panel + 1}"
        shared = {"xaxis": "x", "yaxis": key}
        before = shared | {"showlegend": panel == 0}
        traces += _band(columns, "full", "full", "full, before the head", unit=unit, shared=before)
        traces += _band(columns, kind, style, name, unit=unit, shared=shared)
        layout[f"yaxis{key[1:]}"] = axis("coefficient", domain=plain([bottom, bottom + share]), **ticks)
    layout["xaxis"] = axis(
        "rank of the coefficient, largest first",
        columns["rank_to"],
        type="log",
        range=plain([-0.12, math.log10(_middle(columns)[-1]) + 0.05]),
        anchor=f"y{len(kinds)}" if len(kinds) > 1 else "y",
    )
    return traces, layout


def _band(
    columns: dict[str, np.ndarray], kind: str, style: str, name: str, *, unit: float, shared: dict[str, Any]
) -> list[dict[str, Any]]:
    """Mean and spread: rank 1, mostly the target and of the other sign, as a point; the ranks after it as a band."""
    mean, sd, look = columns[f"{kind}_mean"], columns[f"{kind}_sd"], STYLES[style]
    x = _middle(columns)
    low, middle, high = (symlog(part, unit) for part in (mean - sd, mean, mean + sd))
    first, last = columns["rank_from"], columns["rank_to"]
    said = [
        [number(a) if a == b else f"{number(a)}–{number(b)}", number(m), number(s)]
        for a, b, m, s in zip(first, last, mean, sd, strict=True)
    ]
    hover = {"hovertemplate": "rank %{customdata[0]}: %{customdata[1]} ± %{customdata[2]}"}
    silent: dict[str, Any] = {"mode": "lines", "showlegend": False, "hoverinfo": "skip", "hovertemplate": None}
    silent["line"] = {"color": look["colour"], "width": 0}
    errors = {"symmetric": False, "array": plain(high[:1] - middle[:1]), "arrayminus": plain(middle[:1] - low[:1])}
    point = line(name, style, x[:1], middle[:1]) | {"mode": "markers", "customdata": said[:1]} | hover | shared
    point |= {"showlegend": False, "error_y": {"type": "data", "color": look["colour"], "thickness": 2, **errors}}
    centre = line(name, style, x[1:], middle[1:]) | {"mode": "lines", "customdata": said[1:]} | hover | shared
    below = line(name, style, x[1:], low[1:]) | shared | silent
    above = line(name, style, x[1:], high[1:]) | shared | silent
    above |= {"fill": "tonexty", "fillcolor": f"{look['colour']}/0.2"}
    return [below, above, centre, point]


def _middle(columns: dict[str, np.ndarray]) -> np.ndarray:
    """Where a group of ranks is drawn: the geometric middle of its ends."""
    return np.sqrt(columns["rank_from"].astype(float) * columns["rank_to"])


def symlog(values: np.ndarray, unit: float) -> np.ndarray:
    """Linear within `unit`, a decade a step beyond it: `v / unit` becomes 1 at the unit, 2 at ten times that."""
    scaled = np.abs(values) / unit
    return np.sign(values) * np.where(scaled <= 1, scaled, 1 + np.log10(np.maximum(scaled, 1)))


def _reach(columns: dict[str, np.ndarray], kinds: list[str]) -> tuple[float, float]:
    pairs = [(columns[f"{kind}_mean"], columns[f"{kind}_sd"]) for kind in ("full", *kinds)]
    return min(float((m - s).min()) for m, s in pairs), max(float((m + s).max()) for m, s in pairs)


def _symlog_ticks(ends: tuple[float, float], unit: float) -> dict[str, Any]:
    low, high = (float(symlog(np.array(end), unit)) for end in ends)
    steps = range(math.floor(low), math.ceil(high) + 1)
    start = round(math.log10(unit)) - 1

    def label(step: int) -> str:
        if step == 0:
            return "0"
        exponent = start + abs(step)
        size = f"{10.0**exponent:g}" if -4 < exponent < 3 else f"10{power(exponent)}"
        return f"{'−' if step < 0 else ''}{size}"

    return {
        "tickvals": list(steps),
        "ticktext": [label(step) for step in steps],
        "range": plain([low - 0.2, high + 0.2]),
        "zeroline": True,
    }


def _energy(table: Table, kinds: list[str]) -> Figure:
    columns, last = table.columns, table.columns["rank_to"]
    traces = [line("full, before the head", "full", last, np.cumsum(columns["full_energy"]))]
    traces += [line(_KINDS[k][1], _KINDS[k][0], last, np.cumsum(columns[f"{k}_energy"])) for k in kinds]
    null = "null_centred" if "kept_centred" in kinds else "null_raw"
    drawn = line("null: random subspace", "null", last, np.cumsum(columns[f"{null}_energy"])) | {"mode": "lines"}
    traces.append(drawn)
    tops = [f"{_KINDS[kind][1]} {number(float(columns[f'{kind}_energy'][0]))}" for kind in kinds]
    return Figure(
        "Energy in the largest coefficients",
        "The share of the squared norm in the first coefficients, ranked by the full gradient. Before the "
        "head nearly all lies in a few; after it most is spread over tokens that were hardly predicted. Look "
        "for a kept curve above the null: a head that favours the coefficients that matter. Null, dotted: the same "
        f"gradient through a random subspace of the {'row-centred' if null == 'null_centred' else 'raw'} rank, in "
        "expectation.",
        f"Line chart. The first coefficient carries {number(float(columns['full_energy'][0]))} of the full "
        f"energy; after the head: {', '.join(tops)}.",
        traces,
        {
            "xaxis": axis("coefficients taken, largest first", last, type="log"),
            "yaxis": axis("share of the energy", range=[0, 1.03]),
        },
        (table.name,),
    )
