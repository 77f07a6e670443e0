"""The table that an audit prints when it is done."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

from unembed.cli._output import printable
from unembed.cli._rich import rich_module
from unembed.results import Record

_STYLE = {"info": "cyan", "warning": "yellow", "error": "red"}
_COLUMNS = ("measured", "value", "null, bound or tolerance", "95 % interval")
_TABLE_FITS = 72  # characters; below that a cell is a few letters wide


def print_summary(record: Record, folder: Path) -> None:
    """Print integrity, numbers with their null or tolerance, findings, and where the files are."""
    console = rich_module("console").Console()

    def line(said: str, style: str = "", **more: Any) -> None:
        console.print(rich_module("text").Text(printable(said), style=style), **more)

    title = f"Audit of {record.model['source']}{_amount(record)}"
    if console.width < _TABLE_FITS:
        line(title)
        for name, value, against, interval in _rows(record):
            line(f"{name.strip()}: {value}")
            for said in filter(None, (against, interval and f"95 % interval {interval}")):
                line(f"    {said}")
    else:
        console.print(_table(title, _rows(record)))
    line(f"integrity: {_integrity(record)}")
    for check in record.integrity:
        if check.status != "ok":
            line(f"{check.code} {check.status}: {check.message}", "dim" if check.status == "note" else "yellow")
    measured, wanted = record.provenance.get("tokens"), record.provenance.get("tokens_requested")
    if measured is not None and wanted is not None and measured < wanted:
        line(f"measured on {measured:,} of {wanted:,} predictions: the text is exhausted", "yellow")
    for finding in record.findings:
        line(f"{finding.code} {finding.severity}: {finding.title}", _STYLE[finding.severity])
        if finding.severity != "info":
            line(f"    {finding.evidence}")
    line(f"Report: {folder / 'report.html'}", soft_wrap=True)
    line(f"Data:   {folder / 'audit.json'}", soft_wrap=True)


def _table(title: str, rows: list[tuple[str, str, str, str]]) -> Any:
    text = rich_module("text").Text
    table = rich_module("table").Table(title=text(printable(title)), title_justify="left")
    for column in _COLUMNS:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(text(printable(cell)) for cell in row))
    return table


def _amount(record: Record) -> str:
    """`, 8,192 predictions in 57 documents`."""
    tokens, gradient = record.provenance.get("tokens"), record.results.get("gradient")
    if tokens is None:
        return ""
    documents = gradient.values["documents"] if gradient and gradient.values else None
    return f", {tokens:,} predictions" + (f" in {documents:,} document{'s'[: documents != 1]}" if documents else "")


def _integrity(record: Record) -> str:
    """`11 ok, 1 note`."""
    counts = Counter(check.status for check in record.integrity)
    return ", ".join(f"{number} {status}" for status, number in counts.most_common()) or "no checks"


def _rows(record: Record) -> list[tuple[str, str, str, str]]:
    head = record.head
    shape = f"{head['vocab_rows']:,} rows x {head['in_features']:,}"
    tokens = "tokenizer unknown" if head["vocab_tokens"] is None else f"tokenizer {head['vocab_tokens']:,}"
    values = {name: result.values for name, result in record.results.items() if result.values is not None}
    return [
        ("head", f"{shape}, {'tied' if head['tied'] else 'untied'}, {head['dtype']}", tokens, ""),
        *_ranks(values, head["in_features"]),
        *_gradient(values.get("gradient", {})),
        *_predictions(values.get("saturation")),
    ]


def _ranks(values: dict[str, Any], width: int) -> list[tuple[str, str, str, str]]:
    rows = []
    if "spectrum" in values:
        found = values["spectrum"]
        rows.append(("rank of W", f"{found['rank']:,}", f"D = {width:,}, tolerance {found['tolerance']:.2g}", ""))
    if "logprob_rank" in values:
        found = values["logprob_rank"]
        bound = "no bound (soft-cap)" if found["bound"] is None else f"bound {found['bound']:,}"
        limit = found.get("limit")
        if limit is not None and found["bound"] is not None and limit < found["bound"]:
            bound += f", {limit:,} could show"
        rows.append(("rank of log P", f"{found['rank']:,}", f"{bound}, tolerance {found['tolerance']:.2g}", ""))
    return rows


def _gradient(values: dict[str, Any]) -> list[tuple[str, str, str, str]]:
    rows = []
    for convention in ("raw", "centred"):
        found = values.get(convention)
        if found:
            null = f"random subspace {found['kept_null']:.4f}"
            why = values["interval"] if values["interval"].startswith("none") else "none"
            rows.append((f"gradient kept, {convention}", f"{found['kept']:.4f}", null, ""))
            ratio = "none" if found["ratio"] is None else f"{found['ratio']:.3f}"
            sd = found.get("ratio_null_sd")
            null = "1" if sd is None else f"1 ± {1.96 * sd:.3f} (95 %)"
            rows.append(("  ratio to the null", ratio, null, _interval(found["ratio_ci95"], why)))
    return rows


def _predictions(values: dict[str, Any] | None) -> list[tuple[str, str, str, str]]:
    if values is None:
        return []
    loss, entropy = values["loss"], values["entropy"]
    uniform = f"uniform {values['entropy_uniform']:.2f}"
    return [
        ("loss, nats", f"{loss['mean']:.4f}", "", _interval(loss["ci95"])),
        ("entropy, nats", f"{entropy['mean']:.4f}", uniform, _interval(entropy["ci95"])),
    ]


def _interval(ends: Any, without: str = "none") -> str:
    return f"{ends[0]:.4g} to {ends[1]:.4g}" if ends else without
