"""What is asked of a draw: temperature, top-k, top-p and min-p, checked.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import index
from typing import Any

import numpy as np
import torch
from torch import Tensor

from unembed.decoding.filters._parameters import whole, within
from unembed.decoding.filters._top_p import SLACK

_PLAIN = {int, float, bool, type(None)}


@dataclass(frozen=True)
class Settings:
    """Numbers for all rows, or columns; None where nothing is asked."""

    temperature: float | Tensor
    top_k: int | Tensor | None
    top_p: float | Tensor | None
    min_p: float | Tensor | None
    joint: bool

    @classmethod
    def of(cls, scores: Tensor, *options: Any) -> Settings:
        """Of temperature, top-k, top-p, min-p and joint, checked, what keeps all left out; for scores [*, V]."""
        for one in options:
            if type(one) not in _PLAIN:
                return _checked(scores.shape[-1], options, math.prod(scores.shape[:-1]), scores.device)
        return _of_numbers(scores.shape[-1], *options)

    def at(self, rows: Tensor) -> Settings:
        """Those of some rows."""
        names = ("temperature", "top_k", "top_p", "min_p")
        parts = {name: getattr(self, name) for name in names}
        return Settings(
            **{name: one[rows] if isinstance(one, Tensor) else one for name, one in parts.items()}, joint=self.joint
        )

    @functools.cached_property
    def asked(self) -> np.ndarray:
        """For float32: temperature, k, part of the mass to reach, least probability; one line, or one a row."""
        columns = (
            self.temperature,
            math.inf if self.top_k is None else self.top_k,
            math.inf if self.top_p is None else part(self.top_p, torch.float32),
            0.0 if self.min_p is None else self.min_p,
        )
        rows = max(len(one) if isinstance(one, Tensor) else 1 for one in columns)
        asked = np.empty((rows, len(columns)))
        for place, one in enumerate(columns):
            asked[:, place] = one.detach().squeeze(-1).double().cpu().numpy() if isinstance(one, Tensor) else one
        return asked


def _checked(classes: int, options: Sequence[Any], rows: int = 0, device: torch.device | None = None) -> Settings:
    """Of numbers, or tensors with one number a row."""
    temperature, top_k, top_p, min_p, joint = options
    within("temperature", temperature, 0)
    if top_k is not None:
        whole("top_k", top_k, 1)
        top_k = top_k if isinstance(top_k, Tensor) else index(top_k)
    if top_p is not None:
        within("top_p", top_p)
    if min_p is not None:
        within("min_p", min_p, 0, 1)
    if not isinstance(top_k, Tensor) and top_k is not None and top_k >= classes:
        top_k = None
    if not isinstance(top_p, Tensor) and top_p is not None and top_p >= 1:
        top_p = None
    if not isinstance(min_p, Tensor) and min_p == 0:
        min_p = None
    given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
    return Settings(**{name: _column(name, one, rows, device) for name, one in given.items()}, joint=joint)


@functools.lru_cache(maxsize=256, typed=True)
def _of_numbers(classes: int, *options: Any) -> Settings:
    """Numbers for all rows: what is asked once is asked again for every token."""
    return _checked(classes, options)


def _column(name: str, value: Any, rows: int, device: torch.device | None) -> Any:
    """A tensor beside the scores; anything else as it is."""
    if not isinstance(value, Tensor):
        return value
    if value.ndim == 0:
        value = value.expand(rows)
    if tuple(value.shape) != (rows,):
        raise ValueError(f"`{name}` must be a number or have shape [{rows}], got {tuple(value.shape)}.")
    return value.to(device)[:, None]


def cooled(temperature: float | Tensor, rows: Tensor) -> tuple[float | Tensor, Tensor | None]:
    """A temperature that can be divided by, and where it was 0 if it is a tensor."""
    least, most = torch.finfo(rows.dtype).tiny, torch.finfo(rows.dtype).max
    if not isinstance(temperature, Tensor):
        return (1.0 if temperature in (0, math.inf) else min(max(temperature, least), most)), None
    frozen = temperature == 0
    plain = frozen | (temperature == torch.inf)
    return torch.where(plain, 1.0, temperature.to(rows.dtype)).clamp(least, most), frozen


def part(top_p: float | Tensor, dtype: torch.dtype) -> float | Tensor:
    """The part of the mass that has to be reached, of scores of a dtype; infinite where all is kept."""
    slack = SLACK * torch.finfo(dtype).eps
    if not isinstance(top_p, Tensor):
        return top_p - slack if top_p < 1 else math.inf
    return torch.where(top_p >= 1, torch.inf, top_p.to(torch.promote_types(top_p.dtype, dtype)) - slack)


def require_finite(peaks: Tensor, which: Tensor) -> None:
    """Refuse a row without any score, and one with NaN or +inf, by its largest score.

    Raises:
        ValueError: With the number of the row.
    """
    values = peaks.flatten().tolist()
    place = next((place for place, came in enumerate(values) if not math.isfinite(came)), None)
    if place is None:
        return
    row, came = int(which[place]), values[place]
    if came == -math.inf:
        raise ValueError(f"Row {row} of `scores` has no finite score: nothing can be drawn from it.")
    raise ValueError(f"Row {row} of `scores` holds {came}: expected finite scores or -inf.")
