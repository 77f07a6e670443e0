"""Token strings by id, raw, from every kind of tokenizer file. Hostile text: show it with `text.visible`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from unembed.models._config import read_json
from unembed.results import InputError

_LARGEST_ID = 1 << 22  # an id in a file makes a list of that length; no vocabulary comes near
_UNUSED = 5  # sentencepiece's and GGUF's type of a piece that is never produced
FILES = ("tokenizer.json", "vocab.json", "added_tokens.json", "tokenizer.model")


@dataclass(frozen=True)
class Tokens:
    """A vocabulary as a list.

    Args:
        strings: One an id, up to the largest id; "" for holes (a token may be "" too).
        holes: Ids without a token.
    """

    strings: list[str]
    holes: tuple[int, ...]

    @classmethod
    def from_ids(cls, by_id: Mapping[int, str], where: str) -> Tokens | None:
        """From id -> string; None if there are none.

        Raises:
            InputError: If an id is negative, not an integer or absurd.
        """
        for i in by_id:
            if isinstance(i, bool) or not isinstance(i, int) or not 0 <= i < _LARGEST_ID:
                raise InputError(
                    f"{where}: token ids must be integers from 0 to {_LARGEST_ID - 1}, got {i!r}; fetch it again."
                )
        if not by_id:
            return None
        size = max(by_id) + 1
        return cls([by_id.get(i, "") for i in range(size)], tuple(i for i in range(size) if i not in by_id))

    @classmethod
    def from_types(cls, strings: Sequence[str], types: Sequence[int]) -> Tokens | None:
        """From a list where an unused id has type 5: those at the end are padding, the others holes."""
        kinds = list(types) + [1] * (len(strings) - len(types))
        size = len(strings)
        while size and (kinds[size - 1] == _UNUSED or strings[size - 1] == f"[PAD{size - 1}]"):
            size -= 1
        if not size:
            return None
        holes = tuple(i for i in range(size) if kinds[i] == _UNUSED)
        unused = set(holes)
        return cls(["" if i in unused else strings[i] for i in range(size)], holes)


def read_tokens(folder: Path) -> Tokens | None:
    """The vocabulary of a folder: tokenizer.json, else vocab.json, else tokenizer.model; None without any.

    Raises:
        InputError: If a file is there and cannot be read; names the file.
    """
    path = folder / "tokenizer.json"
    if path.is_file():
        return _from_tokenizer_json(path)
    if (folder / "vocab.json").is_file():
        by_id: dict[int, str] = {}
        for name in ("vocab.json", "added_tokens.json"):
            if (folder / name).is_file():
                by_id.update(_invert(read_json(folder / name), folder / name))
        return Tokens.from_ids(by_id, str(folder / "vocab.json"))
    path = folder / "tokenizer.model"
    return _from_sentencepiece(path) if path.is_file() else None


def tokens_of(tokenizer: Any) -> Tokens | None:
    """The vocabulary of a tokenizer object with `get_vocab`, or of the folder or file at a path.

    Raises:
        InputError: If it is neither.
    """
    if isinstance(tokenizer, str | Path):
        path = Path(tokenizer)
        found = read_tokens(path) if path.is_dir() else _from_tokenizer_json(path) if path.is_file() else None
        if found is None:
            raise InputError(
                f"`tokenizer`: {path} has none of {', '.join(FILES)}; give a folder with one, or the object."
            )
        return found
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise InputError(f"`tokenizer` must be a path or have `get_vocab()`, got {type(tokenizer).__name__}.")
    return Tokens.from_ids(_invert(tokenizer.get_vocab(), "`tokenizer`"), "`tokenizer`")


def _invert(vocab: Any, where: Any) -> dict[int, str]:
    if not isinstance(vocab, Mapping):
        raise InputError(f"{where}: expected an object token -> id, got {type(vocab).__name__}; fetch the file again.")
    return {i: token for token, i in vocab.items()}


def _from_tokenizer_json(path: Path) -> Tokens | None:
    content = read_json(path)
    try:
        vocab = content["model"]["vocab"]
        # Unigram keeps a list of [piece, score], the other models an object piece -> id.
        by_id = dict(enumerate(str(piece) for piece, _ in vocab)) if isinstance(vocab, list) else _invert(vocab, path)
        by_id.update((token["id"], str(token["content"])) for token in content.get("added_tokens") or [])
    except (KeyError, TypeError, ValueError, AttributeError):
        raise InputError(
            f"{path}: expected `model.vocab` and `added_tokens` of a tokenizer; fetch the file again."
        ) from None
    return Tokens.from_ids(by_id, str(path))


def _from_sentencepiece(path: Path) -> Tokens | None:
    data = memoryview(path.read_bytes())
    strings, types = [], []
    try:
        for field, piece in _fields(data):
            if field == 1 and isinstance(piece, memoryview):
                parts = dict(_fields(piece))
                strings.append(bytes(parts.get(1, b"")).decode("utf-8", "surrogateescape"))
                types.append(int(parts.get(3, 1)))
    except (IndexError, ValueError, TypeError):
        raise InputError(f"{path}: not a whole sentencepiece model; fetch the file again.") from None
    return Tokens.from_types(strings, types)


def _fields(data: memoryview) -> Iterator[tuple[int, int | memoryview]]:
    """Field number and value of a protobuf message: the wire format of sentencepiece's `ModelProto`."""
    at = 0

    def varint() -> int:
        nonlocal at
        value = shift = 0
        while True:
            byte = data[at]
            at, value, shift = at + 1, value | (byte & 0x7F) << shift, shift + 7
            if byte < 0x80:
                return value

    while at < len(data):
        key = varint()
        kind = key & 7
        if kind == 0:
            yield key >> 3, varint()
            continue
        if kind not in (1, 2, 5):
            raise ValueError(f"wire type {kind}")
        size = {1: 8, 5: 4}.get(kind) or varint() if kind != 2 else varint()
        if at + size > len(data):
            raise ValueError("truncated")
        yield key >> 3, data[at : at + size]
        at += size
