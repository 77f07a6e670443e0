"""Options of a head as its `__init__` declares them, for errors that say what was wrong."""

from __future__ import annotations

import difflib
import inspect
import types
from collections.abc import Iterable, Sequence
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints


def check_options(kind: type, options: dict[str, Any]) -> None:
    """Refuse options that a head does not have, and values of a type that they do not take.

    Raises:
        ValueError: Names the option, what it takes and what came.
    """
    common = ("in_features", "out_features", "device", "dtype")
    known = [name for name in inspect.signature(kind).parameters if name not in common]
    try:
        hints = get_type_hints(kind.__init__)
    except NameError:  # a type that is imported for type checkers only
        hints = {}
    for name, value in options.items():
        if name not in known:
            raise ValueError(f"{kind.__name__} has no option {name!r}{nearest(name, known)}")
        if name in hints and not _fits(value, hints[name]):
            raise ValueError(f"`{name}` of {kind.__name__} takes {_said(hints[name])}, got {value!r}.")


def nearest(name: str, known: Iterable[str]) -> str:
    """The end of an error about a name that is not known: the one meant, as far as one can tell, and all there are."""
    there = sorted(known)
    close = difflib.get_close_matches(name, there, n=1)
    start = f"; did you mean {close[0]!r}? There" if close else "; there"
    return f"{start} are {', '.join(there) or 'none'}."


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value is of a type; what is no plain type here is left to the head."""
    origin = get_origin(hint)
    if origin in (types.UnionType, Union):
        return any(_fits(value, one) for one in get_args(hint))
    if origin is Literal:
        return isinstance(value, str)  # which words there are, the head says
    if origin is Sequence:
        return isinstance(value, (list, tuple)) and all(_fits(one, get_args(hint)[0]) for one in value)
    if hint in (int, float):
        return isinstance(value, (int, hint)) and not isinstance(value, bool)
    return isinstance(value, hint) if isinstance(hint, type) else True


def _said(hint: Any) -> str:
    """A type as people say it."""
    origin, inside = get_origin(hint), get_args(hint)
    if origin in (types.UnionType, Union):
        return " or ".join(_said(one) for one in inside)
    if origin is Sequence:
        return "a list of " + {int: "integers", float: "numbers"}.get(inside[0], _said(inside[0]))
    if origin is Literal:
        return " or ".join(map(str, inside))
    words = {int: "an integer", float: "a number", bool: "True or False", str: "a word", types.NoneType: "None"}
    return words.get(hint, getattr(hint, "__name__", str(hint)))
