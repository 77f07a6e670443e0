"""What every filter is: a small pure object, scores in and scores out, that can be joined to others by `|`.

Shapes: * any, B rows, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from numbers import Integral, Real
from typing import ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unembed.decoding._history import History
from unembed.decoding._largest import largest
from unembed.ops import widened

Number = float | int | Tensor  # one for all rows, or one a row


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
            ValueError: If scores are not floating point or have no class, or the history is missing or does not fit.
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
        return Chain((self, *((other,) if isinstance(other, Filter) else other)))

    def __ror__(self, other: Sequence[Filter]) -> Chain:
        return Chain((*other, self))


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
class Distribution:
    """What a row can still become after a stage.

    Args:
        stage: The filter.
        ids: Kept ids of each row, the most probable first, equal ones by number.
        probabilities: The same in probability; each row sums to one.
        dropped: Mass that this stage excluded, of the distribution it was given; 0 where that had none.
    """

    stage: str
    ids: list[Int[Tensor, " kept"]]
    probabilities: list[Float[Tensor, " kept"]]
    dropped: Float[Tensor, " B"]

    @classmethod
    def between(cls, stage: str, before: Float[Tensor, "B V"], after: Float[Tensor, "B V"]) -> Distribution:
        """From the scores that went in and came out."""
        gone = (after == -torch.inf).detach()
        mass = torch.softmax(before.detach().double(), -1).nan_to_num(nan=0.0)  # NaN: a row without any score
        dropped = mass.masked_fill(~gone, 0.0).sum(-1)
        ids, probabilities = [], []
        for row in after.detach().double():
            order = row.sort(descending=True, stable=True)
            kept = int((order.values > -torch.inf).sum())
            ids.append(order.indices[:kept])
            probabilities.append(torch.softmax(order.values[:kept], 0))
        return cls(stage, ids, probabilities, dropped)


@dataclass(frozen=True)
class Chain(Filter):
    """Filters one after the other, each on the scores that the one before left.

    Args:
        filters: In order; chains among them are taken apart.
    """

    filters: tuple[Filter, ...] = ()

    def __post_init__(self) -> None:
        flat: list[Filter] = []
        for one in self.filters:
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
        object.__setattr__(self, "filters", tuple(self.filters))
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


def checked(
    given: Filter, scores: Tensor, history: History | Tensor | None
) -> tuple[Float[Tensor, "B V"], History | None]:
    """Scores as rows in float32 or wider, and a history that fits them."""
    if not scores.is_floating_point() or scores.ndim < 1 or scores.shape[-1] < 1:
        raise ValueError(
            f"`scores` must be floating point [*, V] with V >= 1, got {scores.dtype} {tuple(scores.shape)}."
        )
    rows = scores.reshape(math.prod(scores.shape[:-1]), scores.shape[-1]).to(widened(scores.dtype))
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
        raise ValueError(f"`{name}` must be a number or a tensor, got {value!r:.80}.")
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
    if isinstance(value, Tensor):
        fits = not value.is_floating_point() and value.dtype != torch.bool
    else:
        fits = isinstance(value, Integral) and not isinstance(value, bool)
    if not fits:
        raise ValueError(f"`{name}` must be whole, got {value!r:.80}.")
    within(name, value, least)


def at_least_one(min_keep: int) -> None:
    """Refuse to keep no token."""
    if not isinstance(min_keep, Integral) or min_keep < 1:
        raise ValueError(f"`min_keep` must be a whole number of at least 1, got {min_keep}.")


def or_best(kept: Bool[Tensor, "B V"], scores: Float[Tensor, "B V"], min_keep: int) -> Bool[Tensor, "B V"]:
    """What is kept, and the most probable ones where that is fewer than `min_keep`."""
    short = (kept & (scores > -torch.inf)).sum(-1) < min_keep
    if not bool(short.any()):
        return kept
    best = largest(scores[short], min(min_keep, scores.shape[-1])).indices
    more = torch.zeros_like(kept[short]).scatter_(-1, best, True)
    return kept.index_put((short.nonzero().squeeze(1),), kept[short] | more)


def described(given: Filter) -> str:
    """The filter as one would write it, tensors by their shape."""
    shown = []
    for one in fields(given):
        value = getattr(given, one.name)
        if value != one.default if not isinstance(value, Tensor) else True:
            shown.append(f"{one.name}={f'[{len(value)}]' if isinstance(value, Tensor) and value.ndim else value}")
    return f"{type(given).__name__}({', '.join(shown)})"
