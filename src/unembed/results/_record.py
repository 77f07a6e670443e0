"""One audit as data: `audit.json`, `tables.npz` and a CSV file a table; written whole, read back equal."""

from __future__ import annotations

import json
import math
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from unembed.results._files import replace_together
from unembed.results._result import SEVERITIES, Check, Finding, Result, Severity, Table

SCHEMA_VERSION = 1


@dataclass
class Record:
    """Everything one audit found. The report and the terminal summary are functions of this.

    Args:
        model: What was audited: `source`, `kind`, `architecture`, `hash`, ...
        head: The output layer, keys as in docs/audit-json.md.
        integrity: The checks, in the order they ran.
        results: Measurement name -> result, in the order of the report.
        provenance: Text, tokens, seed, device, versions; all that repeats with the same seed.
        timing: When and how long; the only part that differs between two runs with one seed.
    """

    model: dict[str, Any]
    head: dict[str, Any]
    integrity: list[Check] = field(default_factory=list)
    results: dict[str, Result] = field(default_factory=dict)
    provenance: dict[str, Any] = field(default_factory=dict)
    timing: dict[str, Any] = field(default_factory=dict)

    @property
    def findings(self) -> list[Finding]:
        """All findings, the gravest first."""
        found = [finding for result in self.results.values() for finding in result.findings]
        return sorted(found, key=lambda finding: -SEVERITIES.index(finding.severity))

    def worst(self) -> Severity | None:
        """The gravest severity among the findings, None without findings."""
        return self.findings[0].severity if self.findings else None

    def to_json(self) -> dict[str, Any]:
        """The content of `audit.json`: JSON types only, infinities and NaN as null."""
        results = {
            name: {**result.values, "code": result.code} if result.values is not None else None
            for name, result in self.results.items()
        }
        return plain(
            {
                "schema_version": SCHEMA_VERSION,
                "model": self.model,
                "head": self.head,
                "integrity": [asdict(check) for check in self.integrity],
                "results": results,
                "not_applicable": {name: r.reason for name, r in self.results.items() if r.reason},
                "findings": [asdict(finding) for finding in self.findings],
                "tables": {
                    table.name: {"result": name, "title": table.title, "rows": len(table), "columns": table.notes}
                    for name, result in self.results.items()
                    for table in result.tables
                },
                "titles": {name: [result.code, result.title] for name, result in self.results.items()},
                "provenance": self.provenance,
                "timing": self.timing,
            }
        )

    def save(self, folder: str | Path, *, extra: dict[str, str] | None = None) -> Path:
        """Write `audit.json`, `tables.npz` and `tables/*.csv`: all of them or none.

        Args:
            folder: Made if missing; files of an earlier audit are replaced, other files are left alone.
            extra: Further text files by name, such as the report.

        Raises:
            OSError: If the folder cannot be written; what was there before is untouched.
        """
        folder = Path(folder)
        names = [table.name for result in self.results.values() for table in result.tables]
        assert len(set(names)) == len(names), f"table names must be unique in a record, got {sorted(names)}"
        tables = {table.name: table for result in self.results.values() for table in result.tables}
        with replace_together(folder) as stage:
            for name, table in tables.items():
                stage.text(f"tables/{name}.csv", table.to_csv())
            columns: dict[str, Any] = {
                f"{n}/{c}": array for n, table in tables.items() for c, array in table.columns.items()
            }
            with stage.open("tables.npz") as file:
                np.savez_compressed(file, **columns)
            for name, content in (extra or {}).items():
                stage.text(name, content)
            stage.text("audit.json", json.dumps(self.to_json(), indent=2, allow_nan=False) + "\n")
            stage.drop(f"tables/{name}.csv" for name in _tables_before(folder) if name not in tables)
        return folder

    @classmethod
    def load(cls, folder: str | Path) -> Record:
        """Read a folder written by `save`.

        Raises:
            FileNotFoundError: If `audit.json` or `tables.npz` is missing.
            ValueError: If the schema is newer than this version reads.
        """
        folder = Path(folder)
        content = json.loads((folder / "audit.json").read_text(encoding="utf-8"))
        version = content.get("schema_version") if isinstance(content, dict) else None
        if version != SCHEMA_VERSION:
            raise ValueError(
                f"{folder / 'audit.json'}: expected schema_version {SCHEMA_VERSION}, got {version!r}; "
                "read it with the unembed version that wrote it."
            )
        with np.load(folder / "tables.npz", allow_pickle=False) as arrays:
            columns: dict[str, dict[str, np.ndarray]] = {}
            for key in arrays.files:
                table, column = key.split("/", 1)
                columns.setdefault(table, {})[column] = arrays[key]
        results = {}
        for name, (code, title) in content["titles"].items():
            values = content["results"][name]
            results[name] = Result(
                name=name,
                code=code,
                title=title,
                values=values if values is None else {key: value for key, value in values.items() if key != "code"},
                tables=tuple(
                    Table(table, about["title"], columns.get(table, {}), about["columns"])
                    for table, about in content["tables"].items()
                    if about["result"] == name
                ),
                findings=tuple(Finding(**item) for item in content["findings"] if item["code"] == code),
                reason=content["not_applicable"].get(name, ""),
            )
        return cls(
            model=content["model"],
            head=content["head"],
            integrity=[Check(**item) for item in content["integrity"]],
            results=results,
            provenance=content["provenance"],
            timing=content["timing"],
        )


def _tables_before(folder: Path) -> list[str]:
    """Names of the tables that an earlier audit left in `folder`."""
    try:
        names = json.loads((folder / "audit.json").read_text(encoding="utf-8"))["tables"]
    except (OSError, ValueError, KeyError, TypeError):
        return []
    return [name for name in names if name == safe_name(name)] if isinstance(names, dict) else []


def safe_name(name: str) -> str:
    """`name` as a file or folder name: letters, digits, dot, dash and underscore only, never empty or hidden."""
    return re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-.") or "model"


def plain(value: Any) -> Any:
    """JSON types only: numpy scalars as Python's own, tuples as lists, infinities and NaN as None."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value
