"""Parse the command line, run one command, turn errors into one line and an exit code.

0 done; 1 done, with a finding at or above `--fail-on`; 2 bad input or a failed check; 130 interrupted.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from unembed._version import __version__
from unembed.cli import _audit

COMMANDS = (_audit,)
_DONE, _BAD, _INTERRUPTED = 0, 2, 130


class _Parser(argparse.ArgumentParser):
    """argparse with one line an error."""

    def error(self, message: str) -> NoReturn:
        self.exit(_BAD, f"unembed: {message}; `{self.prog} --help` lists what it takes\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never a traceback for a user's mistake."""
    parser = _Parser(prog="unembed", description="The output layer of language models, measured.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"unembed {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for command in COMMANDS:
        command.add_to(commands)
    try:
        options = parser.parse_args(arguments)
        options.arguments = list(sys.argv[1:] if arguments is None else arguments)
        return options.run(options)
    except KeyboardInterrupt as interrupt:
        _say(f"interrupted; {str(interrupt) or 'no half-written file is left'}")
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away: not our failure, and nobody is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        line = _one_line(error)
        if line is None:
            raise
        _say(line)
        return _BAD


def _one_line(error: Exception) -> str | None:
    """What to tell the user, or None for an error of ours, whose traceback we want to see."""
    from unembed.results import InputError

    if isinstance(error, OSError):
        place = f"{error.filename}: " if error.filename else ""
        return f"{place}{error.strerror or error}"
    return " ".join(str(error).split()) if isinstance(error, InputError) else None


def _say(line: str) -> None:
    sys.stderr.write(f"unembed: {line}\n")
