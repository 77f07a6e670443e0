"""A figure as plain data: what plotly draws, with the words around it. Drawn by `templates/script.js`.

Colours are names (`@raw`, `@centred`, `@full`, `@null`) that the page resolves from its style sheet, so that one colour
means one thing in every figure and follows the theme. Each meaning has a dash and a symbol too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from unembed.report._words import number

MOST_POINTS = 5000
STYLES: dict[str, dict[str, str]] = {
    "raw": {"colour": "@raw", "dash": "solid", "symbol": "circle"},
    "centred": {"colour": "@centred", "dash": "7px,3px", "symbol": "diamond"},
    "full": {"colour": "@full", "dash": "solid", "symbol": "square"},
    "null": {"colour": "@null", "dash": "2px,3px", "symbol": "line-ns"},
    "limit": {"colour": "@ink", "dash": "9px,3px,2px,3px", "symbol": "line-ns"},
}


@dataclass(frozen=True)
class Figure:
    """One figure of the report.

    Args:
        title: What is shown, a short phrase.
        caption: What to look for, and the null.
        alternative: The picture in words, for who cannot see it.
        traces: Plotly traces, JSON types only.
        layout: Plotly layout, on top of the page's own.
        tables: Names of the tables that hold its data.
        height: Pixels.
        log_toggle: Axes (`xaxis`) with a button for a logarithmic scale, and what it changes there.
    """

    title: str
    caption: str
    alternative: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    tables: tuple[str, ...]
    height: int = 340
    log_toggle: dict[str, dict[str, Any]] = field(default_factory=dict)


def plain(values: ArrayLike) -> list[float | int | None]:
    """JSON numbers with six significant digits; None where there is no finite one."""
    listed = np.asarray(values).tolist()
    return [item if isinstance(item, int) else _short(item) for item in listed]


def _short(value: float) -> float | None:
    return float(f"{value:.6g}") if value is not None and math.isfinite(value) else None


def thin(length: int, most: int = MOST_POINTS) -> np.ndarray:
    """Indices to draw: all, or `most` at even steps of the logarithm of the index, both ends among them."""
    if length <= most:
        return np.arange(length)
    # Rounding merges the first steps, so a finer grid is needed to come near `most`; the first that exceeds it is cut.
    low, high = most, length * 40
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if len(_grid(length, middle)) <= most else (low, middle)
    return _grid(length, low)


def _grid(length: int, steps: int) -> np.ndarray:
    return np.unique(np.rint(np.geomspace(1, length, steps)).astype(np.int64)) - 1


def line(name: str, style: str, x: np.ndarray, y: np.ndarray, **more: Any) -> dict[str, Any]:
    """A line over at most `MOST_POINTS` points, with markers where there are few."""
    drawn = thin(len(x))
    look = STYLES[style]
    trace: dict[str, Any] = {
        "type": "scatter",
        "name": name,
        "mode": "lines+markers" if len(drawn) <= 30 else "lines",
        "x": plain(np.asarray(x)[drawn]),
        "y": plain(np.asarray(y)[drawn]),
        "line": {"color": look["colour"], "width": 2, "dash": look["dash"]},
        "marker": {"color": look["colour"], "size": 6, "symbol": look["symbol"]},
        "hovertemplate": "%{y:.4g}",
    }
    return trace | more


def reference(name: str, x: ArrayLike, y: ArrayLike, style: str = "null", **more: Any) -> dict[str, Any]:
    """A null, bound or tolerance: grey, dashed, in the legend."""
    return line(name, style, np.asarray(x), np.asarray(y), mode="lines", hovertemplate="%{y:.4g}") | more


def bars(name: str, style: str, low: np.ndarray, high: np.ndarray, height: np.ndarray) -> dict[str, Any]:
    """A histogram from its edges."""
    return {
        "type": "bar",
        "name": name,
        "x": plain((low + high) / 2),
        "width": plain(high - low),
        "y": plain(height),
        "customdata": [
            [number(float(a)), number(float(b)), number(c)] for a, b, c in zip(low, high, height, strict=True)
        ],
        "marker": {"color": f"{STYLES[style]['colour']}/0.75", "line": {"color": "@paper", "width": 0.5}},
        "hovertemplate": "%{customdata[0]} to %{customdata[1]}: %{customdata[2]}",
    }


def axis(title: str, values: ArrayLike | None = None, **more: Any) -> dict[str, Any]:
    """An axis; `values` are what it shows, which decides the labels of a logarithmic one."""
    spec: dict[str, Any] = {"title": {"text": title}} | more
    return spec | log_labels(values) if spec.get("type") == "log" and values is not None else spec


def log_labels(values: ArrayLike) -> dict[str, Any]:
    """Type and labels of a logarithmic axis: 1, 2, 5 over a few decades, powers of ten over many."""
    seen = np.asarray(values, dtype=float).ravel()
    seen = seen[np.isfinite(seen) & (seen > 0)]
    decades = math.log10(seen.max() / seen.min()) if len(seen) else 0.0
    if decades < 2:
        return {"type": "log", "dtick": "D2", "tickformat": ",~g"}
    return {"type": "log", "dtick": max(1, math.ceil(decades / 7))}


def toggled(name: str, values: ArrayLike) -> dict[str, dict[str, Any]]:
    """The `log_toggle` of a figure with one button, on the axis `name` that shows `values`."""
    return {name: log_labels(values)}
