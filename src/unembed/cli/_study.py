"""`unembed generate MODEL --study`: one prompt set, every strategy, a report."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from unembed.cli._options import whole
from unembed.cli._output import printable

OPTIONS = ("out", "tokens", "count", "prompt_tokens", "resume")


def add_to(parser: argparse.ArgumentParser) -> None:
    """Add the options of the study."""
    group = parser.add_argument_group(
        "study",
        "Texts of --prompts, or of Python's language reference: the beginning of each is a prompt, and what follows it "
        "the text of people that strategies are held against.",
    )
    group.add_argument("--study", action="store_true", help="continue one prompt set by every strategy, and measure")
    group.add_argument("--out", type=Path, metavar="DIR", help="folder for report and data (out/study-NAME)")
    group.add_argument("--tokens", type=whole(2), default=128, metavar="N", help="tokens of each continuation (128)")
    group.add_argument("--count", type=whole(1), default=64, metavar="N", help="prompts at most (64)")
    group.add_argument("--prompt-tokens", type=whole(1), default=32, metavar="N", help="tokens of each prompt (32)")
    group.add_argument("--resume", action="store_true", help="take over the strategies that DIR has, run the others")


def run(options: argparse.Namespace, opened: Callable[[], tuple[Any, Any]]) -> int:
    """Run, print the table, write the report."""
    from unembed import report
    from unembed.cli._folders import check_writable
    from unembed.cli._prompts import read_prompts
    from unembed.decoding.metrics import check_installed
    from unembed.experiments import StudyConfig, degeneration
    from unembed.results import safe_name
    from unembed.text import Document

    report.check_installed()
    check_installed()
    name = Path(options.model).name.removesuffix(".gguf")
    folder = options.out or Path("out") / f"study-{safe_name(name)}"
    check_writable(folder)
    started = time.time()
    config = StudyConfig(options.count, options.prompt_tokens, options.tokens, seed=options.seed)
    documents = [Document(*one) for one in read_prompts(options.prompts, options.field)] or None
    model, tokenizer = opened()
    try:
        study = degeneration(
            model,
            tokenizer,
            documents,
            config=config,
            source=options.model,
            folder=folder,
            resume=options.resume,
            progress=_announce,
        )
    except KeyboardInterrupt:
        path = folder / "study.json"
        left = f"what was measured is in {folder}; the same command with --resume goes on"
        new = path.exists() and path.stat().st_mtime >= started
        raise KeyboardInterrupt(left if new else "nothing was measured yet") from None
    page = report.write_study(folder)
    _show(study, page)
    return 0


def _announce(name: str, done: int, total: int) -> None:
    """One line a strategy on standard error: each takes seconds to minutes."""
    if name:
        sys.stderr.write(f"{done + 1} of {total}: {printable(name)}\n")
        sys.stderr.flush()


def _show(study: dict[str, Any], page: Path) -> None:
    from unembed.cli._rich import rich_module
    from unembed.experiments import study_table

    console = rich_module("console").Console()
    text = rich_module("text").Text
    columns = ["strategy", *study_table.COLUMNS.values()]
    rows = [[row["name"], *study_table.cells(row)] for row in study["rows"]]
    if console.width < sum(max(map(len, cells)) + 3 for cells in zip(columns, *rows, strict=True)) + 1:
        for row in rows:  # too narrow for a table
            said = ", ".join(f"{name} {cell}" for name, cell in zip(columns[1:], row[1:], strict=True))
            console.print(text(printable(f"{row[0]}: {said}")))
    else:
        drawn = rich_module("table").Table()
        for place, column in enumerate(columns):
            drawn.add_column(column, justify="left" if place == 0 else "right", overflow="fold")
        for row in rows:
            drawn.add_row(*(text(printable(cell)) for cell in row))
        console.print(drawn)
    console.print(text(printable(study_table.title(study))))
    console.print(text(printable(f"Report: {page}")), soft_wrap=True)
    console.print(text(printable(f"Data:   {page.parent / study_table.FILE}")), soft_wrap=True)
