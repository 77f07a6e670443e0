"""A table of a record as the page shows it: the first rows in words, the whole as CSV."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from unembed.report._labels import label
from unembed.report._words import number
from unembed.results import Table, safe_name

ROWS_SHOWN = 40
_SENTINELS: dict[tuple[str, object], str] = {("occurrences_to", -1): "no end"}
_WITHOUT_COMMAS = {"id"}
_ENDS = {"spectrum_extremes": ("Shortest rows", "Longest rows")}  # both ends of a sorted list, the outermost first


@dataclass(frozen=True)
class View:
    """What the template needs of a table.

    Args:
        title: What a row is.
        columns: (heading, note, whether it holds numbers) of each column.
        parts: (heading, rows as text) of what is shown; one part without a heading, or the two ends of a list.
        total: How many rows the whole has.
        csv: The whole.
        file: File name of the download.
        named: Whether rows are named by text, so that the table is reading matter and not only data of a figure.
    """

    title: str
    columns: list[tuple[str, str, bool]]
    parts: list[tuple[str, list[list[str]]]]
    total: int
    csv: str
    file: str
    named: bool


def view(table: Table) -> View:
    """The table made ready."""
    kinds = {name: np.asarray(column).dtype.kind for name, column in table.columns.items()}
    columns = [(label(name, "table"), table.notes.get(name, ""), kinds[name] in "iuf") for name in table.columns]
    cells = [[_cell(name, value) for value in column[:ROWS_SHOWN].tolist()] for name, column in table.columns.items()]
    return View(
        title=table.title,
        columns=columns,
        parts=_parts(table.name, [list(row) for row in zip(*cells, strict=True)]),
        total=len(table),
        csv=table.to_csv(),
        file=f"{safe_name(table.name)}.csv",
        named=any(kind in "US" for kind in kinds.values()),
    )


def _parts(name: str, rows: list[list[str]]) -> list[tuple[str, list[list[str]]]]:
    if name not in _ENDS:
        return [("", rows)]
    half = len(rows) // 2
    low, high = _ENDS[name]
    return [(low, rows[:half]), (high, rows[half:][::-1])]


def _cell(column: str, value: object) -> str:
    if (column, value) in _SENTINELS:
        return _SENTINELS[column, value]
    return str(value) if column in _WITHOUT_COMMAS else number(value)
