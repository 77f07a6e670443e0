"""Documents to measure on: text files, and the English inside Python itself."""

from __future__ import annotations

import codecs
import gzip
import hashlib
import json
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO, Any

from unembed.results import InputError
from unembed.text._dataset import read_dataset
from unembed.text._display import visible
from unembed.text._source import Document, Source, one_line

__all__ = ["Document", "Source", "read_dataset", "read_files", "read_topics"]

# Characters. A longer plain file becomes several documents: memory stays bounded, and the bootstrap over documents has
# something to draw from. About 8,000 tokens, so that a window is rarely cut short by it.
_PART = 1 << 15
_HASHED = 1 << 28  # bytes: a larger file is described by its size alone, hashing it would take seconds
_CHUNK = 1 << 20  # bytes read at a time
_LONG = 300  # characters: a longer path is prose, and cut in messages


def read_files(paths: Iterable[str | Path], *, field: str = "text") -> Source:
    """Documents from files in UTF-8: a `.jsonl` file holds one a line, any other file is one.

    `.gz` files are unpacked on the way. A plain file of more than 32 Ki characters is cut at line ends into
    documents of at most that size. Documents of white space only are left out.

    Args:
        paths: The files, in the order they are read.
        field: The key that holds the text in a line of a `.jsonl` file.

    Raises:
        InputError: If there is no path, or one is missing, a folder, unreadable, or empty. While iterating: if a
            file is not UTF-8, not gzip, or holds no text, or a line of it is not an object with a string at `field`.
    """
    return _Files(tuple(Path(path) for path in paths), field)


def read_topics() -> Source:
    """The English of the language reference inside Python's own `pydoc`: a document a topic, sorted by name.

    Nothing is downloaded. Another Python version gives a slightly different text; `describe` gives its sha256.
    """
    return _Topics()


class _Files:
    def __init__(self, paths: tuple[Path, ...], field: str) -> None:
        if not paths:
            raise InputError("Expected at least one text file, got none.")
        for path in paths:
            _refuse_bad_path(path)
        self.paths = paths
        self.field = field
        self.name = ", ".join(path.name for path in paths)

    def __iter__(self) -> Iterator[Document]:
        for path in self.paths:
            empty = True
            for document in self._read(path):
                if document.text.strip():
                    empty = False
                    yield document
            if empty:
                raise InputError(f"{path}: expected text, got only white space.")

    def _read(self, path: Path) -> Iterator[Document]:
        inner = path.with_suffix("") if path.suffix == ".gz" else path
        return _read_lines(path, self.field) if inner.suffix == ".jsonl" else _read_plain(path)

    def describe(self) -> dict[str, Any]:
        files = [_describe_file(path) for path in self.paths]
        about: dict[str, Any] = {"kind": "files", "number": len(files), "files": files}
        if any(".jsonl" in path.name for path in self.paths):
            about["field"] = self.field
        return about


class _Topics:
    name = "Python language reference (pydoc)"

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        self._documents = [Document(f"pydoc:{name}", topics[name]) for name in sorted(topics)]

    def __len__(self) -> int:
        return len(self._documents)

    def __iter__(self) -> Iterator[Document]:
        return iter(self._documents)

    def describe(self) -> dict[str, Any]:
        digest = hashlib.sha256()
        for document in self._documents:
            digest.update(document.text.encode("utf-8") + b"\0")
        return {"kind": "topics", "number": len(self), "sha256": digest.hexdigest()}


def _refuse_bad_path(path: Path) -> None:
    try:
        if path.is_dir():
            raise InputError(f"{path}: expected a text file, got a folder; name the files in it.")
        with path.open("rb") as file:
            first = file.read(1)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, InputError):
            raise
        name = str(path) if len(str(path)) <= _LONG and "\n" not in str(path) else visible(str(path), 40)
        raise InputError(
            f"{name}: cannot be read ({getattr(error, 'strerror', error)}); expected the path of a text file "
            "(a text itself goes in as unembed.text.Document)."
        ) from error
    if not first:
        raise InputError(f"{path}: expected text, got an empty file.")


def _open(path: Path) -> IO[bytes] | gzip.GzipFile:
    return gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb")


def _decoded(path: Path) -> Iterator[str]:
    """The characters of `path`, unpacked and without a byte order mark, a piece at a time.

    Raises:
        InputError: At a byte that is not UTF-8, counted from the start of the unpacked file.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    done = held = 0
    try:
        with _open(path) as file:
            while True:
                chunk = file.read(_CHUNK)
                held = len(decoder.getstate()[0])
                text = decoder.decode(chunk, final=not chunk)
                yield text.removeprefix("\ufeff") if done == 0 else text
                done += len(chunk)
                if not chunk:
                    break
    except UnicodeDecodeError as error:
        raise _not_utf8(path, done - held, error) from error
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({one_line(error)}).") from error


def _read_plain(path: Path) -> Iterator[Document]:
    parts = 0
    held: list[str] = []
    length = 0
    for text in _decoded(path):
        held.append(text)
        length += len(text)
        if length > _PART:
            whole = "".join(held)
            while len(whole) > _PART:
                cut = whole.rfind("\n", _PART // 2, _PART) + 1 or _PART
                parts += 1
                yield Document(_part_id(path, parts), whole[:cut])
                whole = whole[cut:]
            held, length = [whole], len(whole)
    yield Document(_part_id(path, parts + 1), "".join(held))


def _part_id(path: Path, part: int) -> str:
    return str(path) if part == 1 else f"{path}#{part}"


def _read_lines(path: Path, field: str) -> Iterator[Document]:
    offset = 0
    try:
        with _open(path) as file:
            for number, line in enumerate(file, 1):
                try:
                    text = line.removeprefix(codecs.BOM_UTF8).decode("utf-8") if number == 1 else line.decode("utf-8")
                except UnicodeDecodeError as error:
                    raise _not_utf8(path, offset + len(line) - len(error.object), error) from error
                offset += len(line)
                if text.strip():
                    yield Document(f"{path}:{number}", _field(f"{path}, line {number}", text, field))
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(f"{path}: cannot be read ({one_line(error)}).") from error


def _field(place: str, line: str, field: str) -> str:
    """The string at `field` of a JSON object."""
    try:
        row = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{place}: expected a JSON object ({one_line(error)}).") from error
    if not isinstance(row, dict) or field not in row:
        came = f"the keys {sorted(row)}" if isinstance(row, dict) else type(row).__name__
        raise InputError(f"{place}: expected an object with the key `{field}`, got {came}.")
    if not isinstance(row[field], str):
        raise InputError(f"{place}: expected a string at `{field}`, got {type(row[field]).__name__}.")
    return row[field]


def _not_utf8(path: Path, start: int, error: UnicodeDecodeError) -> InputError:
    return InputError(
        f"{path}: expected UTF-8, got byte 0x{error.object[error.start]:02x} at offset {start + error.start}; "
        f"convert the file to UTF-8."
    )


def _describe_file(path: Path) -> dict[str, Any]:
    size = path.stat().st_size
    about: dict[str, Any] = {"name": path.name, "bytes": size}
    if size <= _HASHED:
        with path.open("rb") as file:
            about["sha256"] = hashlib.file_digest(file, "sha256").hexdigest()
    return about
