"""What is asked of a draw: temperature, top-k, top-p and min-p, checked.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from operator import index
from typing import Any

import torch
from torch import Tensor

from unembed.decoding.filters._parameters import Number, whole, within
from unembed.decoding.filters._top_p import SLACK


@dataclass(frozen=True)
class Settings:
    """Numbers for all rows, or columns; None where nothing is asked."""

    temperature: float | Tensor
    top_k: int | Tensor | None
    top_p: float | Tensor | None
    min_p: float | Tensor | None
    joint: bool

    @classmethod
    def of(
        cls,
        rows: Tensor,
        *,
        temperature: Number,
        top_k: int | Tensor | None,
        top_p: Number | None,
        min_p: Number | None,
        joint: bool,
    ) -> Settings:
        """Checked, with what keeps everything left out."""
        within("temperature", temperature, 0)
        if top_k is not None:
            whole("top_k", top_k, 1)
            top_k = top_k if isinstance(top_k, Tensor) else index(top_k)
        if top_p is not None:
            within("top_p", top_p)
        if min_p is not None:
            within("min_p", min_p, 0, 1)
        if not isinstance(top_k, Tensor) and top_k is not None and top_k >= rows.shape[-1]:
            top_k = None
        if not isinstance(top_p, Tensor) and top_p is not None and top_p >= 1:
            top_p = None
        if not isinstance(min_p, Tensor) and min_p == 0:
            min_p = None
        return cls(
            temperature=_column("temperature", temperature, rows),
            top_k=None if top_k is None else _column("top_k", top_k, rows),
            top_p=None if top_p is None else _column("top_p", top_p, rows),
            min_p=None if min_p is None else _column("min_p", min_p, rows),
            joint=joint,
        )

    def at(self, rows: Tensor) -> Settings:
        """Those of some rows."""
        names = ("temperature", "top_k", "top_p", "min_p")
        parts = {name: getattr(self, name) for name in names}
        return Settings(
            **{name: one[rows] if isinstance(one, Tensor) else one for name, one in parts.items()}, joint=self.joint
        )


def _column(name: str, value: Any, rows: Tensor) -> Any:
    if not isinstance(value, Tensor):
        return value
    if value.ndim == 0:
        value = value.expand(len(rows))
    if tuple(value.shape) != (len(rows),):
        raise ValueError(f"`{name}` must be a number or have shape [{len(rows)}], got {tuple(value.shape)}.")
    return value.to(rows.device)[:, None]


def cooled(temperature: float | Tensor, rows: Tensor) -> tuple[float | Tensor, Tensor | None]:
    """A temperature that can be divided by, and where it was 0 if it is a tensor."""
    tiny = torch.finfo(rows.dtype).tiny
    if not isinstance(temperature, Tensor):
        return (1.0 if temperature in (0, math.inf) else max(temperature, tiny)), None
    frozen = temperature == 0
    plain = frozen | (temperature == torch.inf)
    return torch.where(plain, 1.0, temperature.to(rows.dtype)).clamp(min=tiny), frozen


def part(top_p: float | Tensor, rows: Tensor) -> float | Tensor:
    """The part of the mass that has to be reached; infinite where all is kept."""
    slack = SLACK * torch.finfo(rows.dtype).eps
    if not isinstance(top_p, Tensor):
        return top_p - slack if top_p < 1 else math.inf
    return torch.where(top_p >= 1, torch.inf, top_p.to(torch.promote_types(top_p.dtype, rows.dtype)) - slack)


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
