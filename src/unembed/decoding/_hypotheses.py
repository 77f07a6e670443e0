"""Hypotheses of a search: a tree of tokens, and the running ones of all prompts in the order the scorer has them.

Shapes: B prompts, n running hypotheses, t tokens written by each, V vocabulary, k candidates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.decoding import _compiled
from unembed.decoding._generation import Finish
from unembed.decoding._largest import largest
from unembed.decoding._plan import Plan
from unembed.decoding._scorer import Scorer
from unembed.decoding._steps import check_finite
from unembed.decoding._strategy import Written
from unembed.decoding._text import TextStream
from unembed.ops import widened

Alternatives = tuple[Tensor, Tensor]
_PIECE = 1 << 18  # scores whose exponentials are summed at once


@dataclass(slots=True, eq=False)  # frozen, it would take three times as long to make
class Node:
    """A token in the tree of hypotheses; without a parent, the end of a prompt.

    Args:
        parent: What it comes after.
        token: Its id.
        log_prob: Under the model's scores as they are.
        drawn_log_prob: Under the distribution after filters and mask.
        total: Sum of `drawn_log_prob` from the prompt on.
        length: Tokens from the prompt on.
        alternatives: Most probable tokens at its place, where they are asked for.
        text: The text up to here, where a stop string is looked for.
    """

    parent: Node | None = None
    token: int = -1
    log_prob: float = 0.0
    drawn_log_prob: float = 0.0
    total: float = 0.0
    length: int = 0
    alternatives: Alternatives | None = None
    text: TextStream | None = None

    @property
    def stopped(self) -> bool:
        """Whether its text holds a stop string."""
        return self.text is not None and self.text.stopped

    def path(self) -> list[Node]:
        """The nodes from the first token to this one."""
        found, node = [], self
        while node.parent is not None:
            found.append(node)
            node = node.parent
        return found[::-1]

    def written(self, finish: Finish, score: float | None = None) -> Written:
        """The sequence that ends here."""
        path = self.path()
        return Written(
            tokens=[node.token for node in path],
            log_probs=[node.log_prob for node in path],
            drawn_log_probs=[node.drawn_log_prob for node in path],
            alternatives=[node.alternatives for node in path if node.alternatives is not None],
            finish=finish,
            score=score,
        )


class Candidates(NamedTuple):
    """Tokens that each hypothesis may go on with, in columns; `-inf` is excluded. Fields as those of `Node`."""

    tokens: Int[np.ndarray, "n k"]
    log_probs: Float[np.ndarray, "n k"]
    drawn_log_probs: Float[np.ndarray, "n k"]
    alternatives: Sequence[Alternatives | None]

    def after(self, parent: Node, row: int, column: int) -> Node:
        """One of them in its place in the tree."""
        drawn = float(self.drawn_log_probs[row, column])
        return Node(
            parent,
            int(self.tokens[row, column]),
            float(self.log_probs[row, column]),
            drawn,
            parent.total + drawn,
            parent.length + 1,
            self.alternatives[row],
        )


class Normalised(NamedTuple):
    """Scores and what makes log-probabilities of them, exact whatever constant the scores have in common.

    Args:
        scores: Float32 or wider.
        peak: The largest of each row, but finite.
        log_sum: `log sum exp(scores - peak)`.
    """

    scores: Float[Tensor, "n V"]
    peak: Float[Tensor, "n 1"]
    log_sum: Float[Tensor, "n 1"]

    @classmethod
    def of(cls, scores: Float[Tensor, "n V"], k: int = 1) -> tuple[Normalised, Int[np.ndarray, "n k"]]:
        """With the ids of the k largest of each row, in order.

        Raises:
            ValueError: If scores are NaN or +inf.
        """
        if _compiled.can_list(scores, k) and (found := _compiled.best(scores, k, sums=True)) is not None:
            return cls(scores, *map(torch.from_numpy, (found.values[:, :1], found.log_sums[:, None]))), found.ids
        best = largest(scores, k)
        return cls._summed(scores, best.values[:, :1]), best.indices.numpy(force=True)

    @classmethod
    def _summed(cls, scores: Float[Tensor, "n V"], peak: Float[Tensor, "n 1"]) -> Normalised:
        """By PyTorch."""
        known = peak.flatten().tolist()
        if not all(one < math.inf for one in known):  # NaN is not smaller either
            check_finite(peak)
        if -math.inf in known:
            peak = peak.clamp(min=torch.finfo(peak.dtype).min)
        # Some rows at a time: memory for all of them would take longer to get than the sums.
        rows = max(1, _PIECE // scores.shape[-1]) if scores.device.type == "cpu" else len(scores)
        pieces = [slice(first, first + rows) for first in range(0, len(scores), rows)]
        sums = [(scores[one] - peak[one]).exp_().sum(-1, keepdim=True) for one in pieces]
        # The largest adds 1 to its sum, so the logarithm is 0 or more; where nothing is allowed it is made 0.
        return cls(scores, peak, torch.cat(sums).log_().clamp_(min=0.0))

    def log_probs(self, ids: Int[np.ndarray, "n k"]) -> Float[np.ndarray, "n k"]:
        """Of some tokens in float64; `-inf` where nothing is allowed, and never above 0 by rounding."""
        if _compiled.can_draw(self.scores):
            return _compiled.log_probs(self.scores, ids, self.peak, self.log_sum)
        if self.scores.is_cpu:
            own = self.scores.detach().numpy()[np.arange(len(ids))[:, None], ids]
        else:
            own = self.scores.gather(1, torch.from_numpy(ids).to(self.scores.device)).numpy(force=True)
        below = (own - self.peak.numpy(force=True)).astype(np.float64)
        return np.minimum(below - self.log_sum.numpy(force=True), 0.0)


@dataclass(frozen=True)
class Offers:
    """What the running hypotheses can go on with.

    Args:
        plain: Scores as the model gave them.
        allowed: The same after filters and mask.
        best: Of each hypothesis the tokens of the largest allowed scores, in order; as many as were asked for.
        alternatives: Of each hypothesis, where they are asked for.
    """

    plain: Normalised
    allowed: Normalised
    best: Int[np.ndarray, "n k"]
    alternatives: Sequence[Alternatives | None]

    @property
    def classes(self) -> int:
        """V."""
        return self.allowed.scores.shape[-1]

    def wider(self, k: int) -> Offers:
        """The same with the k best tokens of each."""
        return replace(self, best=largest(self.allowed.scores, min(k, self.classes)).indices.numpy(force=True))

    def candidates(self, ids: Int[np.ndarray, "n k"]) -> Candidates:
        """Some tokens of each hypothesis, in their order."""
        drawn = self.allowed.log_probs(ids)
        plain = drawn if self.plain is self.allowed else self.plain.log_probs(ids)
        return Candidates(ids, plain, drawn, self.alternatives)


class Frontier:
    """The running hypotheses of all prompts, those of one prompt side by side, and the scores after each.

    Args:
        scorer: Reads the prompts here.
        plan: The request.
    """

    def __init__(self, scorer: Scorer, plan: Plan) -> None:
        self._scorer, self._plan = scorer, plan
        self._rows = torch.arange(len(plan.prompts), device=plan.prompts.device)
        self._written = plan.prompts[:, :0]
        self._scores = scorer.start(plan.prompts, plan.prompts >= 0)

    def offers(self, k: int = 1) -> Offers:
        """What each can go on with, and its k best tokens (all where there are fewer).

        Raises:
            ValueError: If scores are NaN or +inf.
        """
        scores = allowed = self._scores.to(widened(self._scores.dtype))
        if self._plan.ruled:
            allowed = self._plan.allowed(scores, self._plan.history(self._rows, self._written))
        own, ids = Normalised.of(allowed, min(k, allowed.shape[-1]))
        plain = Normalised.of(scores)[0] if self._plan.ruled else own
        return Offers(plain, own, ids, self._plan.others(scores))

    def advance(self, parents: Sequence[int] | np.ndarray, tokens: Sequence[int] | np.ndarray) -> None:
        """Go on with some of them, named by their place, each by a token; one may go on in several ways."""
        both = torch.from_numpy(np.array([parents, tokens], dtype=np.int64)).to(self._rows.device)
        chosen, more = both[0], both[1, :, None]
        self._scorer.select(chosen)
        if self._plan.ruled:
            self._rows = self._rows[chosen]
            self._written = torch.cat([self._written[chosen], more], 1)
        self._scores = self._scorer.extend(more)[:, -1]
