"""Parse the command line, run one command, turn errors into one line and an exit code.

0 done; 1 done, with a finding at or above `--fail-on`; 2 bad input or a failed check; 130 interrupted.
"""

from __future__ import annotations

import argparse
import difflib
import io
import sys
from collections.abc import Sequence
from typing import NoReturn

from unembed._version import __version__
from unembed.cli import _audit, _bench, _generate
from unembed.cli._output import BAD, drop_output, flush, one_line, printable, say

COMMANDS = (_audit, _bench, _generate)
_INTERRUPTED = 130


class _Parser(argparse.ArgumentParser):
    """argparse with one line an error."""

    def refuse(self, unknown: Sequence[str]) -> NoReturn:
        """Say which argument is unknown, and which option comes near it."""
        name = unknown[0].partition("=")[0]
        near = difflib.get_close_matches(name, self._option_string_actions, 1)
        self.error(f"unrecognized argument {name}" + (f", did you mean {near[0]}?" if near else ""))

    def error(self, message: str) -> NoReturn:
        self.exit(BAD, f"unembed: {printable(message)}; `{self.prog} --help` lists what it takes\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; never a traceback for a user's mistake."""
    parser = _Parser(prog="unembed", description="The output layer of language models, measured.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"unembed {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=_Parser)
    for command in COMMANDS:
        command.add_to(commands)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a character that the terminal's encoding lacks is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    try:
        options, unknown = parser.parse_known_args(arguments)
        late = getattr(options, "late", None)  # words after an option, which argparse takes for none of its own
        if unknown and late and not any(word.startswith("-") for word in unknown):
            setattr(options, late, [*getattr(options, late), *unknown])
        elif unknown:
            options.parser.refuse([word for word in unknown if word.startswith("-")] or unknown)
        return options.run(options)
    except KeyboardInterrupt as interrupt:
        say(f"interrupted; {str(interrupt) or 'no half-written file is left'}")
        return _INTERRUPTED
    except BrokenPipeError:  # the reader of our output went away before we were done; nobody is left to tell
        drop_output()
        return BAD
    except Exception as error:
        line = one_line(error)
        if line is None:
            raise
        say(line)
        return BAD
    finally:
        flush()
