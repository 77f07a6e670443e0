"""Uniform draws that are a function of (seed, position, stream, attempt): no state, so no neighbour can matter.

The words are folded one by one into a 64-bit state through the finaliser of SplitMix64 (Steele et al., 2014,
doi:10.1145/2660193.2660195). Numbers are made on the host: one a row and step, whatever V is.

Shapes: B rows, n of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.ops._whole import is_whole

_STEP = np.uint64(0x9E3779B97F4A7C15)  # 2^64 over the golden ratio
_FIRST, _SECOND = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_SHIFTS = tuple(np.uint64(shift) for shift in (30, 27, 31, 11))

# For the front doors that take them. Here they are `Any`: `words` refuses what does not fit, and says so by name.
Numbers = Sequence[int] | Int[Tensor, " B"] | np.ndarray


class Stream(IntEnum):
    """What a draw is for: two uses of one seed and position must not see the same noise."""

    TOKEN = 0
    DRAFT = 1
    ACCEPT = 2
    RESIDUAL = 3
    COIN = 4
    NOISE = 5


def uniforms(seeds: Any, positions: Any = None, *, stream: int = Stream.TOKEN, attempt: int = 0) -> np.ndarray:
    """One float64 a row, uniform on the multiples of 2^-53 in [0, 1).

    Args:
        seeds: Whole numbers of 64 bits, signed or not, one a row.
        positions: The same; 0 when None.
        stream: What the draw is for.
        attempt: Counts draws of one row at one position.
    """
    seed = words("seeds", seeds)
    place = np.zeros_like(seed) if positions is None else words("positions", positions)
    if place.shape != seed.shape:
        raise ValueError(f"`positions` must have one number for each of {len(seed)} seeds, got {len(place)}.")
    state = _mixed(seed + _STEP)
    state = _mixed(state ^ _mixed(place + _STEP + _STEP))
    state = _mixed(state ^ np.uint64(stream << 32 | attempt))
    return (state >> _SHIFTS[3]) * 2.0**-53


def words(name: str, numbers: Any) -> np.ndarray:
    """Whole numbers as unsigned 64-bit words, one dimension.

    Raises:
        ValueError: If they are not whole numbers of 64 bits, one a row.
    """
    if isinstance(numbers, Tensor):
        numbers = numbers.detach().cpu().numpy()
    if isinstance(numbers, np.ndarray):
        if numbers.ndim != 1:
            raise ValueError(f"`{name}` must be whole numbers of 64 bits, one a row, got an array {numbers.shape}.")
        if numbers.dtype.kind in "iu":
            return numbers.astype(np.int64 if numbers.dtype.kind == "i" else np.uint64).view(np.uint64)
    else:
        found = list(numbers) if isinstance(numbers, Iterable) else [None]
        if all(is_whole(one) and -(2**63) <= one < 2**64 for one in found):
            return np.array([int(one) % 2**64 for one in found], dtype=np.uint64)
    raise ValueError(f"`{name}` must be whole numbers of 64 bits, one a row, got {numbers!r:.80}.")


def generated(rows: int, device: torch.device, generator: torch.Generator | None) -> Float[Tensor, " B"]:
    """One float64 a row from a generator; made where the generator lives, or on the device where there is none."""
    origin = generator.device if generator is not None else torch.device("cpu" if device.type == "mps" else device)
    drawn = torch.rand(rows, dtype=torch.float64, device=origin, generator=generator)
    return drawn.to(device, torch.float32 if device.type == "mps" else torch.float64)


def _random_words(rows: int, generator: torch.Generator | None) -> np.ndarray:
    """Seeds from a generator."""
    origin = "cpu" if generator is None else generator.device  # whatever the default device is
    drawn = torch.empty(rows, dtype=torch.int64, device=origin).random_(generator=generator)
    return (drawn if drawn.is_cpu else drawn.cpu()).numpy().view(np.uint64)


@dataclass(frozen=True)
class Noise:
    """Uniform draws of the rows of a batch, one a row and step: from their own seeds, or from a generator.

    On a CPU a generator gives the seeds, one a row; elsewhere the draws themselves, so that no number has to come back
    to the host.

    Args:
        rows: B.
        device: Where draws are wanted.
        seeds: One a row, as `words`; None for a generator.
        positions: The same; 0 when None.
        generator: PyTorch's own when None.
    """

    rows: int
    device: torch.device
    seeds: np.ndarray | None = None
    positions: np.ndarray | None = None
    generator: torch.Generator | None = None

    @classmethod
    def of(
        cls,
        rows: int,
        device: torch.device,
        *,
        seeds: Any = None,
        positions: Any = None,
        generator: torch.Generator | None = None,
    ) -> Noise:
        """Checked.

        Raises:
            ValueError: If `positions` come without `seeds`, or `seeds` with a generator, or their number does not fit.
        """
        if seeds is None:
            if positions is not None:
                raise ValueError("`positions` count the draws of `seeds`: give both.")
            if device.type != "cpu":
                return cls(rows, device, generator=generator)
            return cls(rows, device, _random_words(rows, generator))
        if generator is not None:
            raise ValueError("Give `seeds` or `generator`, not both.")
        seed = words("seeds", seeds)
        place = None if positions is None else words("positions", positions)
        for name, one in (("seeds", seed), ("positions", place)):
            if one is not None and len(one) != rows:
                raise ValueError(f"`{name}` must have one number for each of {rows} rows, got {len(one)}.")
        return cls(rows, device, seed, place)

    def at(self, which: Int[Tensor, " n"] | slice) -> Noise:
        """The draws of some of the rows."""
        rows = len(range(self.rows)[which]) if isinstance(which, slice) else len(which)
        if self.seeds is None:
            return Noise(rows, self.device, generator=self.generator)
        part = which if isinstance(which, slice) else which.cpu().numpy()
        positions = None if self.positions is None else self.positions[part]
        return Noise(rows, self.device, self.seeds[part], positions)

    def __call__(self, step: int = 0) -> Float[Tensor, " B"]:
        """One draw a row, float64 (float32 on MPS); draws of different steps are independent."""
        if self.seeds is None:
            return generated(self.rows, self.device, self.generator)
        drawn = torch.from_numpy(uniforms(self.seeds, self.positions, attempt=step))
        return drawn.to(self.device, torch.float32 if self.device.type == "mps" else None)


def _mixed(state: np.ndarray) -> np.ndarray:
    state = (state ^ (state >> _SHIFTS[0])) * _FIRST
    state = (state ^ (state >> _SHIFTS[1])) * _SECOND
    return state ^ (state >> _SHIFTS[2])
