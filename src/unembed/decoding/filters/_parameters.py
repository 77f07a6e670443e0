"""Parameters of filters, checked: numbers, or tensors with one number a row.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

import math
from numbers import Real
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unembed.ops._whole import is_whole

Number = float | int | Tensor  # one for all rows, or one a row


def column(name: str, value: Number, scores: Float[Tensor, "B V"]) -> Float[Tensor, "#B 1"]:
    """A parameter as a column beside the scores, in float64."""
    if not isinstance(value, Tensor):
        return torch.full((1, 1), float(value), dtype=torch.float64, device=scores.device)
    return beside(name, value, scores).double()


def beside(name: str, value: Tensor, scores: Float[Tensor, "B V"]) -> Tensor:
    """A tensor of parameters as a column beside the scores, in its own dtype.

    Raises:
        ValueError: If it has not one number a row.
    """
    if value.ndim == 0:
        value = value.expand(len(scores))
    if tuple(value.shape) != (len(scores),):
        raise ValueError(f"`{name}` must be a number or have shape [{len(scores)}], got {tuple(value.shape)}.")
    return value.to(scores.device)[:, None]


def within(name: str, value: Number, least: float = -math.inf, most: float = math.inf, *, strict: bool = False) -> None:
    """Refuse a parameter outside its range; `strict` excludes the lower end.

    Raises:
        ValueError: If it is no number, or it or one of its entries is NaN or outside.
    """
    if not isinstance(value, (Real, Tensor)):
        raise ValueError(f"`{name}` must be a number, or a tensor with one a row, got {value!r:.80}.")
    if isinstance(value, Tensor):
        low = value > least if strict else value >= least
        holds, shown = bool((low & (value <= most)).all()), str(value.tolist())
    else:
        holds, shown = (value > least if strict else value >= least) and value <= most, str(value)
    if not holds:
        wanted = "a number" if least == -math.inf else f"more than {least}" if strict else f"at least {least}"
        ceiling = "" if most == math.inf else f" and at most {most}"
        raise ValueError(f"`{name}` must be {wanted}{ceiling}, got {shown:.80}.")


def whole(name: str, value: Number, least: int) -> None:
    """Refuse what is not a whole number, or a tensor of such, or is too small.

    Raises:
        ValueError: With the name and what came.
    """
    integers = isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool
    if not (integers or is_whole(value)):
        hint = "; give a tensor for one a row" if isinstance(value, list | tuple) else ""
        raise ValueError(f"`{name}` must be whole, got {value!r:.80}{hint}.")
    within(name, value, least)


def at_least_one(min_keep: int) -> None:
    """Refuse to keep no token."""
    if not is_whole(min_keep) or min_keep < 1:
        raise ValueError(f"`min_keep` must be a whole number of at least 1, got {min_keep!r:.80}.")


def one_for_all(name: str, value: Any) -> None:
    """Refuse a tensor where all rows have the same number.

    Raises:
        ValueError: With the name and what came.
    """
    if isinstance(value, Tensor):
        raise ValueError(f"`{name}` must be one number for all rows, got a tensor of shape {tuple(value.shape)}.")
