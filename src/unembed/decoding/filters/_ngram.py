"""Rules on runs of tokens: no n-gram twice, and DRY, which penalises what would prolong a repeat.

Both run on the host, over the tokens of each row. Shapes: B rows, T tokens so far, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.decoding._history import History
from unembed.decoding.filters._base import Exclusion, Filter
from unembed.decoding.filters._ids import checked_ids
from unembed.decoding.filters._parameters import one_for_all, whole, within
from unembed.decoding.filters._penalties import check_window, known

_STEEPEST = 80.0  # nats by which a penalty grows at most; float32 holds 88


def _reference(tokens: Sequence[int], n: int) -> set[int]:
    """Tokens that would complete an n-gram which occurred."""
    grams = {tuple(tokens[start : start + n]) for start in range(len(tokens) - n + 1)}
    last = tuple(tokens[len(tokens) - n + 1 :])
    return {gram[-1] for gram in grams if gram[:-1] == last} if len(tokens) >= n - 1 else set()


def _dry_reference(tokens: Sequence[int], allowed_length: int, breakers: Sequence[int] = ()) -> dict[int, int]:
    """For each token that would prolong a repeat: the length of the longest run of tokens it would prolong."""
    found: dict[int, int] = {}
    for place in range(1, len(tokens)):
        length = 0
        while length < place and tokens[place - 1 - length] == tokens[len(tokens) - 1 - length]:
            if tokens[place - 1 - length] in breakers:
                break
            length += 1
        if length >= allowed_length and tokens[place] not in breakers:
            found[tokens[place]] = max(length, found.get(tokens[place], 0))
    return found


@dataclass(frozen=True)
class NoRepeatNgram(Exclusion):
    """Excludes tokens that would complete an n-gram a second time (Paulus et al., 2018, arXiv:1705.04304).

    A row in which that would exclude every token stays as it is.

    Args:
        n: Length; 1 excludes every token that occurred.
        scope: Where n-grams are looked for: `all`, or what the model has `written`.
    """

    uses_history: ClassVar[bool] = True
    spares: ClassVar[bool] = True
    n: int
    scope: Literal["all", "written"] = "all"

    def __post_init__(self) -> None:
        one_for_all("n", self.n)
        whole("n", self.n, 1)
        if self.scope not in ("all", "written"):
            raise ValueError(f"`scope` must be all or written, got {self.scope!r}.")

    def excluded(
        self, scores: Float[Tensor, "B V"], history: History | None
    ) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
        """What completes an n-gram that occurred."""
        assert history is not None
        rows, ids = [np.zeros(0, np.int64)], [np.zeros(0, np.int64)]
        for row, padded in enumerate(history.part(self.scope).cpu().numpy()):
            tokens = padded[padded >= 0]
            if len(tokens) >= self.n:
                grams = np.lib.stride_tricks.sliding_window_view(tokens, self.n)
                same = (grams[:, :-1] == tokens[len(tokens) - self.n + 1 :]).all(1)
                ids.append(grams[same, -1].astype(np.int64))
                rows.append(np.full(len(ids[-1]), row))
                known(int(ids[-1].max(initial=0)), scores.shape[-1])
        found = (torch.from_numpy(np.concatenate(one)).to(scores.device) for one in (rows, ids))
        return next(found), next(found)


@dataclass(frozen=True)
class DRY(Filter):
    """Takes `multiplier * base^(length - allowed_length)` from tokens that would prolong a repeat of that length.

    The length is that of the longest run at the end of the tokens that occurred before, directly in front of the
    token in question. Introduced by P. E. Weidmann (text-generation-webui, 2024).

    Args:
        multiplier: The penalty at the allowed length.
        base: Its growth with each further token.
        allowed_length: Shorter runs cost nothing.
        breakers: Ids that no run goes across, as those of line ends and quotes.
        window: Last tokens that are looked at; all when None.
    """

    uses_history: ClassVar[bool] = True
    multiplier: float
    base: float = 1.75
    allowed_length: int = 2
    breakers: tuple[int, ...] = ()
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("multiplier", "base", "allowed_length"):
            one_for_all(name, getattr(self, name))
        within("multiplier", self.multiplier, 0, 1e30)
        within("base", self.base, 1)
        whole("allowed_length", self.allowed_length, 1)
        check_window(self.window)
        object.__setattr__(self, "breakers", tuple(map(int, checked_ids("breakers", self.breakers))))

    def apply(self, scores: Float[Tensor, "B V"], history: History | None) -> Float[Tensor, "B V"]:
        """Scores less the penalties."""
        assert history is not None
        rows, ids, costs = [], [], []
        breakers, longest = np.array(self.breakers), self._longest()
        for row, padded in enumerate(history.tokens.cpu().numpy()):
            tokens = padded[padded >= 0][-self.window if self.window else 0 :]
            for token, length in _prolonged(tokens, self.allowed_length, longest, breakers).items():
                rows.append(row)
                ids.append(token)
                costs.append(self._cost(length))
        if not rows or self.multiplier == 0:
            return scores
        known(max(ids), scores.shape[-1])
        cost = torch.tensor(costs, dtype=scores.dtype, device=scores.device)
        where = (torch.tensor(rows, device=scores.device), torch.tensor(ids, device=scores.device))
        return scores.index_put(where, scores[where] - cost)

    def _cost(self, length: int) -> float:
        """The penalty; finite however long a run is, so that the token keeps a score."""
        exponent = (length - self.allowed_length) * math.log(self.base)
        return min(self.multiplier * math.exp(min(exponent, _STEEPEST)), 1e30)

    def _longest(self) -> int:
        """From which length on the penalty grows no more: longer runs need not be told apart."""
        return self.allowed_length + (math.ceil(_STEEPEST / math.log(self.base)) if self.base > 1 else 0)


def _prolonged(tokens: np.ndarray, allowed_length: int, longest: int, breakers: np.ndarray) -> dict[int, int]:
    """`_dry_reference`, for all places at once: those that still match go one token further back, up to a length."""
    total = len(tokens)
    broken = np.isin(tokens, breakers)
    places = np.arange(1, total)
    found: dict[int, int] = {}
    length = 0
    while True:
        if length >= allowed_length:
            found |= dict.fromkeys(tokens[places[~broken[places]]].tolist(), length)
        places = places[places > length]
        if not len(places) or length == longest or broken[total - 1 - length]:
            return found
        places = places[tokens[places - 1 - length] == tokens[total - 1 - length]]
        length += 1
