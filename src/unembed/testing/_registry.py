"""What a check is: a function of a `Case` with a name, one sentence of meaning, and the checks it builds on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from unembed.testing._case import Case

CHECKS: dict[str, Check] = {}  # in the order in which they run


@dataclass(frozen=True)
class Outcome:
    """How one check of one head ended.

    Args:
        name: Of the check.
        meaning: What the check holds the head to, in one sentence.
        status: Not applicable when the head has no such part, or when a check that this one builds on failed.
        message: What was expected and what came, or why it does not apply; empty when passed.
    """

    name: str
    meaning: str
    status: Literal["passed", "failed", "not applicable"]
    message: str = ""

    def __str__(self) -> str:
        return f"{self.name}: {self.status}" + (f": {self.message}" if self.message else "")


@dataclass(frozen=True)
class Check:
    """A check before it is run.

    Args:
        name: How `only` and `skip` call it.
        meaning: One sentence.
        function: Raises `FailedError` or `NotApplicableError`; any other error is a failure too.
        after: Checks whose failure makes this one say nothing new.
        compiles: Runs only when `compile=True`.
    """

    name: str
    meaning: str
    function: Callable[[Case], None]
    after: tuple[str, ...]
    compiles: bool


def check(
    name: str, *, after: tuple[str, ...] = ("law", "nll"), compiles: bool = False
) -> Callable[[Callable[[Case], None]], Callable[[Case], None]]:
    """Register a function under `name`; the first line of its docstring is its meaning."""

    def register(function: Callable[[Case], None]) -> Callable[[Case], None]:
        meaning = (function.__doc__ or "").strip().splitlines()[0]
        CHECKS[name] = Check(name, meaning, function, after, compiles)
        return function

    return register
