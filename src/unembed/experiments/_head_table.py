"""The measured table of heads as files: JSON to go on from, CSV, and Markdown to paste."""

from __future__ import annotations

import csv
import dataclasses
import io
import json
import math
import platform
import re
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from unembed._version import __version__
from unembed.experiments._head_costs import HeadCosts, check_specs, default_specs, entropy, import_heads, measure
from unembed.results import InputError, replace_together

FILE = "heads.json"
COLUMNS = ("head", "step", "over linear", "memory", "parameters", "GFLOP", "rank bound", "loss at init")


def bench_heads(
    costs: HeadCosts,
    specs: Sequence[str] | None = None,
    *,
    folder: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[str, int, int], None] | None = None,
) -> dict[str, Any]:
    """Measure a training step under each head: time, memory, parameters, operations, rank bound, loss at init.

    A step is the mean cross-entropy of `tokens` hidden states (standard normal) and targets (Zipf's law, most frequent
    first) with all gradients; for `mtp` that of all its offsets. Times are medians over rounds, each beside the linear
    head's in the same process. Memory is what a first step adds to parameters and input, gradients included.

    Each head has a process of its own, started by `spawn`: call this under `if __name__ == "__main__"` in a script.

    Args:
        costs: What is measured.
        specs: Heads as `heads.build` takes them; all when None.
        folder: Where to write `heads.json`, `heads.csv` and `heads.md`, anew after each head; nowhere when None.
        resume: Take over the rows that are in `folder` already.
        progress: Called with a head, the heads done and all of them.

    Returns:
        What is in `heads.json`: `unembed`, `torch`, `machine`, `threads`, `date`, the fields of `costs`, `entropy` (of
        the targets' law, nats), `uniform` (ln V), and `rows`: a dict a head, with `failed` where it has no numbers.

    Raises:
        InputError: If a head cannot be built, or `folder` holds a table with other options.
    """
    import_heads(costs)
    specs = default_specs() if specs is None else list(specs)
    check_specs(specs, costs)
    table = _described(costs)
    kept = _kept(Path(folder), table) if resume and folder is not None else {}
    rows: list[dict[str, Any]] = []
    for place, spec in enumerate(specs):
        if progress is not None:
            progress(f"{spec} (kept)" if spec in kept else spec, place, len(specs))
        rows.append(kept.pop(spec, None) or measure(spec, costs))
        if folder is not None:  # what was measured before and is not asked for, or not yet, stays
            save(table | {"rows": [*rows, *kept.values()]}, Path(folder))
    if progress is not None:
        progress("", len(specs), len(specs))
    return table | {"rows": [*rows, *kept.values()]}


def save(table: dict[str, Any], folder: Path) -> None:
    """Write the three files, all or none."""
    with replace_together(folder) as stage:
        stage.text(FILE, json.dumps(table, indent=2) + "\n")
        stage.text("heads.csv", _csv(table))
        stage.text("heads.md", markdown(table))


def markdown(table: dict[str, Any]) -> str:
    """The table with its conditions above it."""
    cells = [COLUMNS, ["---"] * len(COLUMNS), *(words(row) for row in table["rows"])]
    return "\n".join([title(table), "", *("| " + " | ".join(line) + " |" for line in cells)]) + "\n"


def title(table: dict[str, Any]) -> str:
    """One line: what was measured, and what to hold the losses against."""
    return (
        f"N = {table['tokens']:,}, D = {table['dim']:,}, V = {table['vocab']:,}, {table['dtype']}, {table['machine']}, "
        f"{table['threads']} threads, torch {table['torch']}, {table['date']}. Medians of {table['rounds']} rounds, "
        "range of the ratio in brackets; that of `linear` to itself is noise. "
        f"Uniform guess {table['uniform']:.3f} nats, entropy of the targets' law {table['entropy']:.3f}."
    )


def words(row: dict[str, Any]) -> list[str]:
    """The cells of a row."""
    if "failed" in row:
        return [row["head"], f"failed: {row['failed']}", *[""] * (len(COLUMNS) - 2)]
    low, high = row["over_linear_range"]
    memory, seconds = row["added_bytes"], row["seconds"]
    return [
        row["head"],
        f"{seconds:.2f} s" if seconds >= 1 else f"{1e3 * seconds:.3g} ms",
        f"{row['over_linear']:.2f} ({low:.2f} to {high:.2f})",
        "not counted" if memory is None else f"{memory / 2**20:,.0f} MB",
        f"{row['parameters']:,}",
        f"{(row['forward_flops'] + row['backward_flops']) / 1e9:,.3g}",
        "none" if row["rank_bound"] is None else f"{row['rank_bound']:,}",
        f"{row['loss_at_init']:.3f}",
    ]


def _csv(table: dict[str, Any]) -> str:
    rows = []
    for row in table["rows"]:
        low, high = row.get("over_linear_range", ("", ""))
        flat = {name: value for name, value in row.items() if name != "over_linear_range"}
        rows.append(flat | {"over_linear_least": low, "over_linear_most": high})
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _described(costs: HeadCosts) -> dict[str, Any]:
    return {
        "unembed": __version__,
        "torch": torch.__version__,
        "machine": machine(costs.device),
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).date().isoformat(),
        **dataclasses.asdict(costs) | {"imports": list(costs.imports)},
        "entropy": entropy(costs.vocab),
        "uniform": math.log(costs.vocab),
    }


def machine(device: str) -> str:
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    cpuinfo = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*:\s*(.+)", cpuinfo.read_text()) if cpuinfo.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


def _kept(folder: Path, table: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Rows of an unfinished table with the same options; none where there is no table."""
    path = folder / FILE
    if not path.exists():
        return {}
    try:
        before = json.loads(path.read_text(encoding="utf-8"))
        rows = {row["head"]: row for row in before["rows"] if "failed" not in row}
        for row in rows.values():
            words(row)
    except (ValueError, KeyError, TypeError):
        raise InputError(f"{path}: not a table of heads; remove it, or give another folder.") from None
    free = ("date", "entropy", "uniform")
    other = [name for name in table if name not in free and before.get(name) != table[name]]
    if other:
        name = other[0]
        raise InputError(
            f"{path}: was measured with {name} {before.get(name)!r}, now it is {table[name]!r}; "
            "give the same, or leave out --resume to replace it."
        )
    return rows
