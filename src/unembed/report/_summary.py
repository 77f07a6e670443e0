"""The first words of the report: what was audited, and the facts about model, head and run."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from pathlib import PurePosixPath, PureWindowsPath
from typing import Any

from unembed.report._labels import label
from unembed.report._values import cell
from unembed.report._words import count, number
from unembed.results import Check, Record

STATUSES = {"failed": "Failed", "warning": "Warning", "skipped": "Skipped", "note": "Note", "ok": "Passed"}
_AS_WRITTEN = {"seed", "started"}
_ITEMS_SHOWN = 20
_PARITY = "UNE020"  # the check that ran the model


def title(record: Record) -> str:
    """The model's name; of a path its last part, the whole is in the provenance."""
    name = str(record.model.get("source") or record.model.get("architecture") or "Unnamed model")
    local = PurePosixPath(name).is_absolute() or PureWindowsPath(name).is_absolute() or name.startswith((".", "~"))
    return (PureWindowsPath(name).name or name) if local else name


def audited(record: Record) -> str:
    """One sentence: head, model, text."""
    head = record.head
    shape = [number(head[key]) for key in ("vocab_tokens", "in_features") if head.get(key) is not None]
    if head.get("vocab_tokens") is None and head.get("vocab_rows") is not None:
        shape.insert(0, number(head["vocab_rows"]))
    what = f"the {head.get('kind') or 'output'} head" + (
        f" ({' tokens × '.join(shape)} dimensions)" if len(shape) == 2 else ""
    )
    whose = f" of a {record.model['architecture']} model" if record.model.get("architecture") else ""
    traits = [
        _either(head.get("tied"), "tied to the embedding", "not tied to the embedding"),
        _either(head.get("bias"), "with a bias", "without a bias"),
        f"soft-cap {number(head['softcap'])}" if head.get("softcap") is not None else None,
        f"stored in {head['dtype']}" if head.get("dtype") else None,
    ]
    said = ", ".join(trait for trait in traits if trait)
    return f"This audit measured {what}{whose}{f', {said}' if said else ''}{_on_text(record)}."


def _either(flag: Any, yes: str, no: str) -> str | None:
    return None if flag is None else yes if flag else no


def _on_text(record: Record) -> str:
    tokens = record.provenance.get("tokens")
    if tokens is None:
        return ", from the weights alone"
    gradient, wanted = record.results.get("gradient"), record.provenance.get("tokens_requested")
    many = f" in {count(gradient.values['documents'], 'document')}" if gradient and gradient.values else ""
    short = wanted is not None and tokens < wanted
    measured = f"{number(tokens)} of {count(wanted, 'prediction')}" if short else count(tokens, "prediction")
    end = "; the text is exhausted" if short else ""
    return f", on {measured}{many}{_text(record.provenance.get('text'))}{end}"


def _text(about: Any) -> str:
    if not isinstance(about, Mapping):
        return f" of {about}" if about else ""
    if about.get("kind") == "topics":
        return " of the language reference inside Python"
    name, files = about.get("name"), about.get("number") if about.get("kind") == "files" else None
    return f" of {name}" if name else f" of {count(files, 'file')}" if isinstance(files, int) else ""


def loaded(checks: list[Check]) -> tuple[str, str] | None:
    """Whether the head is loaded right: the gravest status and a sentence, None without checks."""
    if not checks:
        return None
    reading, passed = by_status(checks)
    said = f"{number(len(passed))} of {count(len(checks), 'check')} passed"
    for status, times in Counter(check.status for check in reading).items():
        said += f", {count(times, status) if status in ('note', 'warning') else f'{number(times)} {status}'}"
    for status, verdict in (("failed", "is not loaded right"), ("warning", "may not be loaded right")):
        grave = [f"{check.code}: {check.message}" for check in reading if check.status == status]
        if grave:
            return status, f"The head {verdict}. {' '.join(grave)} ({said}.)"
    parity = next((check for check in checks if check.code == _PARITY), None)
    if parity is None:
        return "ok", f"The head is loaded right as far as its files tell: {said}. The model itself was not run."
    return "ok", f"The head is loaded right: {said}. {parity.message}"


def by_status(checks: list[Check]) -> tuple[list[Check], list[Check]]:
    """Checks that need reading, the gravest first, and those that passed."""
    order = list(STATUSES)
    ranked = sorted(checks, key=lambda check: order.index(check.status) if check.status in order else 0)
    return [check for check in ranked if check.status != "ok"], [check for check in ranked if check.status == "ok"]


def facts(content: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Nested facts as (name, value), groups with their name in front."""
    rows: list[tuple[str, str]] = []
    for key, value in content.items():
        if isinstance(value, Mapping):
            rows += [(f"{label(key, 'facts')}: {name}", said) for name, said in facts(value)]
        elif isinstance(value, list | tuple) and value and all(isinstance(item, Mapping) for item in value):
            numbered = {f"{key} {i}": item for i, item in enumerate(value[:_ITEMS_SHOWN], 1)}
            rows += facts(numbered)
            if len(value) > _ITEMS_SHOWN:
                rows.append((label(key, "facts"), f"{number(len(value) - _ITEMS_SHOWN)} more in audit.json"))
        else:
            said = str(value) if key in _AS_WRITTEN and value is not None else _exact(value)
            rows.append((label(key, "facts"), said))
    return rows


def _exact(value: Any) -> str:
    """A fact, whose trailing zeros say nothing: `1`, not `1.000`."""
    said = cell(value)
    return said.rstrip("0").rstrip(".") if isinstance(value, float) and "." in said and "×" not in said else said
