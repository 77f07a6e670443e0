"""What counts as a whole number wherever one is asked for."""

from __future__ import annotations

from numbers import Integral
from typing import Any


def is_whole(value: Any) -> bool:
    """Whether it is an integer of Python or NumPy; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)
