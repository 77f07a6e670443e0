"""The state of a beam search: the running hypotheses of all prompts as arrays, a step for all of them at once.

Hypotheses of one prompt lie side by side, the best first, and all have the same length. Shapes: n running hypotheses, E
ends, K further tokens that were looked up of each, m of them that are chosen.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Int

from unembed.decoding import _compiled
from unembed.decoding._endings import Endings
from unembed.decoding._generation import Finish
from unembed.decoding._hypotheses import Alternatives, Candidates
from unembed.decoding._plan import Plan
from unembed.decoding._strategy import Written
from unembed.decoding._text import TextStream


class Step(NamedTuple):
    """What the hypotheses can go on with; nothing is decided yet.

    Args:
        found: Candidates.
        cost: Of candidates: the sum of log-probabilities, negative; infinite is excluded.
        ends: The first so many columns of them are the ends, the others the best of all.
        alive: Whether each hypothesis has a candidate.
        rows: Of each prompt the best that are no end, up to the last one that can go on: what they come after.
        columns: Where they are among the candidates.
        stopped: Whether they hold a stop string.
        texts: Of each, where stop strings are looked for.
        short: Whether better ones may not have been looked up, as stop strings took places.
    """

    found: Candidates
    cost: Float[np.ndarray, "n E+K"]
    ends: int
    alive: bool
    rows: Int[np.ndarray, " m"]
    columns: Int[np.ndarray, " m"]
    stopped: Bool[np.ndarray, " m"]
    texts: list[TextStream | None]
    short: bool

    @property
    def last(self) -> Float[np.ndarray, "n E"]:
        """Costs of the ends."""
        return self.cost[:, : self.ends]

    @property
    def further(self) -> Float[np.ndarray, "n K"]:
        """Costs of the others."""
        return self.cost[:, self.ends :]


class Going(NamedTuple):
    """The hypotheses that go on: what each comes after, and its token."""

    rows: Int[np.ndarray, " m"]
    tokens: Int[np.ndarray, " m"]


class _Token(NamedTuple):
    """A token, and the hypothesis that it comes after, among those of the length before."""

    row: int
    token: int
    log_prob: float
    drawn_log_prob: float
    alternatives: Alternatives | None


class _Level(NamedTuple):
    """The running hypotheses of one length: of each its last token, in the form of `_Token`."""

    rows: Int[np.ndarray, " n"]
    tokens: Int[np.ndarray, " n"]
    log_probs: Float[np.ndarray, " n"]
    drawn_log_probs: Float[np.ndarray, " n"]
    alternatives: Sequence[Alternatives | None]

    def at(self, place: int) -> _Token:
        """One of them."""
        return _Token(
            int(self.rows[place]),
            int(self.tokens[place]),
            float(self.log_probs[place]),
            float(self.drawn_log_probs[place]),
            self.alternatives[place],
        )


class _Kept(NamedTuple):
    """A sequence to return: its score, why it ended, how many tokens come before its last one, and that."""

    score: float
    finish: Finish
    before: int
    last: _Token


@dataclass(eq=False)
class BeamSearch:
    """The searches of all prompts; options as those of `Beam`."""

    plan: Plan
    endings: Endings
    width: int
    length_penalty: float
    early_stopping: bool
    returns: int
    owner: Int[np.ndarray, " n"] = field(init=False)  # the prompt of each hypothesis
    total: Float[np.ndarray, " n"] = field(init=False)  # its sum of log-probabilities
    levels: list[_Level] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        prompts = len(self.plan.prompts)
        self.owner, self.total = np.arange(prompts), np.zeros(prompts)
        self._texts: list[TextStream | None] = [None] * prompts
        self._kept: list[list[_Kept]] = [[] for _ in range(prompts)]
        self._dead: list[list[_Kept]] = [[] for _ in range(prompts)]
        self._worst = np.full(prompts, -math.inf)  # score of the last one to return, where there are as many
        self._ended = np.zeros(prompts, dtype=np.int64)  # ends that were among the best candidates of their step
        self._limits = self.plan.max_new_tokens.numpy(force=True)
        if self.length_penalty > 0:
            self._limit_factors = np.array([self._factor(limit) for limit in self._limits.tolist()])

    def step(self, found: Candidates, ends: int) -> Step:
        """What is next.

        Args:
            found: Candidates of all hypotheses.
            ends: The first so many columns are the ends, the others the best of all.
        """
        fast = _compiled.kernels() is not None
        cost, alive = (_compiled.costs if fast else _costs)(self.total, found.drawn_log_probs, found.tokens, ends)
        if self.plan.stop:
            return self._read(found, cost, ends, alive)
        rows, columns = (_compiled.ranked if fast else _ranked)(cost, ends, self.owner, self.width)
        return Step(found, cost, ends, alive, rows, columns, np.zeros(rows.size, dtype=bool), [], False)

    def advance(self, step: Step) -> Going:
        """Go one token on; the hypotheses that go on then."""
        length, rows, columns = len(self.levels) + 1, step.rows, step.columns
        self._end(step, length)
        if self.early_stopping:
            self._count(step)
        found, owner = step.found, self.owner[rows]
        total = self.total[rows] + found.drawn_log_probs[rows, columns]
        ended = step.stopped | (self._limits[owner] == length)
        for i in np.flatnonzero(ended).tolist():
            last = _token(found, int(rows[i]), int(columns[i]))
            self._keep(int(owner[i]), float(total[i]), "stop" if step.stopped[i] else "length", last)
        going = np.flatnonzero(~ended)
        going = going[self._hopeful(owner[going], total[going], length)]
        rows, columns = rows[going], columns[going]
        own = _Level(
            rows,
            found.tokens[rows, columns],
            found.log_probs[rows, columns],
            found.drawn_log_probs[rows, columns],
            [found.alternatives[row] for row in rows.tolist()],
        )
        self.levels.append(own)
        self.owner, self.total, self._texts = owner[going], total[going], [step.texts[i] for i in going if step.texts]
        return Going(rows, own.tokens)

    def found(self) -> list[list[Written]]:
        """The sequences of each prompt to return, the best first; dead ends where there is nothing else."""
        both = zip(self._kept, self._dead, strict=True)
        return [[self._written(one) for one in (kept or dead)] for kept, dead in both]

    def _read(self, found: Candidates, cost: np.ndarray, ends: int, alive: bool) -> Step:
        """A step whose candidates are read one by one until `width` of them hold no stop string."""
        further, chosen, texts, short = cost[:, ends:], [], [], False
        order = _in_order(further, self.owner)
        for prompt in np.unique(self.owner).tolist():
            own, going, fresh = order[self.owner[order // further.shape[1]] == prompt].tolist(), 0, len(chosen)
            for place in own:
                row, column = divmod(place, further.shape[1])
                token = int(found.tokens[row, ends + column])
                texts.append(self.endings.after(prompt, self._texts[row], token))
                chosen.append(place)
                going += not texts[-1].stopped
                if going == self.width:
                    break
            if going < len(chosen) - fresh:
                # Where all that was looked up came before the last one, what was not could do so too.
                before = len(chosen) - (going == self.width)
                left = np.isfinite(further).sum(1)
                np.subtract.at(left, np.array(chosen[fresh:before], dtype=np.int64) // further.shape[1], 1)
                more = found.drawn_log_probs[:, -1] > -math.inf
                short |= bool((more & (left == 0) & (self.owner == prompt)).any())
        rows, columns = np.divmod(np.array(chosen, dtype=np.int64), further.shape[1])
        stopped = np.array([one.stopped for one in texts], dtype=bool)
        return Step(found, cost, ends, alive, rows, columns + ends, stopped, texts, short)

    def _end(self, step: Step, length: int) -> None:
        """Keep the ends that are among the best sequences, and what nothing is allowed after."""
        above = _ends_above if _compiled.kernels() is None else _compiled.ends_above
        factor = self._factor(length)
        rows, columns = above(step.cost, step.ends, factor, self._worst, self.owner)
        totals, prompts = -step.cost[rows, columns], self.owner[rows]
        for place, (prompt, total) in enumerate(zip(prompts.tolist(), totals.tolist(), strict=True)):
            if total * factor > self._worst[prompt]:  # no better one has come before
                self._keep(prompt, total, "eos", _token(step.found, int(rows[place]), int(columns[place])))
        if step.alive:
            return
        for row in np.flatnonzero(step.cost.min(1) == math.inf).tolist():
            score = float(self.total[row]) * self._factor(max(length - 1, 1))
            dead = self._dead[int(self.owner[row])]
            dead.append(_Kept(score, "dead end", length - 1, _token(step.found, row, 0)))
            dead.sort(key=lambda one: -one.score)
            del dead[self.returns :]

    def _count(self, step: Step) -> None:
        """Count the ends among the best candidates of a step."""
        for prompt in np.unique(self.owner).tolist():
            own = self.owner == prompt
            both = np.sort(step.cost[own].ravel())
            last, most = step.last[own], both[min(self.width, both.size) - 1]
            self._ended[prompt] += ((last <= most) & (last < math.inf)).sum()

    def _hopeful(self, owner: np.ndarray, total: np.ndarray, length: int) -> Bool[np.ndarray, " m"]:
        """Whether the best hypothesis of a prompt can come before its worst kept sequence, and too few have ended."""
        best = total[owner.searchsorted(owner)]
        factor = self._limit_factors[owner] if self.length_penalty > 0 else self._factor(length + 1)
        hope = best * factor > self._worst[owner]
        return hope & (self._ended[owner] < self.width) if self.early_stopping else hope

    def _keep(self, prompt: int, total: float, finish: Finish, last: _Token) -> None:
        """Take a sequence among the best ones, if it is one; of equal ones the first found stays in front."""
        before, kept = len(self.levels), self._kept[prompt]
        score = total * self._factor(before + 1)
        if score > self._worst[prompt]:
            kept.append(_Kept(score, finish, before, last))
            kept.sort(key=lambda one: -one.score)
            del kept[self.returns :]
            if len(kept) == self.returns:
                self._worst[prompt] = kept[-1].score

    def _factor(self, length: int) -> float:
        """`1 / length^lp`."""
        return math.exp(-self.length_penalty * math.log(length))

    def _written(self, kept: _Kept) -> Written:
        """The sequence that ends there."""
        path, row = [] if kept.finish == "dead end" else [kept.last], kept.last.row
        for level in self.levels[: kept.before][::-1]:
            path.append(level.at(row))
            row = path[-1].row
        path.reverse()
        return Written(
            tokens=[one.token for one in path],
            log_probs=[one.log_prob for one in path],
            drawn_log_probs=[one.drawn_log_prob for one in path],
            alternatives=[one.alternatives for one in path if one.alternatives is not None],
            finish=kept.finish,
            score=kept.score,
        )


def _costs(
    total: np.ndarray, drawn: np.ndarray, tokens: np.ndarray, ends: int
) -> tuple[Float[np.ndarray, "n c"], bool]:
    """`_compiled.costs` without numba."""
    cost = -(total[:, None] + drawn)
    cost[:, ends:][(tokens[:, ends:, None] == tokens[:, None, :ends]).any(-1)] = math.inf
    return cost, bool(cost.min(1).max() < math.inf)


def _ends_above(
    cost: np.ndarray, ends: int, factor: float, worst: np.ndarray, owner: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """`_compiled.ends_above` without numba."""
    scores = -cost[:, :ends] * factor
    rows, columns = (scores > worst[owner][:, None]).nonzero()
    order = (-scores[rows, columns]).argsort(kind="stable")
    return rows[order], columns[order]


def _ranked(cost: np.ndarray, ends: int, owner: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
    """`_compiled.ranked` without numba."""
    further = cost[:, ends:]
    order = _in_order(further, owner)
    owners = owner[order // further.shape[1]]
    order = order[np.arange(order.size) - owners.searchsorted(owners) < width]
    return order // further.shape[1], order % further.shape[1] + ends


def _in_order(cost: np.ndarray, owner: np.ndarray) -> Int[np.ndarray, " m"]:
    """Flat places of finite costs, owner by owner, the least first, equal ones as they come."""
    flat = cost.ravel()
    order = np.lexsort((flat, np.repeat(owner, cost.shape[1])))  # stable
    return order[flat[order] < math.inf]


def _token(found: Candidates, row: int, column: int) -> _Token:
    """One of the candidates."""
    return _Token(
        row,
        int(found.tokens[row, column]),
        float(found.log_probs[row, column]),
        float(found.drawn_log_probs[row, column]),
        found.alternatives[row],
    )
