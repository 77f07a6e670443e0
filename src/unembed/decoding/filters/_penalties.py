"""Penalties on tokens that occurred already: repetition, presence and frequency.

Shapes: B rows, T tokens so far, V vocabulary, n ids that occurred in any row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.decoding._history import History
from unembed.decoding.filters._base import Filter
from unembed.decoding.filters._parameters import Number, column, one_for_all, whole, within

Scope = Literal["all", "written", "prompt"]


def _reference(
    scores: Float[Tensor, " V"],
    history: Int[Tensor, " T"],
    *,
    repetition: float = 1.0,
    presence: float = 0.0,
    frequency: float = 0.0,
) -> Float[Tensor, " V"]:
    """One row and its tokens without padding: each id once for the first two, by its count for the last."""
    found = scores.clone()
    for token in sorted(set(history.tolist())):
        z = found[token]
        count = int((history == token).sum())
        found[token] = (z * repetition if z < 0 else z / repetition) - presence - frequency * count
    return found


@dataclass(frozen=True)
class RepetitionPenalty(Filter):
    """Divides the scores of ids that occurred by a penalty where they are positive, multiplies them where not.

    An id counts once however often it occurred. As published (Keskar et al., 2019, arXiv:1909.05858) it depends on the
    additive constant of the scores, which softmax does not: a model that adds 5 to every score is penalised
    differently. `of="log_probs"` penalises log-probabilities instead, which have no such constant.

    Args:
        penalty: Above 1 makes repeats rarer.
        scope: Which tokens count: `all`, those `written` by the model, or those of the `prompt`.
        of: What is penalised: `scores` as given, or `log_probs`.
        window: Only the last tokens of a row count, so many; all when None.
    """

    uses_history: ClassVar[bool] = True
    penalty: Number
    scope: Scope = "all"
    of: Literal["scores", "log_probs"] = "scores"
    window: int | None = None

    def __post_init__(self) -> None:
        within("penalty", self.penalty, 0, 1e30, strict=True)
        check_scope(self.scope, self.window)
        if self.of not in ("scores", "log_probs"):
            raise ValueError(f"`of` must be scores or log_probs, got {self.of!r}.")

    def apply(self, scores: Float[Tensor, "B V"], history: History | None) -> Float[Tensor, "B V"]:
        """Scores, or log-probabilities, penalised."""
        assert history is not None
        if self.of == "log_probs":
            # Nothing where there is no score: the logarithm would be NaN, and so would its gradient.
            taking = scores > -torch.inf
            plain = scores.masked_fill(~taking.any(-1, keepdim=True), 0.0)
            scores = torch.where(taking, torch.log_softmax(plain, -1), -torch.inf)
        seen = occurred(history.part(self.scope, self.window), scores)
        penalty = seen.own(column("penalty", self.penalty, scores))
        own, limits = scores[seen.rows, seen.ids], torch.finfo(scores.dtype)
        changed = torch.where(own < 0, own * penalty, own / penalty).clamp(limits.min, limits.max)
        return seen.put(scores, torch.where(own > -torch.inf, changed, -torch.inf))


@dataclass(frozen=True)
class _Subtraction(Filter):
    """Takes a number from the scores of ids that occurred."""

    uses_history: ClassVar[bool] = True
    by_count: ClassVar[bool]
    penalty: Number
    scope: Scope = "written"
    window: int | None = None

    def __post_init__(self) -> None:
        within("penalty", self.penalty, -1e30, 1e30)
        check_scope(self.scope, self.window)

    def apply(self, scores: Float[Tensor, "B V"], history: History | None) -> Float[Tensor, "B V"]:
        """Scores less the penalty, or less that many times of it."""
        assert history is not None
        seen = occurred(history.part(self.scope, self.window), scores)
        penalty = seen.own(column("penalty", self.penalty, scores))
        return seen.put(scores, scores[seen.rows, seen.ids] - (penalty * seen.counts if self.by_count else penalty))


@dataclass(frozen=True)
class PresencePenalty(_Subtraction):
    """Takes a number from the scores of ids that occurred, once each.

    Args:
        penalty: Above 0 makes repeats rarer.
        scope: Which tokens count: `all`, those `written` by the model, or those of the `prompt`.
        window: Only the last tokens of a row count, so many; all when None.
    """

    by_count: ClassVar[bool] = False


@dataclass(frozen=True)
class FrequencyPenalty(_Subtraction):
    """Takes a number from the scores of ids that occurred, times how often they did.

    Args:
        penalty: Above 0 makes repeats rarer.
        scope: Which tokens count: `all`, those `written` by the model, or those of the `prompt`.
        window: Only the last tokens of a row count, so many; all when None.
    """

    by_count: ClassVar[bool] = True


class Occurred(NamedTuple):
    """Each id that occurred in a row, once: where a score is written twice, its gradient would be too."""

    rows: Int[Tensor, " n"]
    ids: Int[Tensor, " n"]
    counts: Int[Tensor, " n"]

    def own(self, parameter: Float[Tensor, "#B 1"]) -> Float[Tensor, " n"]:
        """The parameter of each id's row."""
        return parameter.squeeze(-1)[self.rows if len(parameter) > 1 else torch.zeros_like(self.rows)]

    def put(self, scores: Float[Tensor, "B V"], values: Float[Tensor, " n"]) -> Float[Tensor, "B V"]:
        """Scores with those of the ids replaced."""
        return scores.index_put((self.rows, self.ids), values.to(scores.dtype))


def occurred(tokens: Int[Tensor, "B T"], scores: Float[Tensor, "B V"]) -> Occurred:
    """What occurred, and how often; -1 is no token.

    Raises:
        ValueError: If an id is no class.
    """
    ordered = tokens.to(scores.device).long().sort(-1).values
    if not ordered.numel():
        none = ordered.new_zeros(0)
        return Occurred(none, none, none)
    known(int(ordered[:, -1].amax()), scores.shape[-1])
    first = ordered >= 0
    first[:, 1:] &= ordered[:, 1:] != ordered[:, :-1]
    rows, place = first.nonzero(as_tuple=True)
    after = torch.searchsorted(ordered, ordered, right=True)
    return Occurred(rows, ordered[rows, place], after[rows, place] - place)


def known(largest: int, width: int) -> None:
    """Refuse an id of the history that is no class.

    Raises:
        ValueError: With the id.
    """
    if largest >= width:
        raise ValueError(f"`history` holds id {largest}, but scores have {width} classes.")


def check_scope(scope: str, window: int | None = None) -> None:
    """Refuse a scope that there is not, and a window without a token."""
    if scope not in ("all", "written", "prompt"):
        raise ValueError(f"`scope` must be all, written or prompt, got {scope!r}.")
    check_window(window)


def check_window(window: int | None) -> None:
    """Refuse a window without a token, and one of each row."""
    if window is not None:
        one_for_all("window", window)
        whole("window", window, 1)
