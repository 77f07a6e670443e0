"""Numbers and strings as a reader sees them: four significant digits, and nothing that hides or breaks the page."""

from __future__ import annotations

import math
import unicodedata
from collections.abc import Sequence
from typing import Any

from unembed.text import visible

NONE = "none"
_HIDDEN = {
    "Cc",
    "Cf",
    "Cs",
    "Co",
    "Cn",
    "Zl",
    "Zp",
}  # less than `visible` escapes: spaces, marks and quotes stay, this is prose
_SUPERSCRIPT = str.maketrans("0123456789-", "⁰¹²³⁴⁵⁶⁷⁸⁹⁻")
_NARROW = "\N{NARROW NO-BREAK SPACE}"


def printable(text: str) -> str:
    """`text` with control characters, bidi marks and lone surrogates as visible escapes; encodes to UTF-8."""
    return text if text.isascii() and text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    return visible(character)[1:-1] if unicodedata.category(character) in _HIDDEN else character


def number(value: Any) -> str:
    """Four significant digits, commas between thousands, `1.234 × 10⁻⁵` where zeros would pile up."""
    if hasattr(value, "item"):
        value = value.item()
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return NONE
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}".replace("-", "−")
    return _decimal(value) if isinstance(value, float) else printable(str(value))


def _decimal(value: float) -> str:
    if value == 0:
        return "0"
    mantissa, exponent = f"{value:.3e}".split("e")
    if -5 < int(exponent) < 6:
        text = f"{value:,.{max(0, 3 - int(exponent))}f}"
    else:
        text = f"{mantissa}{_NARROW}×{_NARROW}10{power(int(exponent))}"
    return text.replace("-", "−", 1) if value < 0 else text


def power(exponent: int) -> str:
    """`-5` as `⁻⁵`."""
    return str(exponent).translate(_SUPERSCRIPT)


def percent(value: float | None) -> str:
    """A share as a percentage."""
    return NONE if value is None else f"{number(100.0 * value)}{_NARROW}%"


def span(ends: Sequence[float] | None) -> str:
    """Lower and upper end of an interval, empty without one."""
    return f"{number(ends[0])} to {number(ends[1])}" if ends else ""


def count(value: int, noun: str, plural: str = "") -> str:
    """`1 document`, `2,000 documents`."""
    return f"{number(value)} {noun if value == 1 else plural or noun + 's'}"
