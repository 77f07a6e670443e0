"""What every filter is: a small pure object, scores in and scores out, that can be joined to others by `|`.

Shapes: * any, B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unembed.decoding._history import History
from unembed.decoding._largest import largest
from unembed.decoding.filters._distribution import Distribution, described
from unembed.decoding.filters._parameters import at_least_one
from unembed.ops import widened


@dataclass(frozen=True)
class Filter:
    """Maps scores to scores; what it excludes is `-inf`, and what was `-inf` stays excluded.

    Parameters are numbers, or tensors with one number a row. A row without any score comes back unchanged. Nothing
    is differentiable in the choice of what is kept; kept scores pass their gradient. Scores that come out are new, or
    those that went in where nothing changed: they are not to be written to.
    """

    uses_history: ClassVar[bool] = False

    def __call__(
        self, scores: Float[Tensor, "*b V"], history: History | Int[Tensor, "B T"] | None = None
    ) -> Float[Tensor, "*b V"]:
        """Filtered scores, float32 or wider.

        Args:
            scores: Scores; `-inf` is excluded already.
            history: Tokens so far, for filters that look at them; a tensor [B, T] counts as written by the model, with
                -1 in front of shorter rows. Scores are [B, V] then.

        Raises:
            ValueError: If scores are not floating point, have no class, or hold NaN or +inf, or the history is missing
                or does not fit.
        """
        rows, history = checked(self, scores, history)
        return self.apply(rows, history).reshape(scores.shape)

    def apply(self, scores: Float[Tensor, "B V"], history: History | None) -> Float[Tensor, "B V"]:
        """`__call__` on checked scores."""
        raise NotImplementedError

    def stages(
        self, scores: Float[Tensor, "*b V"], history: History | Int[Tensor, "B T"] | None = None
    ) -> list[Distribution]:
        """What is left and what is dropped: an entry for the scores as given, then one for each filter in order."""
        rows, history = checked(self, scores, history)
        found = [Distribution.between("scores", rows, rows)]
        for one in self if isinstance(self, Chain) else (self,):
            need_history(one, history)
            after = one.apply(rows, history)
            found.append(Distribution.between(described(one), rows, after))
            rows = after
        return found

    def __or__(self, other: Filter | Sequence[Filter]) -> Chain:
        return Chain((self, *_several("`|`", (other,) if isinstance(other, Filter) else other)))

    def __ror__(self, other: Sequence[Filter]) -> Chain:
        return Chain((*_several("`|`", other), self))


@dataclass(frozen=True)
class Selection(Filter):
    """A filter that keeps scores as they are or excludes them."""

    def keep(self, scores: Float[Tensor, "B V"], history: History | None) -> Bool[Tensor, "B V"]:
        """Which are kept; what is `-inf` does not matter."""
        raise NotImplementedError

    def apply(self, scores: Float[Tensor, "B V"], history: History | None) -> Float[Tensor, "B V"]:
        """Scores of what is kept, `-inf` elsewhere."""
        return scores.masked_fill(~self.keep(scores.detach(), history), -torch.inf)


@dataclass(frozen=True)
class Exclusion(Selection):
    """A selection that names the few it excludes, so that no pass over the vocabulary has to ask."""

    spares: ClassVar[bool] = False  # a row in which nothing would be left

    def excluded(
        self, scores: Float[Tensor, "B V"], history: History | None
    ) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """Rows and ids of what is excluded."""
        raise NotImplementedError

    def keep(self, scores: Float[Tensor, "B V"], history: History | None) -> Bool[Tensor, "B V"]:
        """All but what is excluded."""
        kept = torch.ones_like(scores, dtype=torch.bool)
        kept[self.excluded(scores, history)] = False
        if not self.spares:
            return kept
        return kept | ~(kept & (scores > -torch.inf)).any(-1, keepdim=True)

    def apply(self, scores: Float[Tensor, "B V"], history: History | None) -> Float[Tensor, "B V"]:
        """Scores of what is kept, `-inf` elsewhere."""
        nothing = torch.tensor(-torch.inf, dtype=scores.dtype, device=scores.device)
        found = scores.index_put(self.excluded(scores, history), nothing)
        if self.spares:
            dead = (found.detach().amax(-1) == -torch.inf).nonzero().squeeze(1)
            if len(dead):
                found = found.index_copy(0, dead, scores[dead])
        return found


@dataclass(frozen=True)
class Chain(Filter):
    """Filters one after the other, each on the scores that the one before left.

    Args:
        filters: In order; chains among them are taken apart.
    """

    filters: tuple[Filter, ...] = ()

    def __post_init__(self) -> None:
        flat: list[Filter] = []
        for one in _several("A chain", self.filters):
            if not isinstance(one, Filter):
                raise ValueError(f"A chain takes filters, got {type(one).__name__}.")
            flat += one.filters if isinstance(one, Chain) else (one,)
        object.__setattr__(self, "filters", tuple(flat))

    def __iter__(self) -> Iterator[Filter]:
        return iter(self.filters)

    def __len__(self) -> int:
        return len(self.filters)

    def apply(self, scores: Float[Tensor, "B V"], history: History | None) -> Float[Tensor, "B V"]:
        """Scores after the last filter."""
        for one in self.filters:
            need_history(one, history)
            scores = one.apply(scores, history)
        return scores


@dataclass(frozen=True)
class Joint(Selection):
    """Selections that all look at the same scores; a token is kept if each of them keeps it.

    Top-k and top-p applied so never renormalise between: the mass of top-p is that of the whole distribution. Where
    no token is left, the most probable ones are kept, so a constraint on ids goes in front of this and not into it.

    Args:
        filters: Selections, as `TopK` and `TopP`.
        min_keep: Tokens kept at least.
    """

    filters: tuple[Selection, ...]
    min_keep: int = 1

    def __post_init__(self) -> None:
        at_least_one(self.min_keep)
        object.__setattr__(self, "filters", _several("`Joint`", self.filters))
        for one in self.filters:
            if not isinstance(one, Selection):
                raise ValueError(f"`Joint` takes filters that only exclude, got {type(one).__name__}.")

    def keep(self, scores: Float[Tensor, "B V"], history: History | None) -> Bool[Tensor, "B V"]:
        """What all keep."""
        kept = torch.ones_like(scores, dtype=torch.bool)
        for one in self.filters:
            need_history(one, history)
            kept &= one.keep(scores, history)
        return or_best(kept, scores, self.min_keep)


def _several(taker: str, given: Any) -> tuple[Any, ...]:
    """Members of a sequence, or of a chain.

    Raises:
        ValueError: If it is neither.
    """
    if not isinstance(given, Sequence | Chain) or isinstance(given, str):
        raise ValueError(f"{taker} takes a sequence of filters, got {given!r:.80}.")
    return tuple(given)


def checked(
    given: Filter, scores: Tensor, history: History | Tensor | None
) -> tuple[Float[Tensor, "B V"], History | None]:
    """Scores as rows in float32 or wider, and a history that fits them."""
    if not scores.is_floating_point() or scores.ndim < 1 or scores.shape[-1] < 1:
        raise ValueError(
            f"`scores` must be floating point [*, V] with V >= 1, got {scores.dtype} {tuple(scores.shape)}."
        )
    rows = scores.reshape(math.prod(scores.shape[:-1]), scores.shape[-1]).to(widened(scores.dtype))
    peaks = rows.detach().amax(-1)
    fits = peaks < torch.inf  # NaN is not, and is the largest of its row
    if not bool(fits.all()):
        row = int(fits.logical_not().nonzero()[0])
        raise ValueError(f"Row {row} of `scores` holds {float(peaks[row])}: expected finite scores or -inf.")
    if isinstance(history, Tensor):
        history = History(history)
    if history is not None and len(history.tokens) != len(rows):
        raise ValueError(
            f"`history` must have one row for each of {len(rows)} rows of scores, got {len(history.tokens)}."
        )
    need_history(given, history)
    return rows, history


def need_history(given: Filter, history: History | None) -> None:
    """Refuse to run a filter that looks at the tokens so far without them."""
    if given.uses_history and history is None:
        raise ValueError(f"{type(given).__name__} looks at the tokens so far: pass `history`.")


def or_best(kept: Bool[Tensor, "B V"], scores: Float[Tensor, "B V"], min_keep: int) -> Bool[Tensor, "B V"]:
    """What is kept, and the most probable ones where that is fewer than `min_keep`."""
    short = (kept & (scores > -torch.inf)).sum(-1) < min_keep
    if not bool(short.any()):
        return kept
    best = largest(scores[short], min(min_keep, scores.shape[-1])).indices
    more = torch.zeros_like(kept[short]).scatter_(-1, best, True)
    return kept.index_put((short.nonzero().squeeze(1),), kept[short] | more)
