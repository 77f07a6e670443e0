"""The `values` of a result as tables for a person, whatever keys they hold.

Groups with the same keys (the two conventions, say) stand side by side as columns of one table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from unembed.report._labels import label
from unembed.report._words import NONE, number, span

_CONVENTIONS = {"raw", "centred", "kept_raw", "kept_centred", "null_centred"}
_HEADINGS = {
    "spectrum": {"": "Raw W"},
    "logprob_rank": {"": "As it is", "centred": "Row-centred"},
}


@dataclass(frozen=True)
class Grid:
    """One table: `rows` of (key, label, cells), a heading a column; `title` is empty where the columns say enough."""

    title: str
    columns: list[str]
    rows: list[tuple[str, str, list[str]]]

    @property
    def flat(self) -> bool:
        """Whether it reads better lying down: a few short numbers of one named group."""
        return bool(self.title) and len(self.rows) <= 8 and all(len(row[2][0]) <= 12 for row in self.rows)


def grids(name: str, values: Mapping[str, Any]) -> list[Grid]:
    """All of `values`: what stands alone first, then the groups."""
    alone = {key: value for key, value in values.items() if not _is_group(value)}
    groups = {key: value for key, value in values.items() if _is_group(value)}
    for key, value in list(groups.items()):  # a group inside a group becomes one of its own
        inner = {f"{key} {k}": v for k, v in value.items() if _is_group(v)}
        groups[key] = {k: v for k, v in value.items() if not _is_group(v)}
        groups.update(inner)
    beside = {key: group for key, group in groups.items() if len(group.keys() & alone.keys()) >= 3}
    shared = [key for key in alone if any(key in group for group in beside.values())]
    made = [Grid("", ["Value"], _rows({key: value for key, value in alone.items() if key not in shared}, [alone]))]
    if beside:
        extra = [key for group in beside.values() for key in group if key not in alone]
        keys = dict.fromkeys([*shared, *extra])
        own = _HEADINGS.get(name, {})
        columns = [own.get("", "All"), *(own.get(key) or _heading(key) for key in beside)]
        made.append(Grid("", columns, _rows(keys, [alone, *beside.values()])))
    made += _families({key: group for key, group in groups.items() if key not in beside})
    return [grid for grid in made if grid.rows]


def _families(groups: Mapping[str, Mapping[str, Any]]) -> list[Grid]:
    families: dict[tuple[str, ...], list[str]] = {}
    for key, group in groups.items():
        families.setdefault(tuple(sorted(group)), []).append(key)
    made = []
    for members in families.values():
        first = groups[members[0]]
        title = _heading(members[0]) if len(members) == 1 else ""
        columns = ["Value"] if len(members) == 1 else [_heading(key) for key in members]
        made.append(Grid(title, columns, _rows(first, [groups[key] for key in members])))
    return made


def _rows(keys: Mapping[str, Any], columns: list[Mapping[str, Any]]) -> list[tuple[str, str, list[str]]]:
    return [(key, label(key), [_cell(key, column[key]) if key in column else "" for column in columns]) for key in keys]


def _cell(key: str, value: Any) -> str:
    return "does not apply" if value is None and key in _CONVENTIONS else cell(value)


def _heading(key: str) -> str:
    first, _, rest = key.partition(" ")
    return f"{label(first)}, {label(rest)}" if rest else label(key)


def _is_group(value: Any) -> bool:
    return isinstance(value, Mapping) and not ("mean" in value and set(value) <= {"mean", "ci95", "sd"})


def cell(value: Any) -> str:
    """One value in words."""
    if isinstance(value, Mapping):
        if "mean" not in value:
            return ", ".join(f"{label(key, 'facts')}: {cell(item)}" for key, item in value.items()) or NONE
        ends, sd = value.get("ci95"), value.get("sd")
        more = f" (95 % {span(ends)})" if ends else f" (sd {number(sd)})" if sd is not None else ""
        return number(value["mean"]) + more
    if isinstance(value, list | tuple):
        if len(value) == 2 and all(isinstance(item, int | float) for item in value):
            return span(value)
        return ", ".join(cell(item) for item in value) or NONE
    return number(value)
