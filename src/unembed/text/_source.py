"""What a source of text is.

A source is an object that gives a fresh iterator of `Document`s each time. One that has a length is held in memory
and may be shuffled; the others are streams, read again from the start at each pass and never held whole.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Generator, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any, Protocol

from unembed.results import InputError


@dataclass(frozen=True)
class Document:
    """A text and a name to find it again.

    Args:
        id: Where it came from: a path, a path and a line, a row, a topic.
        text: The text itself.
    """

    id: str
    text: str


class Source(Protocol):
    """What `read_files`, `read_dataset` and `read_topics` return."""

    name: str

    def __iter__(self) -> Iterator[Document]: ...

    def describe(self) -> dict[str, Any]:
        """What was read, as JSON types."""
        ...


def check_documents(documents: Any) -> None:
    """Refuse what is not a source of documents, before anything has been read from it.

    Raises:
        InputError: If it is a string, cannot be iterated, or only once (several passes are made), or is held in memory
            and its first item is not a `Document`. The rows of a stream are looked at when they are read.
    """
    if isinstance(documents, str | bytes):
        raise InputError("Expected documents, got one string; give [unembed.text.Document(name, text)].")
    if not isinstance(documents, Iterable):
        raise InputError(f"Expected documents, got {type(documents).__name__}; give a list of unembed.text.Document.")
    if isinstance(documents, Iterator):
        raise InputError(
            f"Expected documents that can be read several times, got {type(documents).__name__}, which can be read "
            "once; give a list, or a source that starts again each time it is iterated."
        )
    if isinstance(documents, Sized):
        for document in documents:
            require_document(document)
            break


def require_document(document: Any) -> Document:
    """`document` itself.

    Raises:
        InputError: If it is something else, such as a string or a row of a dataset.
    """
    if not isinstance(document, Document):
        raise InputError(
            f"Expected documents, got an item of type {type(document).__name__}; "
            "wrap each text: unembed.text.Document(name, text)."
        )
    return document


def one_line(error: BaseException, limit: int = 200) -> str:
    """The first line in which an error says something: whole sentences, at most `limit` characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = lines[0] if lines else type(error).__name__
    if text.endswith(":") and len(lines) > 1:
        text = f"{text} {lines[1]}"
    if len(text) > limit:
        text = text[:limit].rsplit(". ", 1)[0] if ". " in text[:limit] else text[: limit - 1] + "…"
    return text.removesuffix(".")


@contextlib.contextmanager
def quiet_loggers(*names: str) -> Generator[None]:
    """No log lines from the loggers called `names`; their levels are as before afterwards."""
    levels = {name: logging.getLogger(name).level for name in names}
    try:
        for name in names:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
