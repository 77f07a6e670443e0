"""Types of options for argparse, and their names in messages of the library."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable

# Arguments of the library that the command calls otherwise.
_OTHERWISE = {"width": "beams", "seeds": "seed", "k": "top_k"}


def whole(least: int, most: int | None = None) -> Callable[[str], int]:
    """Whole numbers in a range; argparse puts the option's name in front of the message."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = least - 1
        if value < least or (most is not None and value > most):
            wanted = f"of at least {least}" if most is None else f"from {least} to {most}"
            raise argparse.ArgumentTypeError(f"expected a whole number {wanted}, got {text[:40]!r}")
        return value

    return parse


def real(least: float = -math.inf, most: float = math.inf) -> Callable[[str], float]:
    """Numbers in a range, both ends included."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            wanted = "" if least == -math.inf else f" of at least {least:g}"
            wanted = wanted if most == math.inf else f" from {least:g} to {most:g}"
            raise argparse.ArgumentTypeError(f"expected a number{wanted}, got {text[:40]!r}")
        return value

    return parse


def with_flags(message: str, options: Iterable[str]) -> str:
    """A message of the library on one line, with options of the command in the place of its arguments.

    Args:
        message: Names arguments as `top_p`.
        options: Those that the command has, as argparse names them.
    """
    known = set(options)

    def flag(found: re.Match[str]) -> str:
        name = _OTHERWISE.get(found[1], found[1])
        return f"--{name.replace('_', '-')}" if name in known else found[0]

    return re.sub(r"`(\w+)`", flag, " ".join(message.split()))
