"""Prompts of a command: from its words and from files, and as token ids."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def read_prompts(path: Path | None, field: str) -> list[tuple[str, str]]:
    """Names and texts of a file: one a line, or JSONL with the text at `field`; empty lines are left out.

    Raises:
        InputError: If the file is missing, empty, not UTF-8, or a line of JSONL holds no text.
    """
    if path is None:
        return []
    from unembed.text import read_files

    documents = list(read_files([path], field=field))
    if ".jsonl" in path.suffixes[-2:]:
        return [(document.id, document.text) for document in documents]
    lines = "".join(document.text for document in documents).split("\n")  # long files come in parts, cut at line ends
    return [(f"{path}:{number}", line.rstrip("\r")) for number, line in enumerate(lines, 1) if line.strip()]


def prompt_ids(tokenizer: Any, prompt: str, number: int) -> list[int]:
    """The ids of a prompt after what the tokenizer puts in front of every text.

    Raises:
        InputError: If there is none.
    """
    from unembed.integrations._windows import leading_ids
    from unembed.results import InputError

    text = prompt.encode("utf-8", "replace").decode("utf-8")  # arguments may hold lone surrogates
    ids = [*leading_ids(tokenizer), *tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]]
    if not ids:
        raise InputError(f"Prompt {number} is empty, and this tokenizer begins no text by itself; give a word.")
    return ids
