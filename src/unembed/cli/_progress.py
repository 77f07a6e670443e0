"""Progress of an audit on the terminal: a bar where there is one, silence where there is not."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any, Self


class Progress:
    """Callable as `progress(phase, done, total)`; draws on standard error and only on a terminal."""

    def __init__(self) -> None:
        from unembed.cli._rich import rich_module

        # This very stream, also while `sys.stderr` is replaced to silence others.
        console = rich_module("console").Console(file=sys.stderr)
        parts = rich_module("progress")
        self._bars = parts.Progress(
            parts.SpinnerColumn(),
            parts.TextColumn("{task.description}"),
            parts.BarColumn(),
            parts.MofNCompleteColumn(),
            parts.TimeElapsedColumn(),
            parts.TimeRemainingColumn(),
            console=console,
            disable=not sys.stderr.isatty(),
        )
        self._tasks: dict[str, Any] = {}

    def __enter__(self) -> Self:
        self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bars.stop()

    def __call__(self, phase: str, done: int, total: int) -> None:
        """Show that `done` of `total` units of `phase` are done."""
        if phase not in self._tasks:
            self._tasks[phase] = self._bars.add_task(phase, total=total)
        self._bars.update(self._tasks[phase], completed=done, total=total)
