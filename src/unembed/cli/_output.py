"""What reaches the terminal: errors as one line, nothing that steers it, no complaint about a reader that went away."""

from __future__ import annotations

import contextlib
import os
import sys

BAD = 2  # exit code for bad input or a failed check
_EXTRAS = {
    "transformers": "hf",
    "tokenizers": "hf",
    "datasets": "hf",
    "gguf": "hf",
    "accelerate": "hf",
    "plotly": "report",
    "jinja2": "report",
    "markupsafe": "report",
    "rich": "cli",
    "sacrebleu": "metrics",
}


def printable(text: str) -> str:
    """`text` with controls (newlines too), bidi and format characters and lone surrogates as visible escapes."""
    if text.isprintable():
        return text
    from unembed.text import visible

    return "".join(character if character.isprintable() else visible(character)[1:-1] for character in text)


def legible(text: str) -> str:
    """`printable` text that keeps its line ends and tabs: what a model wrote, to be read."""
    return "\n".join("\t".join(map(printable, line.split("\t"))) for line in text.split("\n"))


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


def one_line(error: Exception) -> str | None:
    """What to tell the user, or None for an error of ours, whose traceback we want to see."""
    from unembed.results import InputError

    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror or error}"
    said = " ".join(str(error).split())
    if isinstance(error, InputError):
        return said
    return _missing(error, said) if isinstance(error, ImportError) else None


def _missing(error: ImportError, said: str) -> str | None:
    """The line for an optional package that is missing or broken; None for any other import."""
    if 'pip install "unembed[' in said:
        return said
    package = (error.name or "").partition(".")[0]
    extra = _EXTRAS.get(package)
    return f'{package} cannot be imported ({said}): pip install "unembed[{extra}]"' if extra else None
