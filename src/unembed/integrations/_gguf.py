"""Read a GGUF file once and fast, instead of three times and slowly.

Why: transformers 5.24 parses the whole file three times for a model and its tokenizer, and gguf's `GGUFReader` makes
several numpy views of a memory map for every token string, score and type. With Gemma 3's 262,144 tokens (270M, Q8_0,
2 cores) model and tokenizer took 72 s of processor time; with this and one pass less they take 15 s.

Bounds: the fast reader overrides a private method, so it is used only with the versions of gguf whose method was
compared (equal code in all of them) and that hold the names it uses; with any other, the stock reader reads the file,
correctly and slowly. It is seen by the thread that opened the block and by no other.
"""

from __future__ import annotations

import contextlib
import struct
import threading
from collections.abc import Generator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np

from unembed.results import InputError

# `GGUFReader._get_field_parts` is the same, letter for letter, in 0.17.1, 0.18.0 and 0.19.0.
_COMPARED = ("0.17.", "0.18.", "0.19.")
_USED = {"_get_field_parts", "_get", "gguf_scalar_to_np", "byte_order"}
_one_at_a_time = threading.RLock()  # or two blocks that overlap would put each other's reader back


@contextlib.contextmanager
def read_once() -> Generator[None]:
    """Inside, `gguf.GGUFReader(path)` is the fast reader and gives this thread the same object for the same file.

    transformers looks the name up at each call and offers no other way in. The name is put back at the end. A second
    thread that comes here waits for the first.

    Raises:
        InputError: If `gguf` is not installed.
    """
    try:
        import gguf as package
    except ImportError as error:
        raise InputError('Running a GGUF file needs gguf: pip install "unembed[hf]"') from error
    gguf: Any = package  # the name is set below, which its type does not foresee
    with _one_at_a_time:
        before = gguf.GGUFReader
        gguf.GGUFReader = _reader_of(getattr(before, "stock", before))
        try:
            yield
        finally:
            gguf.GGUFReader = before


def _reader_of(stock: type) -> Any:
    """What stands for `stock` meanwhile."""
    fast = _fast_reader(stock) if _is_known(stock) else stock
    owner = threading.get_ident()
    open_readers: dict[tuple[str, int], Any] = {}

    def read(path: Any, mode: str = "r") -> Any:
        if mode != "r" or threading.get_ident() != owner:
            return stock(path, mode)
        key = (str(path), Path(path).stat().st_mtime_ns)
        if key not in open_readers:
            open_readers[key] = fast(path)
        return open_readers[key]

    reader: Any = read
    reader.stock = stock  # for a block inside a block
    return reader


def _is_known(stock: type) -> bool:
    """Whether the installed gguf is one whose reader the fast one was made for."""
    try:
        installed = f"{version('gguf')}."
    except PackageNotFoundError:
        return False
    return installed.startswith(_COMPARED) and all(hasattr(stock, name) for name in _USED)


def _fast_reader(stock: type) -> type:
    """`stock` with arrays of metadata cut out of plain bytes."""

    class FastReader(stock):
        def _get_field_parts(self, orig_offs: int, raw_type: int) -> tuple[int, list[Any], list[int], list[Any]]:
            from gguf import GGUFValueType

            if raw_type != GGUFValueType.ARRAY or self.byte_order != "I":
                return super()._get_field_parts(orig_offs, raw_type)
            item, count = struct.unpack_from("<IQ", self.data, orig_offs)
            start = orig_offs + 12
            dtype = self.gguf_scalar_to_np.get(item)
            head = [self._get(orig_offs, np.uint32), self._get(orig_offs + 4, np.uint64)]
            types = [GGUFValueType.ARRAY, *([GGUFValueType(item)] if count else [])]
            if dtype is not None:
                values = np.frombuffer(self.data, dtype, count, start)
                parts = head + list(values.reshape(-1, 1))
                return 12 + values.nbytes, parts, list(range(2, 2 + count)), types
            if item == GGUFValueType.STRING:
                size, strings = _strings(self.data, start, count)
                return 12 + size, head + strings, list(range(3, 3 + 2 * count, 2)), types
            return super()._get_field_parts(orig_offs, raw_type)

    return FastReader


def _strings(data: np.ndarray, start: int, count: int) -> tuple[int, list[np.ndarray]]:
    """Size in bytes, and length and bytes of each of `count` strings that lie one after the other."""
    parts: list[np.ndarray] = []
    at = start
    plain = data.view(np.ndarray)
    for _ in range(count):
        parts.append(np.frombuffer(plain, np.uint64, 1, at))
        length = int(parts[-1][0])
        parts.append(plain[at + 8 : at + 8 + length])
        at += 8 + length
    return at - start, parts
