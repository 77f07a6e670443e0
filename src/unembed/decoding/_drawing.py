"""Temperature, top-k, top-p and min-p of a request: for the fused draw, and as filters.

Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import Field, dataclass, fields, replace
from numbers import Real
from typing import Any, get_args

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.decoding._largest import largest
from unembed.decoding.filters._base import Chain, Filter, Joint, Selection
from unembed.decoding.filters._min_p import MinP
from unembed.decoding.filters._parameters import Number
from unembed.decoding.filters._temperature import Temperature
from unembed.decoding.filters._top_k import TopK
from unembed.decoding.filters._top_p import TopP

_LISTED = 1024  # above, listing the largest scores costs more than the filters do


@dataclass(frozen=True)
class Drawing:
    """Numbers, or tensors with one number a row of the request; arguments of `sample`."""

    temperature: Number = 1.0
    top_k: int | Tensor | None = None
    top_p: Number | None = None
    min_p: Number | None = None

    def at(self, rows: Int[Tensor, " n"]) -> Drawing:
        """Those of some rows."""
        return Drawing(**{name: _rows_of(value, rows) for name, value in self.options().items()})

    def options(self) -> dict[str, Any]:
        """As `sample` takes them."""
        return {one.name: getattr(self, one.name) for one in fields(self)}

    @property
    def plain(self) -> bool:
        """Whether nothing is asked."""
        default = Drawing()
        return all(
            not isinstance(value, Tensor) and value == getattr(default, name) for name, value in self.options().items()
        )

    def chain(self, *, joint: bool = False) -> Chain:
        """The same as filters."""
        limits: list[Selection] = []
        if self.top_k is not None:
            limits.append(TopK(self.top_k))
        if self.top_p is not None:
            limits.append(TopP(self.top_p))
        found: list[Filter] = [*limits]
        if joint and len(limits) > 1:
            found = [Joint(tuple(limits))]
        if isinstance(self.temperature, Tensor) or self.temperature != 1:
            found.insert(0, Temperature(self.temperature))
        if self.min_p is not None:
            found.append(MinP(self.min_p))
        return Chain(tuple(found))

    def log_prob(
        self, scores: Float[Tensor, "B V"], tokens: Int[Tensor, " B"], *, joint: bool = False
    ) -> Float[Tensor, " B"]:
        """Log-probability of tokens that `sample` drew.

        Filters and `sample` round differently; a token that was drawn counts as kept by both.
        """
        if self.plain:
            return scores.gather(-1, tokens[:, None]).squeeze(-1) - scores.logsumexp(-1)
        place, rest = tokens[:, None], self
        hot = torch.as_tensor(self.temperature, device=scores.device) == torch.inf
        if bool(hot.any()):  # equal then, and top-k goes by the lowest index
            hot = hot.expand(len(scores))[:, None] & (scores > -torch.inf)
            scores = scores.masked_fill(hot, 0.0)
        if isinstance(self.top_k, int) and self.top_k <= min(_LISTED, scores.shape[-1]) and not joint:
            # The other filters see the k largest in their order, so equal ones fall as they would among all.
            scores, ids = largest(scores, self.top_k)
            place, rest = (ids == place).int().argmax(-1, keepdim=True), replace(self, top_k=None)
        warm = Temperature(self.temperature)(scores)
        kept = replace(rest, temperature=1.0).chain(joint=joint)(warm)
        own = warm.gather(-1, place)
        return (own - kept.scatter(-1, place, own).logsumexp(-1, keepdim=True)).squeeze(-1)


def at_rows(given: Filter, rows: Int[Tensor, " n"]) -> Filter:
    """A filter for some rows of the request: parameters with one number a row are those of these rows."""
    changes = {}
    for one in fields(given):
        value = getattr(given, one.name)
        if _is_number(one):
            value = _rows_of(value, rows)
        elif isinstance(value, tuple) and any(isinstance(each, Filter) for each in value):
            value = tuple(at_rows(each, rows) for each in value)
        if value is not getattr(given, one.name):
            changes[one.name] = value
    return replace(given, **changes) if changes else given


def per_row(name: str, value: Any, rows: int, device: torch.device) -> Any:
    """A number as it is; one number a row as a tensor, float64 where there are fractions, as numbers are.

    Raises:
        ValueError: If it is neither, or not of that many rows.
    """
    if value is None or isinstance(value, Real):
        return value.item() if isinstance(value, np.generic) else value
    try:
        found = value if isinstance(value, Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError):
        raise ValueError(f"`{name}` must be a number, or one for each of {rows} rows, got {value!r:.80}.") from None
    if tuple(found.shape) not in ((), (rows,)):
        raise ValueError(f"`{name}` must be a number, or one for each of {rows} rows, got {value!r:.80}.")
    wide = torch.float32 if device.type == "mps" else torch.float64
    return found.to(device, wide if found.is_floating_point() else torch.int64)


def check_rows(given: Filter, rows: int) -> None:
    """Refuse a filter that has numbers for another count of rows, or a tensor of which nobody says what it is.

    Raises:
        ValueError: With the name of the filter and its parameter.
    """
    for one in fields(given):
        value = getattr(given, one.name)
        name = f"{type(given).__name__}.{one.name}"
        if isinstance(value, Tensor) and not _is_number(one) and value.ndim and not one.name.endswith("ids"):
            raise ValueError(
                f"`{name}` must be annotated as `Number` to have one number a row (or be named `..._ids`), "
                f"got a tensor of shape {tuple(value.shape)} in a parameter of type {one.type}."
            )
        if _is_number(one) and isinstance(value, Tensor) and tuple(value.shape) not in ((), (rows,)):
            raise ValueError(f"`{name}` must be a number or have shape [{rows}], got {tuple(value.shape)}.")
        for each in value if isinstance(value, tuple) else ():
            if isinstance(each, Filter):
                check_rows(each, rows)


def _is_number(one: Field) -> bool:
    """Whether a parameter of a filter may have one number a row: its annotation says so, as a string or not."""
    if isinstance(one.type, str):
        return "Number" in one.type
    return set(get_args(Number)) <= set(get_args(one.type))


def _rows_of(value: Any, rows: Int[Tensor, " n"]) -> Any:
    return value[rows.to(value.device)] if isinstance(value, Tensor) and value.ndim else value
