"""Beam search: the sequences of the largest `log p / len^lp` that a limited number of hypotheses leads to."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from unembed.decoding._endings import Endings
from unembed.decoding._generation import Finish, Generation
from unembed.decoding._hypotheses import Candidates, Frontier, Node, Offers
from unembed.decoding._plan import Plan
from unembed.decoding._scorer import Scorer
from unembed.decoding._strategy import Strategy, Written, packed
from unembed.ops._whole import is_whole

_POWERS = 20.0  # a larger one would take the power of a length out of float64


@dataclass(frozen=True)
class Beam(Strategy):
    r"""Looks for the sequence of the largest $\log p / \mathrm{len}^{lp}$, `len` without the prompt and with its end.

    p is the probability after filters and mask. At each step the most probable `width` hypotheses go on. Each end with
    one of the `eos_ids` competes with all others by its score, however improbable it is; each with a stop string, if it
    is more probable than the last hypothesis that goes on. So with as many hypotheses as there are prefixes this is
    exhaustive search. No sequence comes twice, and fewer than asked for come where fewer exist. A mask that leaves a
    hypothesis nothing ends it; such dead ends are returned only where nothing     else was found.

    The search of a prompt ends when no hypothesis can come before the worst sequence that would be returned. The most
    that one of sum s and length t can become is $s / L^{lp}$ with the largest length L for a positive penalty (that is
    `early_stopping="never"` of transformers), $s / (t + 1)^{lp}$ else.

    Args:
        width: Hypotheses that go on at each step.
        length_penalty: lp; 0 compares sums, above 0 prefers longer sequences, below 0 shorter ones. Within 20 of 0.
        early_stopping: Whether to end already when `width` ends were among the best `width` candidates of their step,
            with the sequences found by then.
        returns: Sequences a prompt, at most `width`.
    """

    width: int = 4
    length_penalty: float = 1.0
    early_stopping: bool = False
    returns: int = 1

    def __post_init__(self) -> None:
        for name in ("width", "returns"):
            value = getattr(self, name)
            if not is_whole(value) or value < 1:
                raise ValueError(f"`{name}` must be a whole number of at least 1, got {value!r}.")
        if self.returns > self.width:
            raise ValueError(f"`returns` must be at most `width`, got {self.returns} of {self.width}.")
        if not isinstance(self.length_penalty, Real) or not -_POWERS <= self.length_penalty <= _POWERS:
            raise ValueError(f"`length_penalty` must lie in [-20, 20], got {self.length_penalty!r:.80}.")
        if not isinstance(self.early_stopping, bool):
            raise ValueError(f"`early_stopping` must be True or False, got {self.early_stopping!r}.")

    def run(self, scorer: Scorer, plan: Plan) -> Generation:
        """Search for all prompts at once; those whose search has ended cost nothing."""
        endings = Endings(plan)
        searches = [_Search(self, int(limit), row, endings) for row, limit in enumerate(plan.max_new_tokens)]
        frontier, ends = (
            Frontier(scorer, plan),
            torch.tensor(plan.eos_ids, dtype=torch.int64, device=plan.prompts.device),
        )
        while True:
            # The `width` that go on are, of each hypothesis, among the `width` best that are no end.
            offers = frontier.offers(self.width + len(ends))
            ends = ends[ends < offers.classes].to(offers.best.device)
            steps = _steps(searches, offers, ends)
            while any(one.short for one in steps) and offers.best.shape[1] < offers.classes:
                offers = offers.wider(2 * offers.best.shape[1])
                steps = _steps(searches, offers, ends)
            chosen = []
            for search, step in zip(searches, steps, strict=True):
                chosen += search.advance(step)
            if not chosen:
                break
            frontier.advance([one.row for one in chosen], [one.node.token for one in chosen])
        sequences = [search.found() for search in searches]
        endings.tell(sequences)
        return packed(sequences, plan)


class _Chosen(NamedTuple):
    """A hypothesis, and where the scorer has what it comes from."""

    row: int
    node: Node


class _Step(NamedTuple):
    """What the hypotheses of a prompt can go on with.

    Args:
        nodes: The best that are no end, up to the last one that can go on; those that hold a stop string among them.
        further: Costs of all that are no end and were looked up, in order.
        last: Costs of ends.
        ended: Those of them that may be among the best sequences.
        dead: Hypotheses after which nothing is allowed.
        short: Whether better ones than the last of `nodes` may not have been looked up, as stop strings took places.
    """

    nodes: list[_Chosen]
    further: np.ndarray
    last: np.ndarray
    ended: list[Node]
    dead: list[Node]
    short: bool


def _steps(searches: Sequence[_Search], offers: Offers, ends: Tensor) -> list[_Step]:
    """A step of each search, those that have ended included."""
    ids = torch.cat([ends.expand(len(offers.best), -1), offers.best], 1)
    found = offers.candidates(ids)
    totals = np.array([node.total for search in searches for node in search.running])
    cost = -(totals[:, None] + np.array(found.drawn_log_probs))
    cost[:, len(ends) :][(ids[:, len(ends) :, None] == ends).any(-1).numpy(force=True)] = math.inf
    first, steps = 0, []
    for search in searches:
        steps.append(search.step(first, found, cost[first : first + len(search.running)], len(ends)))
        first += len(search.running)
    return steps


@dataclass(eq=False)
class _Search:
    """The search of one prompt.

    Args:
        beam: Its options.
        limit: Tokens of a sequence at most.
        prompt: Which one.
        endings: Knows stop strings.
        running: Hypotheses that go on, the best first.
        kept: The best sequences so far, with their scores, the best first.
        dead: Hypotheses after which nothing was allowed.
        ended: Ends that were among the best candidates of their step.
    """

    beam: Beam
    limit: int
    prompt: int
    endings: Endings
    running: list[Node] = field(default_factory=lambda: [Node()])
    kept: list[tuple[float, Node, Finish]] = field(default_factory=list)
    dead: list[Node] = field(default_factory=list)
    ended: int = 0

    def step(self, first: int, found: Candidates, cost: np.ndarray, ends: int) -> _Step:
        """What is next; nothing is decided yet.

        Args:
            first: Row of the first hypothesis among the candidates.
            found: Candidates of all prompts.
            cost: Of the candidates of each hypothesis: the sum of log-probabilities, negative; infinite is excluded.
            ends: The first so many columns are the ends, the others the best of all.
        """
        last, further = cost[:, :ends], cost[:, ends:]
        order = further.argsort(axis=None, kind="stable")  # equal ones in the order of hypotheses, then of ids
        ranked = further.ravel()[order]
        allowed = int(ranked.searchsorted(math.inf))
        nodes, going = [], 0
        for place in order[:allowed].tolist():
            parent, column = divmod(place, further.shape[1])
            node = found.after(self.running[parent], first + parent, ends + column)
            nodes.append(_Chosen(first + parent, self.endings.read(self.prompt, node)))
            going += not nodes[-1].node.stopped
            if going == self.beam.width:
                break
        short = False
        if going < len(nodes):
            # Where all that was looked up came before the last one, what was not could do so too.
            before = len(nodes) - (going == self.beam.width)
            left = np.isfinite(further).sum(1) - np.bincount(order[:before] // further.shape[1], minlength=len(cost))
            rows = range(first, first + len(cost))
            short = any(not n and found.drawn_log_probs[i][-1] > -math.inf for i, n in zip(rows, left, strict=True))
        ended = [found.after(self.running[i], first + i, j) for i, j in np.argwhere(self._hoped(last)).tolist()]
        dead = [] if allowed == order.size else [self.running[i] for i in np.isinf(cost).all(1).nonzero()[0]]
        return _Step(nodes, ranked[:allowed], last, ended, dead, short)

    def advance(self, step: _Step) -> list[_Chosen]:
        """Go one token on; the hypotheses that go on then."""
        self.dead += step.dead
        for node in step.ended:
            self._keep(node, "eos")
        if self.beam.early_stopping:
            self._count(step.further, step.last)
        chosen = []
        for one in step.nodes:
            if one.node.stopped:
                self._keep(one.node, "stop")
            elif one.node.length == self.limit:
                self._keep(one.node, "length")
            else:
                chosen.append(one)
        if self._over(chosen):
            chosen = []
        self.running = [one.node for one in chosen]
        return chosen

    def found(self) -> list[Written]:
        """The sequences to return, the best first."""
        if not self.kept:
            for node in self.dead:
                self._keep(node, "dead end")
        return [node.written(finish, score) for score, node, finish in self.kept]

    def _hoped(self, cost: np.ndarray) -> np.ndarray:
        """Which of the sequences that end now may be among the best ones."""
        if len(self.kept) < self.beam.returns or not cost.size:
            return cost < math.inf
        return self._power(-cost, self.running[0].length + 1) > self.kept[-1][0]

    def _wanted(self, total: float, length: int) -> bool:
        """Whether a sequence is among the best ones."""
        return len(self.kept) < self.beam.returns or self._power(total, length) > self.kept[-1][0]

    def _keep(self, node: Node, finish: Finish) -> None:
        """Take a sequence among the best ones, if it is one; of equal ones the first found stays in front."""
        length = max(node.length, 1)
        if self._wanted(node.total, length):
            self.kept.append((self._power(node.total, length), node, finish))
            self.kept.sort(key=lambda one: -one[0])
            del self.kept[self.beam.returns :]

    def _over(self, chosen: list[_Chosen]) -> bool:
        """Whether none of these can come before the worst kept sequence, or enough have ended."""
        if self.beam.early_stopping and self.ended >= self.beam.width:
            return True
        if not chosen or len(self.kept) < self.beam.returns:
            return not chosen
        best = chosen[0].node
        last = self.limit if self.beam.length_penalty > 0 else best.length + 1
        return not self._wanted(best.total, last)

    def _power(self, total: Any, length: int) -> Any:
        """`total / length^lp`, of a number or an array."""
        return total * math.exp(-self.beam.length_penalty * math.log(length))

    def _count(self, further: np.ndarray, last: np.ndarray) -> None:
        """Count the ends among the best candidates of a step."""
        both = np.sort(np.concatenate([further, last.ravel()]))
        if both.size:
            most = both[min(self.beam.width, both.size) - 1]
            self.ended += int(((last <= most) & (last < math.inf)).sum())
