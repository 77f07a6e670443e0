"""The page of a decoding study: what was measured of each strategy, beside what people wrote. Made from its folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from unembed.report._render import drawing, environment, part
from unembed.report._study_figures import HUMAN, METRICS, compared, positions
from unembed.report._tables import ROWS_SHOWN, view
from unembed.report._words import NONE, count, number, span
from unembed.results import InputError, Table, safe_name, write_whole
from unembed.text import visible

_FILE = "study.json"
_LIKELY = ("greedy", "beam")  # strategies that look for likely text
_TEXTS = "study_texts"
_SHOWN_CHARACTERS = 400


def write_study(folder: str | Path) -> Path:
    """Write `report.html` into a folder that holds `study.json`, whole or not at all.

    Raises:
        InputError: If plotly or jinja2 is missing, or the folder holds no study.
    """
    path = Path(folder) / "report.html"
    page = render_study(folder)
    with write_whole(path, "wb") as file:
        file.write(page.encode("utf-8"))
    return path


def render_study(folder: str | Path) -> str:
    """The study as one self-contained page. The same folder gives the same text.

    Raises:
        InputError: If plotly or jinja2 is missing, or the folder holds no study.
    """
    folder = Path(folder)
    study = _read(folder / _FILE)
    figures = [positions(study), *(compared(study, name) for name in METRICS)]
    tables = [*(table for _, table in figures), *_samples(study, folder)]
    views = [replace(view(table), named=table.name == _TEXTS) for table in tables]  # others are data of a figure
    items = [{"number": i, "name": one.file, "view": one} for i, one in enumerate(views)]
    shown = [{"number": i, "figure": figure, "table": items[i]} for i, (figure, _) in enumerate(figures)]
    return (
        environment()
        .get_template("study.html.j2")
        .render(
            study=study,
            lead=_lead(study),
            statements=_statements(study),
            columns=[name for name, _, _ in METRICS.values()],
            rows=[(row["name"], [_parts(row, name) for name in METRICS]) for row in study["rows"]],
            meanings=[(name, what) for name, what, _ in METRICS.values()],
            figures=shown,
            samples=items[len(figures) :],
            tables=items,
            drawings=[drawing(figure) for figure, _ in figures],
            facts=_facts(study),
            brief=False,
            rows_shown=ROWS_SHOWN,
            plotly=part("plotly.offline").get_plotlyjs(),
        )
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        study = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(
            f"{path.parent}: expected a folder with {_FILE}; `unembed generate --study` writes one."
        ) from None
    if study.get("schema_version") != 1:
        raise InputError(f"{path}: expected schema_version 1, got {study.get('schema_version')!r}.")
    return study


def _lead(study: dict[str, Any]) -> str:
    prompts = count(study["prompts"], "prompt")
    return (
        f"{prompts} of {study['prompt_tokens']} tokens, each continued by {study['tokens']} tokens, by "
        f"{count(len(study['rows']) - 1, 'strategy', 'strategies')}; "
        "beside them the human text, which is what the documents say there."
    )


def _statements(study: dict[str, Any]) -> list[str]:
    """What was found of the strategies that look for likely text, with the human text beside it; nothing beyond."""
    rows = {row["name"]: row for row in study["rows"]}
    human = rows.get(HUMAN)
    if human is None:
        return []
    said = []
    for name, row in rows.items():
        settings = row["settings"] or {}
        if settings.get("strategy") not in _LIKELY or "repetition_penalty" in settings:
            continue
        said.append(
            f"{name}: perplexity {_cell(row, 'perplexity')} under this model, the human text "
            f"{_cell(human, 'perplexity')}. "
            f"Share of 4-grams that repeat within a continuation: {_cell(row, 'seq_rep_4')}, the human text "
            f"{_cell(human, 'seq_rep_4')}. {_apart(row, human)}"
        )
    return said


def _apart(row: dict[str, Any], human: dict[str, Any]) -> str:
    """Whether the intervals of repetition meet."""
    own, other = row["metrics"]["seq_rep_4"]["ci95"], human["metrics"]["seq_rep_4"]["ci95"]
    if not own or not other:
        return "There is no interval to compare."
    if own[0] > other[1]:
        return "It repeats more: the intervals do not meet."
    return "It repeats less: the intervals do not meet." if own[1] < other[0] else "The intervals meet."


def _cell(row: dict[str, Any], name: str) -> str:
    value, ends = _parts(row, name)
    return f"{value} ({ends})" if ends else value


def _parts(row: dict[str, Any], name: str) -> tuple[str, str]:
    """A number, or why there is none, and its interval."""
    found = row["metrics"][name]
    value = (found["reason"] or NONE) if found["value"] is None else number(found["value"])
    return value, span(found["ci95"])


def _samples(study: dict[str, Any], folder: Path) -> list[Table]:
    """The first prompt's text by each strategy, where the continuations lie beside the study."""
    names, texts = [], []
    for row in study["rows"]:
        path = folder / "continuations" / f"{safe_name(row['name'])}.jsonl"
        if path.exists():
            with path.open(encoding="utf-8") as file:
                names.append(row["name"])
                texts.append(visible(json.loads(file.readline())["text"], _SHOWN_CHARACTERS))
    if not names:
        return []
    columns = {"strategy": np.array(names), "text": np.array(texts)}
    return [Table(_TEXTS, "The first prompt, continued by each", columns, {"text": "its beginning"})]


def _facts(study: dict[str, Any]) -> list[tuple[str, str]]:
    return [
        (name.replace("_", " ").capitalize(), value if isinstance(value, str) else number(value))
        for name, value in study.items()
        if not isinstance(value, list | dict)
    ]
