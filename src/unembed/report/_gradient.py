"""The figures of `gradient`: kept against its null, and the ratio by how often the target occurs."""

from __future__ import annotations

from typing import Any

import numpy as np

from unembed.report._figure import STYLES, Figure, axis, plain, reference
from unembed.report._words import number, span
from unembed.results import Record, Result

_NAMES = {"raw": "raw W", "centred": "row-centred W"}


def figures(result: Result, record: Record) -> list[Figure]:
    """Both conventions as dots with intervals, and the frequency bands."""
    return [_kept(result, record), _bands(result)]


def no_interval(values: dict[str, Any]) -> str:
    """That there is no interval of the ratio, and the measurement's own reason where it gives one."""
    word, _, reason = values["interval"].partition(": ")
    return f"no interval: {reason}" if word == "none" else "no interval"


def _kept(result: Result, record: Record) -> Figure:
    assert result.values is not None, "there are figures only where there are values"
    values = result.values
    found = {name: values[name] for name in ("raw", "centred") if values[name]}
    said = [_sentence(name, numbers) for name, numbers in found.items()]
    lone = f" Only the {_NAMES[next(iter(found))]} convention applies to this head." if len(found) == 1 else ""
    return Figure(
        "Kept share of the gradient against its null",
        "The dot is what the head keeps of the norm of the logit gradient, with the 95 % interval over "
        f"documents{_parts(record)}; the upright bar is the null, what a random subspace of the same rank keeps, and "
        "the line across it holds 95 % of random subspaces. Right of that line the head passes more than a random "
        f"one would, left of it less.{lone} The numbers are in the last table of this section.",
        "Dot and interval chart. " + " ".join(said),
        [
            trace
            for place, name in enumerate(found)
            for trace in _dot(name, found[name], no_interval(values), first=place == 0)
        ],
        {
            "xaxis": axis("kept share of the norm, ‖GΠ‖ / ‖G‖", range=_around(found)),
            "yaxis": axis("", type="category", range=[len(found) - 0.5, -0.7], showgrid=False),
            "hovermode": "closest",
        },
        (),
        height=130 + 60 * len(found),
    )


def _parts(record: Record) -> str:
    """What a document is, where that is not plain: in files."""
    about = record.provenance.get("text")
    if not isinstance(about, dict) or about.get("kind") != "files":
        return ""
    return " (parts of up to 32 Ki characters of a long plain file count as documents of their own)"


def _around(found: dict[str, dict[str, Any]]) -> list[float | int | None]:
    """Range that shows nulls, dots and intervals, with room for the words above the dots."""
    places = [n[key] for n in found.values() for key in ("kept", "kept_null")]
    places += [end * n["kept_null"] for n in found.values() for end in n["ratio_ci95"] or []]
    places += [n["kept_null"] * (1 + side * _wide(n)) for n in found.values() for side in (-1, 1)]
    low, high = min(places, default=0.0), max(places, default=1.0)
    margin = 0.15 * ((high - low) or 0.1)
    return plain([low - margin, high + margin])


def _wide(numbers: dict[str, Any]) -> float:
    """Half the range of 95 % of random subspaces, over the null."""
    return 1.96 * (numbers.get("ratio_null_sd") or 0.0)


def _sentence(name: str, numbers: dict[str, Any]) -> str:
    interval = span(numbers["ratio_ci95"])
    return (
        f"{_NAMES[name]}: kept {number(numbers['kept'])}, null {number(numbers['kept_null'])}, ratio "
        f"{number(numbers['ratio'])}{f' (95 % interval {interval})' if interval else ''}."
    )


def _dot(name: str, numbers: dict[str, Any], without: str, *, first: bool) -> list[dict[str, Any]]:
    look, kept, null = STYLES[name], numbers["kept"], numbers["kept_null"]
    ends = [end * null for end in numbers["ratio_ci95"] or []]
    errors = {"array": plain([ends[1] - kept]), "arrayminus": plain([kept - ends[0]])} if ends else {"array": [0]}
    ratio = f"ratio {number(numbers['ratio'])}" if numbers["ratio"] is not None else ""
    return [
        {
            "type": "scatter",
            "name": "null: random subspace",
            "mode": "markers",
            "x": plain([null]),
            "y": [_NAMES[name]],
            "marker": {"color": "@null", "symbol": "line-ns", "size": 34, "line": {"color": "@null", "width": 3}},
            "legendgroup": "null",
            "showlegend": first,
            "error_x": {
                "type": "data",
                "array": plain([_wide(numbers) * null]),
                "color": "@null",
                "thickness": 1.5,
                "width": 5,
            },
            "hovertemplate": f"null {number(null)} ± {number(_wide(numbers) * null)}",
        },
        {
            "type": "scatter",
            "name": f"{_NAMES[name]}, kept",
            "mode": "markers+text",
            "showlegend": False,
            "x": plain([kept]),
            "y": [_NAMES[name]],
            "text": [ratio],
            "textposition": "top center",
            "cliponaxis": False,
            "error_x": {
                "type": "data",
                "symmetric": False,
                "thickness": 2,
                "width": 7,
                "color": look["colour"],
                **errors,
            },
            "marker": {"color": look["colour"], "symbol": look["symbol"], "size": 11},
            "hovertemplate": f"kept {number(kept)}" + (f"<br>95 % interval {span(ends)}" if ends else f"<br>{without}"),
        },
    ]


def _bands(result: Result) -> Figure:
    assert result.values is not None, "there are figures only where there are values"
    table = result.table("gradient_bands")
    columns = table.columns
    style = "raw" if result.values["centred"] is None else "centred"
    null = result.values[style]["kept_null"] or np.nan
    pairs = zip(columns["occurrences_from"], columns["occurrences_to"], strict=True)
    names = [_band(int(low), int(high)) for low, high in pairs]
    return Figure(
        "Kept over null, by how often the target occurs in the measured text",
        "Each point pools the predictions whose target occurs that often, with a 95 % interval that takes "
        "tokens as independent. Null: 1, the dotted line. Look for a slope: a head that passes more for "
        "frequent targets than for rare ones. Open squares are what an error on the target alone would keep, "
        "from the length of its row in the column space.",
        "Dot and interval chart. "
        + "; ".join(f"{name} occurrences: {number(r)}" for name, r in zip(names, columns["kept"] / null, strict=True))
        + ".",
        [
            _measured(columns, names, style, null),
            _one_hot(columns, names, null),
            reference("null: random subspace", [0], [1]) | {"x": names, "y": [1] * len(names)},
        ],
        {
            "xaxis": axis("occurrences of the target in the measured text", type="category"),
            "yaxis": axis("kept / null"),
            "hovermode": "closest",
        },
        (table.name,),
    )


def _measured(columns: dict[str, np.ndarray], names: list[str], style: str, null: float) -> dict[str, Any]:
    ratio, above, below = (columns[name] / null for name in ("kept", "kept_high", "kept_low"))
    return {
        "type": "scatter",
        "name": f"{_NAMES[style]}, measured",
        "mode": "markers",
        "x": names,
        "y": plain(ratio),
        "customdata": [
            [number(r), number(lo), number(hi), number(n)]
            for r, lo, hi, n in zip(ratio, below, above, columns["tokens"], strict=True)
        ],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": plain(above - ratio),
            "arrayminus": plain(ratio - below),
            "thickness": 2,
            "width": 6,
            "color": STYLES[style]["colour"],
        },
        "marker": {"color": STYLES[style]["colour"], "symbol": STYLES[style]["symbol"], "size": 10},
        "hovertemplate": "%{customdata[0]} (95 % %{customdata[1]} to %{customdata[2]})<br>%{customdata[3]} predictions",
    }


def _one_hot(columns: dict[str, np.ndarray], names: list[str], null: float) -> dict[str, Any]:
    return {
        "type": "scatter",
        "name": "if the error were on the target alone",
        "mode": "markers",
        "x": names,
        "y": plain(columns["kept_if_one_hot"] / null),
        "marker": {"color": "@full", "symbol": "square-open", "size": 9, "line": {"width": 2, "color": "@full"}},
        "hovertemplate": "%{y:.4g} for an error on the target alone",
    }


def _band(low: int, high: int) -> str:
    if high < 0:
        return f"{low:,}+"
    return f"{low:,}" if low == high else f"{low:,}–{high:,}"
