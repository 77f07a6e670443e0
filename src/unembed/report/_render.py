"""From a record to one HTML file that needs nothing else: scripts, styles and data are inside."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unembed.report import _coefficients, _gradient, _headline, _logprob_rank, _saturation, _spectrum, _summary
from unembed.report._figure import Figure
from unembed.report._tables import ROWS_SHOWN, view
from unembed.report._values import grids
from unembed.report._words import number, printable
from unembed.results import InputError, Record, Result, safe_name, write_whole

if TYPE_CHECKING:
    from types import ModuleType

    from jinja2 import Environment

_FIGURES: dict[str, Callable[[Result, Record], list[Figure]]] = {
    "spectrum": _spectrum.figures,
    "logprob_rank": _logprob_rank.figures,
    "gradient": _gradient.figures,
    "coefficients": _coefficients.figures,
    "saturation": _saturation.figures,
}
_PACKAGES = ("jinja2", "markupsafe", "plotly")
_ESCAPES = {ord("<"): "\\u003c", ord(">"): "\\u003e", ord("&"): "\\u0026"}


def check_installed() -> None:
    """Say before any work whether a report can be made at its end; imports nothing.

    Raises:
        InputError: If plotly or jinja2 is missing; names the extra that brings them.
    """
    for package in _PACKAGES:
        if importlib.util.find_spec(package) is None:
            raise _missing(package)


def render(record: Record | str | Path, *, figures: bool = True) -> str:
    """The report of an audit as one self-contained page. The same record gives the same text.

    Args:
        record: A record, or the folder it was saved in.
        figures: Whether to draw; without, the page has words and the first rows of the tables in a fortieth of the
            size, for a notebook.

    Raises:
        InputError: If plotly or jinja2 is missing; names the extra that brings them.
        FileNotFoundError: If the folder holds no record.
    """
    if not isinstance(record, Record):
        record = Record.load(record)
    sections = _sections(record, figures=figures)
    reading, passed = _summary.by_status(record.integrity)
    drawn = [figure for section in sections for figure in section["figures"]]
    tables = [table for section in sections for table in section["tables"]]
    return (
        environment()
        .get_template("report.html.j2")
        .render(
            record=record,
            title=_summary.title(record),
            audited=_summary.audited(record),
            loaded=_summary.loaded(record.integrity),
            findings=record.findings,
            statuses=_summary.STATUSES,
            reading=reading,
            passed=passed,
            keys=_headline.keys(record),
            anchors={section["result"].name: section["id"] for section in sections},
            sections=sections,
            tables=tables,
            drawings=[drawing(item["figure"]) for item in drawn],
            brief=not figures,
            facts=_facts(record),
            rows_shown=ROWS_SHOWN,
            plotly=part("plotly.offline").get_plotlyjs() if drawn else "",
        )
    )


def write(folder: str | Path) -> Path:
    """Write `report.html` into a folder that holds a saved record, whole or not at all.

    Raises:
        InputError: If plotly or jinja2 is missing; names the extra that brings them.
        FileNotFoundError: If the folder holds no record.
    """
    path = Path(folder) / "report.html"
    page = render(folder)
    with write_whole(path, "wb") as file:
        file.write(page.encode("utf-8"))
    return path


def embed(value: Any) -> str:
    """JSON that can stand inside a `<script>`: ASCII only, without `<`, `>` and `&`."""
    return json.dumps(value, allow_nan=False, separators=(",", ":")).translate(_ESCAPES)


def part(name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise _missing(name.partition(".")[0]) from error


def _missing(package: str) -> InputError:
    return InputError(f'The report needs {package}: pip install "unembed[report]"')


def environment() -> Environment:
    jinja2, markupsafe = part("jinja2"), part("markupsafe")
    loader = jinja2.PackageLoader("unembed.report", "templates")
    environment = jinja2.Environment(
        loader=loader,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        # One place for every string that reaches the page: nothing hidden, nothing that UTF-8 cannot hold.
        finalize=lambda v: printable(v) if isinstance(v, str) and not isinstance(v, markupsafe.Markup) else v,
    )
    environment.filters["number"] = number
    environment.globals["asset"] = lambda name: markupsafe.Markup(loader.get_source(environment, name)[0])
    environment.globals["embed"] = lambda value: markupsafe.Markup(embed(value))
    environment.globals["verbatim"] = markupsafe.Markup
    return environment


def _sections(record: Record, *, figures: bool) -> list[dict[str, Any]]:
    """What the template needs of each measurement; figures and tables carry their number on the page."""
    sections: list[dict[str, Any]] = []
    figure_count = table_count = 0
    taken: set[str] = {"summary", "integrity", "numbers", "provenance", "content"}
    for name, result in record.results.items():
        anchor = safe_name(name)
        while anchor in taken:
            anchor += "-"
        taken.add(anchor)
        drawn = _FIGURES[name](result, record) if figures and name in _FIGURES and result.values is not None else []
        tables = [{"number": table_count + i, "name": t.name, "view": view(t)} for i, t in enumerate(result.tables)]
        # A table stands under the last figure that it holds the data of.
        under = {table: i for i, figure in enumerate(drawn) for table in figure.tables}
        placed = [
            {
                "number": figure_count + i,
                "figure": figure,
                "tables": [table for table in tables if under.get(table["name"]) == i],
            }
            for i, figure in enumerate(drawn)
        ]
        sections.append(
            {
                "id": anchor,
                "result": result,
                "known": name in _FIGURES,
                "grids": grids(name, result.values or {}),
                "figures": placed,
                "tables": tables,
                "loose": [table for table in tables if table["name"] not in under],
            }
        )
        figure_count, table_count = figure_count + len(drawn), table_count + len(tables)
    return sections


def drawing(figure: Figure) -> dict[str, Any]:
    return {"traces": figure.traces, "layout": figure.layout, "log": figure.log_toggle}


def _facts(record: Record) -> list[tuple[str, list[tuple[str, str]]]]:
    provenance = {key: value for key, value in record.provenance.items() if key != "command"}
    groups = {"Model": record.model, "Head": record.head, "Run": provenance, "Time": record.timing}
    return [(name, rows) for name, group in groups.items() if (rows := _summary.facts(group))]
