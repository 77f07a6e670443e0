"""The page of a decoding study: what was measured of each strategy, beside what people wrote. Made from its folder."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from unembed.report._figure import STYLES, Figure, axis, line, plain, reference, toggled
from unembed.report._render import drawing, environment, part
from unembed.report._tables import ROWS_SHOWN, view
from unembed.report._words import NONE, count, number, span
from unembed.results import InputError, Table, safe_name, write_whole
from unembed.text import visible

_FILE = "study.json"
_HUMAN = "human"
_LIKELY = ("greedy", "beam")  # strategies that look for likely text
_FIXED = (*_LIKELY, "contrastive")  # strategies that draw nothing
# Metric -> its name, what it is, and what the axis says.
_METRICS = {
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
    figures = [_positions(study), *(_compared(study, name) for name in _METRICS)]
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
            columns=[name for name, _, _ in _METRICS.values()],
            rows=[(row["name"], [_parts(row, name) for name in _METRICS]) for row in study["rows"]],
            meanings=[(name, what) for name, what, _ in _METRICS.values()],
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
    human = rows.get(_HUMAN)
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


def _compared(study: dict[str, Any], name: str) -> tuple[Figure, Table]:
    """One metric of all strategies, with the human text as a line."""
    title, what, unit = _METRICS[name]
    unit = unit or title.lower().replace("bleu", "BLEU").replace("zipf", "Zipf")
    rows = study["rows"]
    found = [row["metrics"][name] for row in rows]
    values = np.array([np.nan if one["value"] is None else one["value"] for one in found], dtype=float)
    low, high = (np.array([one["ci95"][end] if one["ci95"] else np.nan for one in found]) for end in (0, 1))
    names = np.array([row["name"] for row in rows])
    kinds = np.array([(row["settings"] or {}).get("strategy", "") for row in rows])
    fixed = np.isin(kinds, _FIXED)
    traces = []
    for label, style, which in (("draws nothing", "centred", fixed), ("draws", "raw", ~fixed & (names != _HUMAN))):
        traces.append(_points(label, style, names[which], np.stack([values, low, high])[:, which]))
    people = np.flatnonzero(names == _HUMAN)
    listed = [str(one) for one in names if one != _HUMAN]
    if len(people) and np.isfinite(values[people[0]]) and listed:
        value = values[people[0]]
        traces.append(reference("human", [value, value], [0, 1]) | {"y": [listed[0], listed[-1]]})
        for end in (low[people[0]], high[people[0]]):
            if np.isfinite(end):
                more = {"y": [listed[0], listed[-1]], "showlegend": False, "opacity": 0.45}
                traces.append(reference("its interval", [end, end], [0, 1]) | more)
    log = {"type": "log"} if name == "perplexity" else {}
    seen = np.concatenate([values, low, high])
    table = Table(
        f"study_{name}",
        f"{title} of each strategy",
        {"strategy": names, "value": values, "low": low, "high": high},
        {"low": "95 % bootstrap interval over prompts", "value": unit},
    )
    figure = Figure(
        title,
        f"{what[0].upper()}{what[1:]}. Bars are 95 % bootstrap intervals over prompts. The dotted line is what the "
        "human text has, the fainter ones its interval.",
        f"Points with intervals, one a strategy. {_extremes(names, values)}",
        traces,
        {
            "xaxis": axis(unit, seen, **log),
            "yaxis": {
                "type": "category",
                "categoryorder": "array",
                "categoryarray": listed[::-1],
                "tickmode": "array",
                "tickvals": listed,
                "ticks": "",
            },
            "hovermode": "closest",
        },
        (table.name,),
        height=110 + 26 * len(listed),
        log_toggle={} if log or not (values[np.isfinite(values)] > 0).all() else toggled("xaxis", seen),
    )
    return figure, table


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


def _positions(study: dict[str, Any]) -> tuple[Figure, Table]:
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
        "null": lambda one, row: row["name"] == _HUMAN,
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
