"""A lean reader of GGUF files: the header as dictionaries, tensors dequantised in chunks of rows.

`gguf.GGUFReader` makes several array objects a token, 6 to 18 seconds for 262,144 of them; this walks the bytes.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

from __future__ import annotations

import math
import mmap
import os
import re
import struct
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unembed.results import InputError

MAGIC = b"GGUF"
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_CHUNK_ELEMENTS = 1 << 20


@dataclass(frozen=True)
class _Entry:
    kind: int
    shape: tuple[int, ...]
    offset: int


class GgufFile:
    """Metadata and tensor list of one GGUF file.

    Raises:
        InputError: If it is not a whole GGUF file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with path.open("rb") as file:
                if file.read(4) != MAGIC:
                    raise InputError(
                        f"{path}: not a GGUF file, it does not begin with the letters GGUF; fetch it again."
                    )
                self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise InputError(f"{path}: could not read it ({error.strerror}).") from None
        self._at = 4
        try:
            self._read_header()
        except (struct.error, IndexError, ValueError, ArithmeticError, MemoryError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"{path}: truncated or damaged, its header ends early; fetch the file again.") from None

    def _read_header(self) -> None:
        version = self._number("I")
        if version not in (2, 3):
            raise InputError(
                f"{self.path}: GGUF version {version}, expected 2 or 3 (little-endian); convert the file again."
            )
        tensors, pairs = self._number("Q"), self._number("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(pairs):
            name = self._string()
            self.metadata[name] = self._value(self._number("I"))
        self.tensors: dict[str, _Entry] = {}
        for _ in range(tensors):
            name = self._string()
            shape = tuple(self._number("Q") for _ in range(self._number("I")))[::-1]
            self.tensors[name] = _Entry(self._number("I"), shape, self._number("Q"))
        alignment = int(self.metadata.get("general.alignment", 32))
        self._start = -(-self._at // alignment) * alignment

    def _number(self, code: str) -> Any:
        (value,) = struct.unpack_from(f"<{code}", self._data, self._at)
        self._at += struct.calcsize(code)
        return value

    def _string(self) -> str:
        # Tokens need not be UTF-8; what is not becomes lone surrogates.
        size = self._number("Q")
        start, self._at = self._at, self._at + size
        if self._at > len(self._data):
            raise ValueError("a string ends beyond the file")
        return self._data[start : self._at].decode("utf-8", "surrogateescape")

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_scalar(kind))
        inner, count = self._number("I"), self._number("Q")
        if inner in (_STRING, _ARRAY):
            if count > len(self._data):
                raise ValueError("an array ends beyond the file")
            return [self._value(inner) for _ in range(count)]
        dtype = np.dtype(f"<{_scalar(inner)}")
        values = np.frombuffer(self._data, dtype, count, self._at).tolist()
        self._at += count * dtype.itemsize
        return values

    def check_whole(self) -> None:
        """Every tensor has a shape its type can have and ends inside the file.

        Raises:
            InputError: If one does not.
        """
        for name, entry in self.tensors.items():
            if not entry.shape or not math.prod(entry.shape) or entry.shape[-1] % _types()[entry.kind][1]:
                raise InputError(f"{self.path}: damaged, {name} has shape {entry.shape}; fetch the file again.")
        end = max((self._start + entry.offset + self._bytes(entry) for entry in self.tensors.values()), default=0)
        if end > len(self._data):
            has = len(self._data)
            raise InputError(f"{self.path}: truncated, its tensors end at byte {end}, it has {has}; fetch it again.")

    def kind(self, name: str) -> str:
        """Name of the type a tensor is stored in: `Q8_0`."""
        return _types()[self.tensors[name].kind][0]

    def _bytes(self, entry: _Entry) -> int:
        _, block, size = _types()[entry.kind]
        return math.prod(entry.shape) // block * size

    def get(self, name: str) -> Tensor:
        """A tensor in float32, dequantised a chunk of rows at a time: the peak is one float32 copy and a chunk."""
        import gguf

        entry = self.tensors[name]
        columns = entry.shape[-1]
        rows = math.prod(entry.shape) // columns
        kind = gguf.GGMLQuantizationType(entry.kind)
        stored = np.frombuffer(self._data, np.uint8, self._bytes(entry), self._start + entry.offset).reshape(rows, -1)
        out = torch.empty(rows, columns)
        chunk = max(1, _CHUNK_ELEMENTS // columns)

        def fill(start: int) -> None:
            # A damaged scale of a block is infinite; the checks say so, numpy need not.
            with np.errstate(all="ignore"):
                out[start : start + chunk] = torch.from_numpy(_dequantise(stored[start : start + chunk], kind))

        try:
            with ThreadPoolExecutor(min(4, os.cpu_count() or 1)) as pool:
                list(pool.map(fill, range(0, rows, chunk)))
        except NotImplementedError:
            message = f"{self.path}: {name} is {kind.name}, which the gguf package cannot read; convert it to Q8_0."
            raise InputError(message) from None
        return out.reshape(entry.shape)


def _scalar(kind: int) -> str:
    if kind not in _SCALARS:
        raise ValueError(f"unknown value type {kind}")
    return _SCALARS[kind]


def _dequantise(stored: np.ndarray, kind: Any) -> np.ndarray:
    import gguf

    if kind.name == "F64":
        return stored.view(np.float64).astype(np.float32)
    values = gguf.dequantize(np.ascontiguousarray(stored), kind)
    return values if values.flags.writeable else values.copy()


def _types() -> dict[int, tuple[str, int, int]]:
    """Type number -> name, elements a block, bytes a block."""
    try:
        import gguf
    except ImportError:
        raise InputError('Reading GGUF needs the gguf package: pip install "unembed[hf]".') from None
    return {kind.value: (kind.name, *gguf.GGML_QUANT_SIZES[kind]) for kind in gguf.GGMLQuantizationType}


def open_parts(path: Path) -> list[GgufFile]:
    """The file, and the others of its set where it was split.

    Raises:
        InputError: If one is absent or damaged.
    """
    first = GgufFile(path)
    count = int(first.metadata.get("split.count", 1) or 1)
    match = re.fullmatch(r"(.*)-\d{5}-of-(\d{5})\.gguf", path.name)
    files = [first]
    if count > 1 and match:
        paths = [path.with_name(f"{match[1]}-{i:05d}-of-{match[2]}.gguf") for i in range(1, count + 1)]
        absent = next((p for p in paths if not p.is_file()), None)
        if absent is not None:
            raise InputError(f"{absent}: part of a GGUF split in {count} files, and it is absent; fetch the file.")
        files = [first if p == path else GgufFile(p) for p in paths]
        files.sort(key=lambda file: "general.architecture" not in file.metadata)
    for file in files:
        _check_types(file)
        file.check_whole()
    return files


def _check_types(file: GgufFile) -> None:
    known = _types()
    name = next((name for name, entry in file.tensors.items() if entry.kind not in known), None)
    if name is not None:
        raise InputError(
            f"{file.path}: {name} has type number {file.tensors[name].kind}, which the gguf package lacks; update gguf."
        )
