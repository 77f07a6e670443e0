"""Rules on ids: allowed ones, banned ones, and no end before a minimum length."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unembed.decoding._history import History
from unembed.decoding.filters._base import Exclusion, Selection
from unembed.decoding.filters._parameters import Number, beside, one_for_all, whole

_Ids = Sequence[int] | Int[Tensor, " n"]


def _reference(scores: Float[Tensor, " V"], ids: Sequence[int], allowed: bool) -> Float[Tensor, " V"]:
    """One row: only the ids, or all but the ids."""
    return torch.stack([z if (v in ids) == allowed else torch.full_like(z, -torch.inf) for v, z in enumerate(scores)])


@dataclass(frozen=True)
class AllowedIds(Selection):
    """Excludes all but some ids.

    A row that is left without a score shows that a constraint cannot be met: it comes back with `-inf` only, and
    `sample` refuses it.

    Args:
        ids: Ids that may be drawn.
    """

    ids: _Ids

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", checked_ids("ids", self.ids))
        if len(self.ids) == 0:
            raise ValueError("`ids` must name at least one id that is allowed.")

    def keep(self, scores: Float[Tensor, "B V"], history: History | None) -> Bool[Tensor, "B V"]:
        """The ids."""
        index = named("ids", self.ids, scores)
        return torch.zeros_like(scores, dtype=torch.bool).index_fill(1, index, True)

    def apply(self, scores: Float[Tensor, "B V"], history: History | None) -> Float[Tensor, "B V"]:
        """Scores of the ids, `-inf` elsewhere."""
        index = named("ids", self.ids, scores)
        return torch.full_like(scores, -torch.inf).index_copy(1, index, scores[:, index])


@dataclass(frozen=True)
class BannedIds(Exclusion):
    """Excludes some ids; like `AllowedIds` in a row where nothing is left.

    Args:
        ids: Ids that may not be drawn.
    """

    ids: _Ids

    def __post_init__(self) -> None:
        object.__setattr__(self, "ids", checked_ids("ids", self.ids))

    def excluded(
        self, scores: Float[Tensor, "B V"], history: History | None
    ) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """The ids, in every row."""
        return _everywhere(torch.arange(len(scores), device=scores.device), named("ids", self.ids, scores))


@dataclass(frozen=True)
class MinLength(Exclusion):
    """Excludes ids that end a text until the model has written a number of tokens; not where nothing else is left.

    Args:
        tokens: Tokens that the model writes at least before the end; one number, or one a row.
        eos_ids: Ids that end a text.
    """

    uses_history: ClassVar[bool] = True
    spares: ClassVar[bool] = True
    tokens: Number
    eos_ids: _Ids

    def __post_init__(self) -> None:
        whole("tokens", self.tokens, 0)
        object.__setattr__(self, "eos_ids", checked_ids("eos_ids", self.eos_ids))

    def excluded(
        self, scores: Float[Tensor, "B V"], history: History | None
    ) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """The ends, in rows that are too short."""
        assert history is not None
        least = beside("tokens", self.tokens, scores).squeeze(1) if isinstance(self.tokens, Tensor) else self.tokens
        short = (history.lengths().to(scores.device) < least).nonzero().squeeze(1)
        return _everywhere(short, named("eos_ids", self.eos_ids, scores))


def _everywhere(rows: Int[Tensor, " n"], ids: Int[Tensor, " k"]) -> tuple[Int[Tensor, " m"], Int[Tensor, " m"]]:
    """Each id in each row."""
    return rows.repeat_interleave(len(ids)), ids.repeat(len(rows))


def checked_ids(name: str, ids: _Ids) -> _Ids:
    """Ids as a tuple, or the tensor that they were.

    Raises:
        ValueError: If they are not whole numbers from 0 on, in one dimension.
    """
    if isinstance(ids, Tensor):
        if ids.ndim != 1:
            raise ValueError(f"`{name}` must have one dimension, got {tuple(ids.shape)}.")
        whole(name, ids, 0)
        return ids
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise ValueError(f"`{name}` must be ids, whole numbers from 0 on, got {ids!r:.80}.")
    found = tuple(ids)
    for one in found:
        one_for_all(name, one)
        whole(name, one, 0)
    return tuple(map(int, found))


def named(name: str, ids: _Ids, scores: Float[Tensor, "B V"]) -> Int[Tensor, " n"]:
    """The ids as a tensor beside the scores.

    Raises:
        ValueError: If an id is no class.
    """
    index = torch.as_tensor(ids, device=scores.device).long()
    width = scores.shape[-1]
    if index.numel() and int(index.amax()) >= width:
        raise ValueError(f"`{name}` holds id {int(index.amax())}, but scores have {width} classes.")
    return index
