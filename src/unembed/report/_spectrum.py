"""The figures of `spectrum`: singular values, energy left, norms of the rows."""

from __future__ import annotations

import numpy as np

from unembed.report._figure import Figure, axis, bars, line, reference, toggled
from unembed.report._words import number
from unembed.results import Record, Result


def figures(result: Result, record: Record) -> list[Figure]:
    """Both spectra with the tolerance, the energy outside the first directions with its null, the norms."""
    return [_values(result), _energy(result), _norms(result)]


def _values(result: Result) -> Figure:
    table, values = result.table("spectrum_values"), result.values or {}
    index, raw, centred = (table.columns[name] for name in ("index", "raw", "centred"))
    tolerance = values.get("tolerance")
    null = random_spectrum(len(index), values.get("rows") or len(index), float((centred**2).sum()))
    traces = [line("raw W", "raw", index, raw), line("row-centred W", "centred", index, centred)]
    traces.append(reference("null: random entries", index, null))
    lowest = min(raw.min(), centred.min())
    # A tolerance decades below the spectrum would squeeze it: the caption gives the number instead.
    shown = bool(tolerance) and lowest < 100 * tolerance
    if shown:
        traces.append(reference("tolerance", [1, len(index)], [tolerance] * 2, "limit"))
    where = "dash-dotted line" if shown else "below this picture"
    return Figure(
        "Singular values of W",
        "Look for a first value far above the rest (one direction shared by all tokens; centring should lower "
        f"it), and for values at the tolerance {number(tolerance)} ({where}), which are directions that hold "
        "rounding noise only. Null, dotted: a matrix of this size and centred energy with independent random "
        "entries (Marchenko and Pastur).",
        f"Line chart with a logarithmic vertical axis. Raw singular values fall from {number(raw[0])} to "
        f"{number(raw[-1])}, row-centred ones from {number(centred[0])} to {number(centred[-1])}.",
        traces,
        {
            "xaxis": axis("index of the singular value, largest first"),
            "yaxis": axis("singular value (units of W)", [raw, centred, null], type="log"),
        },
        (table.name,),
        log_toggle=toggled("xaxis", index),
    )


def _energy(result: Result) -> Figure:
    table = result.table("spectrum_values")
    index, raw, centred = (table.columns[name] for name in ("index", "raw_energy_left", "centred_energy_left"))
    width = len(index)
    start = np.concatenate([[0], index])
    return Figure(
        "Energy left outside the first directions",
        "The share of the squared singular values that the first i directions leave out. The further a curve "
        "lies below the dotted null, the fewer directions carry the head. Null: all directions equally "
        "strong, 1 − i / D.",
        f"Line chart. Outside the first tenth of the {width} directions lie {number(float(raw[width // 10]))} "
        f"of the raw and {number(float(centred[width // 10]))} of the row-centred energy; equal directions "
        "would leave about 0.9.",
        [
            line("raw W", "raw", start, np.concatenate([[1.0], raw])),
            line("row-centred W", "centred", start, np.concatenate([[1.0], centred])),
            reference("null: equal directions", start, 1 - start / width),
        ],
        {
            "xaxis": axis("directions taken, i"),
            "yaxis": axis("share of the energy left", rangemode="tozero"),
        },
        (table.name,),
        log_toggle=toggled("yaxis", [raw, centred]),
    )


def _norms(result: Result) -> Figure:
    table, values = result.table("spectrum_norms"), result.values or {}
    low, high, tokens = (table.columns[name] for name in ("from", "to", "tokens"))
    median = (values.get("norm") or {}).get("median")
    traces = [bars("tokens", "raw", low, high, tokens)]
    if median is not None:
        traces.append(reference("median", [median, median], [0, float(tokens.max())], "limit"))
    return Figure(
        "Norms of the token rows",
        "A token with a long row can win by its norm, one with a short row needs a hidden state that points at it. "
        "Look for a group of its own, left or right: often tokens that training hardly saw, still near where they "
        "started. Null: rows of independent random entries have nearly one norm, within about 1 / √(2 D) of it.",
        f"Histogram of {number(int(tokens.sum()))} rows with norms from {number(float(low[0]))} to "
        f"{number(float(high[-1]))}, median {number(median)}.",
        traces,
        {
            "xaxis": axis("norm of the row (units of W)"),
            "yaxis": axis("tokens in the bin", rangemode="tozero"),
            "bargap": 0,
            "hovermode": "closest",
        },
        (table.name,),
        height=280,
        log_toggle=toggled("yaxis", np.append(tokens, 1)),
    )


def random_spectrum(width: int, rows: int, energy: float) -> np.ndarray:
    r"""Singular values, largest first, of a large matrix of independent entries with this much energy in all.

    Quantiles of the law of Marchenko and Pastur: $s^2 = \sigma^2 V (1 + g + 2 \sqrt g \cos t)$ with $g = D / V$ has the
    density $\sin^2 t / (1 + g + 2 \sqrt g \cos t)$ in t, up to a constant.

    Args:
        width: Number of singular values, the smaller side of the matrix.
        rows: The larger side.
        energy: Sum of the squared singular values.
    """
    rows = max(rows, width)
    ratio = width / rows
    angle = (np.arange(20_000) + 0.5) * (np.pi / 20_000)
    squares = 1 + ratio + 2 * np.sqrt(ratio) * np.cos(angle)
    cumulative = np.cumsum(np.sin(angle) ** 2 / squares)
    places = (np.arange(width) + 0.5) / width
    values = np.interp(places, cumulative / cumulative[-1], squares)
    return np.sqrt(values * (energy / max(values.sum(), np.finfo(float).tiny)))
