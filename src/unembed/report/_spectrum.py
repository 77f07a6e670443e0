"""The figures of `spectrum`: singular values, energy left, norms of the rows."""

from __future__ import annotations

import numpy as np

from unembed.report._figure import Figure, axis, bars, line, reference
from unembed.report._words import number
from unembed.results import Record, Result


def figures(result: Result, record: Record) -> list[Figure]:
    """Both spectra with the tolerance, the energy outside the first directions with its null, the norms."""
    return [_values(result), _energy(result), _norms(result)]


def _values(result: Result) -> Figure:
    table, values = result.table("spectrum_values"), result.values or {}
    index, raw, centred = (table.columns[name] for name in ("index", "raw", "centred"))
    tolerance = values.get("tolerance")
    traces = [line("raw W", "raw", index, raw), line("row-centred W", "centred", index, centred)]
    lowest = min(raw.min(), centred.min())
    # A tolerance decades below the spectrum would squeeze it: the caption gives the number instead.
    shown = bool(tolerance) and lowest < 100 * tolerance
    if shown:
        traces.append(reference("tolerance", [1, len(index)], [tolerance] * 2, "limit"))
    where = "dash-dotted line" if shown else "below this picture"
    return Figure(
        "Singular values of W",
        "Look for a first value far above the rest (one direction shared by all tokens; centring should lower it), and for "
        f"values at the tolerance {number(tolerance)} ({where}), which are directions that hold rounding noise only. "
        "Null: a matrix of independent random entries falls slowly, without a first value that stands out.",
        f"Line chart with a logarithmic vertical axis. Raw singular values fall from {number(raw[0])} to "
        f"{number(raw[-1])}, row-centred ones from {number(centred[0])} to {number(centred[-1])}.",
        traces,
        {
            "xaxis": axis("index of the singular value, largest first"),
            "yaxis": axis("singular value (units of W)", [raw, centred], type="log"),
        },
        (table.name,),
        log_toggle=("xaxis",),
    )


def _energy(result: Result) -> Figure:
    table = result.table("spectrum_values")
    index, raw, centred = (table.columns[name] for name in ("index", "raw_energy_left", "centred_energy_left"))
    width = len(index)
    start = np.concatenate([[0], index])
    return Figure(
        "Energy left outside the first directions",
        "The share of the squared singular values that the first i directions leave out. The further a curve lies below "
        "the dotted null, the fewer directions carry the head. Null: all directions equally strong, 1 − i / D.",
        f"Line chart. Outside the first tenth of the {width} directions lie {number(float(raw[width // 10]))} of the raw "
        f"and {number(float(centred[width // 10]))} of the row-centred energy; equal directions would leave about 0.9.",
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
        log_toggle=("yaxis",),
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
        "A token with a long row can win by its norm, one with a short row needs a hidden state that points at it. Look "
        "for a separate group on the left, which are often tokens that training never saw. "
        "Null: rows of independent random entries have nearly one norm, within about 1 / √(2 D) of it.",
        f"Histogram of {number(int(tokens.sum()))} rows with norms from {number(float(low[0]))} to "
        f"{number(float(high[-1]))}, median {number(median)}.",
        traces,
        {
            "xaxis": axis("norm of the row (units of W)"),
            "yaxis": axis("tokens in the bin"),
            "bargap": 0,
            "hovermode": "closest",
        },
        (table.name,),
        height=280,
        log_toggle=("yaxis",),
    )
