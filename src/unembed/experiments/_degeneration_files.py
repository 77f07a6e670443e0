"""The study as files: `study.json` to go on from, a CSV file, Markdown to paste, and every continuation.

`study.json` holds `schema_version`, `unembed`, `torch`, `machine`, `date`; `model`, `architecture`, `parameters`,
`dtype`, `device`; `prompt_tokens`, `tokens`, `batch`, `seed`; `prompts` (how many), `text` (what the documents were),
`prompts_sha256`; and `rows`. A row has `name`, `settings` (null for the documents), `seconds`, `metrics` (by name:
`value`, `ci95`, `reason`) and `positions` (`from`, `nats`, `low`, `high` of blocks of tokens).
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from unembed._version import __version__
from unembed.experiments._head_table import machine
from unembed.results import InputError, replace_together, safe_name

FILE = "study.json"
SCHEMA_VERSION = 1
# The columns of the table, and what stands above them.
COLUMNS = {
    "perplexity": "perplexity",
    "bits_per_byte": "bits per byte",
    "rep_32": "rep-32",
    "seq_rep_4": "seq-rep-4",
    "distinct_2": "distinct-2",
    "longest_repeat": "longest repeat",
    "zipf_coefficient": "Zipf",
    "self_bleu_4": "self-BLEU-4",
}
_FREE = ("date", "batch")  # may differ between the parts of one study


def described(
    model: Any, documents: Any, config: Any, *, source: str, prompts: int, prompts_sha256: str
) -> dict[str, Any]:
    """What was measured, on what and with what."""
    describe = getattr(documents, "describe", None)
    return {
        "schema_version": SCHEMA_VERSION,
        "unembed": __version__,
        "torch": torch.__version__,
        "machine": machine(str(model.device)),
        "date": datetime.now(UTC).date().isoformat(),
        "model": source or getattr(model.config, "name_or_path", "") or type(model).__name__,
        "architecture": model.config.model_type,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
        "device": str(model.device),
        "prompt_tokens": config.prompt_tokens,
        "tokens": config.tokens,
        "batch": config.batch,
        "seed": config.seed,
        "prompts": prompts,
        "text": describe() if describe else {"kind": "documents"},
        "prompts_sha256": prompts_sha256,
    }


def save(study: dict[str, Any], folder: Path, name: str, texts: list[dict[str, Any]] | None) -> None:
    """Write the study so far and, where it is new, the text of one strategy; all or none."""
    with replace_together(folder) as stage:
        if texts is not None:
            lines = (json.dumps(line) + "\n" for line in texts)
            stage.text(f"continuations/{safe_name(name)}.jsonl", "".join(lines))
        stage.text(FILE, json.dumps(study, indent=2, allow_nan=False) + "\n")
        stage.text("study.csv", _csv(study["rows"]))
        stage.text("study.md", markdown(study))


def kept(folder: Path, about: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of an unfinished study with the same options, by name; none where there is no study.

    Raises:
        InputError: If the file is no study, or one of something else.
    """
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        rows = {row["name"]: row for row in before["rows"]}
        for row in rows.values():
            cells(row)
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: not a study of decoding; remove it, or give another folder.") from None
    other = [name for name in about if name not in _FREE and before.get(name) != about[name]]
    if other:
        name = other[0]
        raise InputError(
            f"{path}: was measured with {name} {before.get(name)!r}, now it is {about[name]!r}; "
            "give the same, or leave out --resume to replace it."
        )
    return rows


def markdown(study: dict[str, Any]) -> str:
    """The table with its conditions above it."""
    lines: Iterable[list[str]] = (
        ["strategy", *COLUMNS.values()],
        ["---"] * (len(COLUMNS) + 1),
        *([row["name"], *cells(row)] for row in study["rows"]),
    )
    return "\n".join([title(study), "", *("| " + " | ".join(line) + " |" for line in lines)]) + "\n"


def title(study: dict[str, Any]) -> str:
    """One line: what was measured."""
    return (
        f"{study['model']} ({study['parameters']:,} parameters, {study['dtype']}): {study['prompts']} prompts of "
        f"{study['prompt_tokens']} tokens, each continued by {study['tokens']}, seed {study['seed']}; "
        f"{study['machine']}, torch {study['torch']}, {study['date']}. In brackets 95 % bootstrap intervals over "
        "prompts."
    )


def cells(row: dict[str, Any]) -> list[str]:
    """The numbers of a row, in the order of `COLUMNS`, with their intervals."""
    return [_cell(row["metrics"][name]) for name in COLUMNS]


def _cell(found: dict[str, Any]) -> str:
    if found["value"] is None:
        return found["reason"] or "infinite"
    return _short(found["value"]) + (f" ({' to '.join(map(_short, found['ci95']))})" if found["ci95"] else "")


def _short(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def _csv(rows: list[dict[str, Any]]) -> str:
    """A line for each strategy and metric, with all digits."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["strategy", "metric", "value", "low", "high", "reason"])
    for row in rows:
        for name, found in row["metrics"].items():
            writer.writerow([row["name"], name, found["value"], *(found["ci95"] or ("", "")), found["reason"]])
    return text.getvalue()
