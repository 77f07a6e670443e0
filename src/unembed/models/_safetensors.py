"""Tensors of a checkpoint in safetensors files: names first, values only of those asked for, memory-mapped."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from unembed.models._config import read_json
from unembed.results import InputError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@dataclass
class Checkpoint:
    """Tensor names with the file that holds each.

    Args:
        files: Tensor name -> file name.
        locate: File name -> path; downloads it where the checkpoint is on a hub.
        where: The checkpoint, for messages.
    """

    files: dict[str, str]
    locate: Callable[[str], Path]
    where: str
    _headers: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def of_file(cls, path: Path) -> Checkpoint:
        """One file that holds everything."""
        header = read_header(path)
        return cls(dict.fromkeys(header, path.name), path.parent.joinpath, str(path), {path.name: header})

    @classmethod
    def of_index(cls, index: Path, locate: Callable[[str], Path]) -> Checkpoint:
        """Shards listed by an index file; nothing but the index is read."""
        weights = read_json(index).get("weight_map")
        if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
            raise InputError(f"{index}: expected `weight_map`, an object tensor -> file; fetch the file again.")
        outside = next((name for name in weights.values() if Path(name).name != name), None)
        if outside is not None:
            raise InputError(
                f"{index}: shard {outside!r} is not a plain file name; use the index that came with the shards."
            )
        return cls(weights, locate, str(index.parent))

    def check_shards(self) -> int:
        """Every shard is there and whole; their number.

        Raises:
            InputError: Naming the file.
        """
        for name in sorted(set(self.files.values())):
            path = self.locate(name)
            if not path.is_file():
                raise InputError(f"{path}: {INDEX} names this shard and it is absent; fetch the file.")
            self._header(name)
        return len(set(self.files.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a tensor, from the header."""
        return tuple(self._entry(name)["shape"])

    def shape_at_hand(self, name: str) -> tuple[int, ...] | None:
        """The same where the header was read already: a shard on a hub is not fetched for its shapes."""
        return self.shape(name) if self.files[name] in self._headers else None

    def get(self, name: str) -> Tensor:
        """A tensor, memory-mapped in its stored dtype."""
        from safetensors import SafetensorError, safe_open

        self._entry(name)
        path = self.locate(self.files[name])
        try:
            with safe_open(path, framework="pt") as file:
                return file.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise InputError(f"{path}: could not read {name} ({error}); fetch the file again.") from None

    def file_of(self, name: str) -> str:
        """Path of the file that holds a tensor."""
        return str(self.locate(self.files[name]))

    def _header(self, file: str) -> dict[str, Any]:
        if file not in self._headers:
            self._headers[file] = read_header(self.locate(file))
        return self._headers[file]

    def _entry(self, name: str) -> Mapping[str, Any]:
        header = self._header(self.files[name])
        if name not in header:
            raise InputError(
                f"{self.file_of(name)}: {INDEX} says it holds {name} and it does not; fetch both files again."
            )
        return header[name]


def read_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file, whose length must fit it.

    Raises:
        InputError: If the file is no safetensors file or shorter than its header says.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise InputError(f"{path}: {size} bytes, too short for its own header; fetch the file again.")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        # Shape and end of every tensor are used later on; a header without them is no header.
        layout = [(len(entry["shape"]), 8 + length + entry["data_offsets"][1]) for entry in header.values()]
        end = max((end for _, end in layout), default=0)
    except OSError as error:
        raise InputError(f"{path}: could not read it ({error.strerror}).") from None
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{path}: not a safetensors file, its header cannot be read; fetch the file again.") from None
    if end > size:
        raise InputError(f"{path}: truncated, its header describes {end} bytes and it has {size}; fetch it again.")
    return header


_FLOAT8 = tuple(getattr(torch, name) for name in dir(torch) if name.startswith("float8_e") and "e8m0" not in name)


def widen(tensor: Tensor, where: str) -> tuple[Tensor, float | None]:
    """A tensor other code can calculate with, and the spacing of its stored numbers where that is lost.

    8-bit floats become bfloat16, which holds each of their values.

    Raises:
        InputError: If the tensor holds no plain numbers.
    """
    if tensor.dtype in _FLOAT8:
        return tensor.to(torch.bfloat16), torch.finfo(tensor.dtype).eps
    if not tensor.dtype.is_floating_point:
        raise InputError(
            f"{where}: {str(tensor.dtype).removeprefix('torch.')} is a packed quantisation; "
            "give the checkpoint before quantisation, or a GGUF file."
        )
    return tensor, None
