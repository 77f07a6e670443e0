"""Types of options for argparse."""

from __future__ import annotations

import argparse
from collections.abc import Callable


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
