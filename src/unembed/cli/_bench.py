"""`unembed bench heads`: the measured table of what each head costs on this machine."""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unembed.cli._options import whole
from unembed.cli._output import BAD, printable, say

if TYPE_CHECKING:
    from collections.abc import Sequence


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    bench = commands.add_parser("bench", help="measure what heads cost on this machine", allow_abbrev=False)
    benches = bench.add_subparsers(title="benchmarks", metavar="NAME", required=True, parser_class=type(bench))
    parser = benches.add_parser(
        "heads",
        help="time, memory, parameters, operations, rank bound and first loss of every head",
        description="Measure a training step under each head, each in a fresh process, beside the linear head. Prints "
        "the table and writes heads.json, heads.csv and heads.md.",
        allow_abbrev=False,
    )
    parser.add_argument("--tokens", type=whole(1), default=2048, metavar="N", help="tokens in a step (2048)")
    parser.add_argument("--dim", type=whole(1), default=512, metavar="D", help="hidden size (512)")
    parser.add_argument("--vocab", type=whole(2), default=32768, metavar="V", help="vocabulary (32768)")
    parser.add_argument(
        "--heads", metavar="A,B", help="heads to measure, as linear,mos:k=4,shared=False,adaptive (all)"
    )
    parser.add_argument(
        "--import",
        dest="imports",
        action="append",
        default=[],
        metavar="MODULE",
        help="module to import first, that defines a head of yours; as often as needed",
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16", "float64"])
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1, mps or auto (cpu)")
    parser.add_argument("--rounds", type=whole(1), default=5, metavar="N", help="steps that are timed (5)")
    parser.add_argument("--seed", type=whole(0, 2**32 - 1), default=0, metavar="N", help="of all draws (0)")
    parser.add_argument("--out", type=Path, default=Path("out") / "heads", metavar="DIR", help="folder (out/heads)")
    parser.add_argument("--resume", action="store_true", help="take over the rows that DIR has, measure the others")
    parser.set_defaults(run=run, parser=parser)


def run(options: argparse.Namespace) -> int:
    """Measure, print, save; 2 if a head could not be measured."""
    from unembed.cli._folders import check_writable
    from unembed.experiments import HeadCosts, bench_heads
    from unembed.integrations import resolve_device
    from unembed.results import InputError

    check_writable(options.out)
    started = time.time()
    costs = HeadCosts(
        tokens=options.tokens,
        dim=options.dim,
        vocab=options.vocab,
        dtype=options.dtype,
        device=str(resolve_device(options.device)),
        rounds=options.rounds,
        seed=options.seed,
        imports=tuple(options.imports),
    )
    specs = None if options.heads is None else split_specs(options.heads)
    if specs == []:
        raise InputError("--heads names no head; leave it out for all of them.")
    try:
        table = bench_heads(costs, specs, folder=options.out, resume=options.resume, progress=_announce)
    except KeyboardInterrupt:
        path = options.out / "heads.json"
        left = f"what was measured is in {options.out}; the same command with --resume goes on"
        written = path.exists() and path.stat().st_mtime >= started
        raise KeyboardInterrupt(left if written else "nothing was measured yet") from None
    _show(table, options.out)
    failed = [row["head"] for row in table["rows"] if "failed" in row]
    if failed:
        say(f"{len(failed)} of {len(table['rows'])} heads could not be measured: {', '.join(failed)}")
    return BAD if failed else 0


def split_specs(listed: str) -> list[str]:
    """Heads at commas; what has an `=` and no name in front belongs to the head before it: `mos:k=4,bias=True`."""
    parts, depth, current = [], 0, ""
    for character in [*listed, ","]:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            option = "=" in current and ":" not in current.partition("=")[0]
            if option and parts:
                parts[-1] += f",{current.strip()}"
            elif current.strip():
                parts.append(current.strip())
            current = ""
        else:
            current += character
    return [*parts, current] if current.strip() else parts


def _announce(spec: str, done: int, total: int) -> None:
    """One line a head on standard error: a head takes seconds to minutes."""
    if spec:
        sys.stderr.write(f"{done + 1} of {total}: {printable(spec)}\n")
        sys.stderr.flush()


def _show(table: dict[str, Any], folder: Path) -> None:
    from unembed.cli._rich import rich_module
    from unembed.experiments import head_table

    console = rich_module("console").Console()
    text = rich_module("text").Text
    columns, rows = head_table.COLUMNS, [head_table.words(row) for row in table["rows"]]
    if console.width < _width(columns, rows):
        for row in rows:
            console.print(text(printable(f"{row[0]}: " + ", ".join(_named(columns, row)))))
    else:
        drawn = rich_module("table").Table()
        for place, column in enumerate(columns):
            drawn.add_column(column, justify="left" if place == 0 else "right", overflow="fold")
        for row in rows:
            drawn.add_row(*(text(printable(cell)) for cell in row))
        console.print(drawn)
    console.print(text(printable(head_table.title(table))))
    console.print(text(printable(f"Data: {folder / head_table.FILE}")), soft_wrap=True)


def _width(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> int:
    """Characters that the table takes with its lines; failed heads do not count, their reason is long."""
    whole_rows = [row for row in rows if row[2]]
    widths = (max(map(len, cells)) for cells in zip(columns, *whole_rows, strict=True))
    return sum(width + 3 for width in widths) + 1


def _named(columns: Sequence[str], row: Sequence[str]) -> list[str]:
    return [
        f"{name} {cell}" if name != "step" else cell for name, cell in list(zip(columns, row, strict=True))[1:] if cell
    ]
