"""The table that an audit prints when it is done."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from unembed.cli._rich import rich_module
from unembed.results import Record

_STYLE = {"info": "cyan", "warning": "yellow", "error": "red"}


def print_summary(record: Record, folder: Path) -> None:
    """Print integrity, numbers with their null or tolerance, findings, and where the files are."""
    console = rich_module("console").Console()
    text = rich_module("text").Text
    table = rich_module("table").Table(title=text(f"Audit of {record.model['source']}"), title_justify="left")
    for column in ("measured", "value", "null, bound or tolerance", "95 % interval"):
        table.add_column(column)
    for row in _rows(record):
        table.add_row(*(text(cell) for cell in row))
    console.print(table)
    for check in record.integrity:
        if check.status in ("warning", "failed"):
            console.print(text(f"{check.code} {check.status}: {check.message}", style="yellow"))
    for finding in record.findings:
        console.print(text(f"{finding.code} {finding.severity}: {finding.title}", style=_STYLE[finding.severity]))
    console.print(text(f"Report: {folder / 'report.html'}\nData:   {folder / 'audit.json'}"), soft_wrap=True)


def _rows(record: Record) -> list[tuple[str, str, str, str]]:
    head = record.head
    shape = f"{head['vocab_rows']:,} rows x {head['in_features']:,}"
    tokens = "tokenizer unknown" if head["vocab_tokens"] is None else f"tokenizer {head['vocab_tokens']:,}"
    rows = [("head", f"{shape}, {'tied' if head['tied'] else 'untied'}, {head['dtype']}", tokens, "")]
    values = {name: result.values for name, result in record.results.items() if result.values is not None}
    if "spectrum" in values:
        found = values["spectrum"]
        rows.append(
            ("rank of W", f"{found['rank']:,}", f"D = {head['in_features']:,}, tolerance {found['tolerance']:.2g}", "")
        )
    if "logprob_rank" in values:
        found = values["logprob_rank"]
        bound = "no bound (soft-cap)" if found["bound"] is None else f"bound {found['bound']:,}"
        rows.append(("rank of log P", f"{found['rank']:,}", f"{bound}, tolerance {found['tolerance']:.2g}", ""))
    for convention in ("raw", "centred"):
        found = values.get("gradient", {}).get(convention)
        if found:
            rows.append(
                (
                    f"gradient kept, {convention}",
                    f"{found['kept']:.4f}",
                    f"random subspace {found['kept_null']:.4f}",
                    "",
                )
            )
            rows.append(("  ratio to the null", f"{found['ratio']:.3f}", "1", _interval(found["ratio_ci95"])))
    if "saturation" in values:
        found = values["saturation"]
        rows.append(("loss, nats", f"{found['loss']['mean']:.4f}", "", _interval(found["loss"]["ci95"])))
        rows.append(
            (
                "entropy, nats",
                f"{found['entropy']['mean']:.4f}",
                f"uniform {found['entropy_uniform']:.2f}",
                _interval(found["entropy"]["ci95"]),
            )
        )
    return rows


def _interval(ends: Any) -> str:
    return f"{ends[0]:.4g} to {ends[1]:.4g}" if ends else "too few documents"
