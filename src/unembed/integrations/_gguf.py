"""Read a GGUF file once and fast, instead of three times and slowly.

Why: transformers 5.24 parses the whole file three times for a model and its tokenizer, and gguf's `GGUFReader` makes
several numpy views of a memory map for every token string, score and type. With Gemma 3's 262,144 tokens (270M, Q8_0,
2 cores) model and tokenizer took 72 s of processor time; with this and one pass less they take 15 s.
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Generator
from pathlib import Path
from typing import Any

import numpy as np


@contextlib.contextmanager
def read_once() -> Generator[None]:
    """Inside, `gguf.GGUFReader(path)` is the fast reader and gives the same object for the same file.

    transformers looks the name up at each call and offers no other way in. The name is put back at the end. What the
    readers hold is equal (tested), so another thread that meets the fast one reads the same.

    Raises:
        ImportError: If `gguf` is not installed.
    """
    try:
        import gguf as package
    except ImportError as error:
        raise ImportError('Running a GGUF file needs gguf: pip install "unembed[hf]"') from error
    gguf: Any = package  # the name is set below, which its type does not foresee
    stock = gguf.GGUFReader
    fast = _fast_reader(stock)
    open_readers: dict[tuple[str, int], Any] = {}

    def reader(path: Any, mode: str = "r") -> Any:
        if mode != "r":
            return stock(path, mode)
        key = (str(path), Path(path).stat().st_mtime_ns)
        if key not in open_readers:
            open_readers[key] = fast(path)
        return open_readers[key]

    gguf.GGUFReader = reader
    try:
        yield
    finally:
        gguf.GGUFReader = stock


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
