"""English that every Python carries: docstrings to train on, the language reference to measure on.

Nothing is downloaded. Another Python version gives a slightly different text, so a result names the text's sha256.
"""

import ast
import hashlib
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

from unembed.text import read_topics

_SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "idle_test", "lib2to3", "pydoc_data", "site-packages", "dist-packages", "test", "tests"}
)
_SHORTEST = 20
_OVERLAP_WORDS = 12
_ASCII_SHARE = 0.95
_Node = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def docstring_documents(*, held_out: Iterable[str] = (), root: Path | None = None) -> list[str]:
    """The docstrings of the standard library, one document a module, in order of path and line.

    A docstring seen before is dropped, and so is one of fewer than 20 characters, one with more than 5 % of its
    characters outside ASCII, and one that has 12 words in a row in common with a held-out document (`pdb` has its
    manual in both). Tests, `lib2to3`, `pydoc_data` and installed packages are left out.

    Args:
        held_out: Documents to measure on, which must stay unseen.
        root: Folder with the modules; the standard library of the running Python when None.

    Returns:
        A text for each module that has any docstring left; its docstrings are parted by an empty line.
    """
    root = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    unseen = {run for document in held_out for run in _runs(document)}
    seen: set[str] = set()
    documents = []
    for path in _modules(root):
        fresh = []
        for text in _docstrings(path):
            if text not in seen and _is_kept(text) and unseen.isdisjoint(_runs(text)):
                seen.add(text)
                fresh.append(text)
        if fresh:
            documents.append("\n\n".join(fresh) + "\n")
    return documents


def held_out_documents() -> list[str]:
    """The topics of the language reference inside `pydoc`, sorted by name; an audit reads them by default."""
    return [document.text for document in read_topics()]


def text_sha256(documents: Iterable[str]) -> str:
    """The sha256 of the documents in UTF-8, with a zero byte after each, in hex."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(document.encode("utf-8") + b"\0")
    return digest.hexdigest()


def _modules(root: Path) -> Iterator[Path]:
    relative = (path.relative_to(root) for path in root.rglob("*.py"))
    kept = (path for path in relative if not _SKIPPED_FOLDERS.intersection(path.parts[:-1]))
    return (root / path for path in sorted(kept, key=Path.as_posix))


def _docstrings(path: Path) -> list[str]:
    """The docstrings of one module in the order of their lines, indentation removed."""
    with warnings.catch_warnings():
        # Old modules hold escapes that newer parsers warn about; their text is still right.
        warnings.simplefilter("ignore")
        tree = ast.parse(path.read_bytes(), filename=str(path))
    found = [
        (node.body[0].lineno, text)
        for node in ast.walk(tree)
        if isinstance(node, _Node) and (text := ast.get_docstring(node))
    ]
    return [text for _, text in sorted(found)]


def _runs(text: str) -> Iterator[tuple[str, ...]]:
    """Every run of 12 words."""
    words = text.split()
    return zip(*(words[start:] for start in range(_OVERLAP_WORDS)), strict=False)


def _is_kept(text: str) -> bool:
    ascii_characters = sum(character.isascii() for character in text)
    return len(text) >= _SHORTEST and ascii_characters >= _ASCII_SHARE * len(text)
