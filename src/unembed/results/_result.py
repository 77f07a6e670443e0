"""The parts of a result: `Check`, `Finding`, `Table`, `Result`."""

from __future__ import annotations

import csv
import io
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np

Severity = Literal["info", "warning", "error"]
SEVERITIES: tuple[Severity, ...] = get_args(Severity)  # from mild to grave
Status = Literal["ok", "note", "warning", "failed", "skipped"]


@dataclass(frozen=True)
class Check:
    """One integrity check, run before any number is printed.

    Args:
        code: `UNE0xx`, stable between versions.
        status: `failed` stops the audit with exit code 2; `skipped` says in `message` what was missing.
        message: One line for a person: what was found, with its numbers.
    """

    code: str
    status: Status
    message: str


@dataclass(frozen=True)
class Finding:
    """One statement drawn from the numbers, in plain words.

    Args:
        code: The code of the measurement, `UNE1xx`.
        severity: What `--fail-on` compares against.
        title: The statement in one short sentence.
        evidence: The number with its null, tolerance or interval.
        means: What follows from it.
        not_means: What does not follow from it, though a reader may think so.
    """

    code: str
    severity: Severity
    title: str
    evidence: str
    means: str
    not_means: str = ""


@dataclass(frozen=True)
class Table:
    """Named columns of equal length: the data behind a figure.

    Args:
        name: File name without ending, unique in a record: `gradient_bands`.
        title: What a row is.
        columns: Column name -> one-dimensional array. Text columns hold strings made safe by `text.visible`.
        notes: Column name -> meaning and unit, for the header of the table.
    """

    name: str
    title: str
    columns: dict[str, np.ndarray]
    notes: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        lengths = {name: len(column) for name, column in self.columns.items()}
        if len(set(lengths.values())) > 1:
            raise ValueError(f"Table `{self.name}`: columns must have one length, got {lengths}.")
        objects = [name for name, column in self.columns.items() if column.dtype == object]
        if objects:
            raise ValueError(f"Table `{self.name}`: columns must hold numbers or strings, {objects} hold objects.")

    def __len__(self) -> int:
        return len(next(iter(self.columns.values()), ()))

    def to_csv(self) -> str:
        """The table as CSV text, floats with all their digits."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(self.columns)
        writer.writerows(zip(*(column.tolist() for column in self.columns.values()), strict=True))
        return text.getvalue()


@dataclass(frozen=True)
class Result:
    """What one measurement found.

    Args:
        name: The key in `audit.json`: `gradient`.
        code: `UNE1xx`.
        title: Heading for a person: "Gradient through the head".
        values: The numbers under `results[name]`, JSON types only; None where `reason` says why there are none.
        tables: The data behind its figures.
        findings: Statements drawn from the numbers; kept with the gravest first, as they are read back.
        reason: Why the measurement does not apply to this head; empty when it does.
    """

    name: str
    code: str
    title: str
    values: dict[str, Any] | None
    tables: tuple[Table, ...] = ()
    findings: tuple[Finding, ...] = ()
    reason: str = ""

    def __post_init__(self) -> None:
        assert all(finding.code == self.code for finding in self.findings), "a record finds a finding by its code"
        graver_first = sorted(self.findings, key=lambda finding: -SEVERITIES.index(finding.severity))
        object.__setattr__(self, "findings", tuple(graver_first))

    def table(self, name: str) -> Table:
        """The table called `name`.

        Raises:
            KeyError: If the result has no such table.
        """
        for table in self.tables:
            if table.name == name:
                return table
        raise KeyError(f"Result `{self.name}` has no table `{name}`, only {[t.name for t in self.tables]}.")
