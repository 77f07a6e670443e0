"""What reaches the terminal: nothing that steers it, and no complaint about a reader that went away."""

from __future__ import annotations

import contextlib
import os
import sys


def printable(text: str) -> str:
    """`text` with controls (newlines too), bidi and format characters and lone surrogates as visible escapes."""
    if text.isprintable():
        return text
    from unembed.text import visible

    return "".join(character if character.isprintable() else visible(character)[1:-1] for character in text)


def say(line: str) -> None:
    """One line on standard error."""
    sys.stderr.write(f"unembed: {printable(line)}\n")


def flush() -> None:
    """Write what is buffered, or drop it if nobody reads: Python would complain about it at exit."""
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        drop_output()


def drop_output() -> None:
    """Send standard output nowhere from here on."""
    with contextlib.suppress(OSError):  # not a file of the system, so nothing that a pipe could break
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
