"""Beam search: the sequences of the largest `log p / len^lp` that a limited number of hypotheses leads to."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real

import numpy as np
from jaxtyping import Int

from unembed.decoding._beam_search import BeamSearch, Step
from unembed.decoding._endings import Endings
from unembed.decoding._generation import Generation
from unembed.decoding._hypotheses import Frontier, Offers
from unembed.decoding._plan import Plan
from unembed.decoding._scorer import Scorer
from unembed.decoding._strategy import Strategy, packed
from unembed.ops._whole import is_whole

_POWERS = 20.0  # a larger one would take the power of a length out of float64


@dataclass(frozen=True)
class Beam(Strategy):
    r"""Looks for the sequence of the largest $\log p / \mathrm{len}^{lp}$, `len` without the prompt and with its end.

    p is the probability after filters and mask. At each step the most probable `width` hypotheses go on. Each end with
    one of the `eos_ids` competes with all others by its score, however improbable it is; each with a stop string, if it
    is more probable than the last hypothesis that goes on. So with as many hypotheses as there are prefixes this is
    exhaustive search. No sequence comes twice, and fewer than asked for come where fewer exist. A mask that leaves a
    hypothesis nothing ends it; such dead ends are returned only where nothing else was found.

    The search of a prompt ends when no hypothesis can come before the worst sequence that would be returned. The most
    that one of sum s and length t can become is $s / L^{lp}$ with the largest length L for a positive penalty (that is
    `early_stopping="never"` of transformers), $s / (t + 1)^{lp}$ else.

    Args:
        width: Hypotheses that go on at each step.
        length_penalty: lp; 0 compares sums, above 0 prefers longer sequences, below 0 shorter ones. Within 20 of 0.
        early_stopping: Whether to end already when `width` ends by `eos_ids` were among the best `width` candidates of
            their step, with the sequences found by then.
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
        search = BeamSearch(
            plan,
            endings,
            width=self.width,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
            returns=self.returns,
        )
        frontier, ends = Frontier(scorer, plan), np.array(plan.eos_ids, dtype=np.int64)
        while True:
            # The `width` that go on are, of each hypothesis, among the `width` best that are no end.
            offers = frontier.offers(self.width + len(ends))
            ends = ends[ends < offers.classes]
            step = _step(search, offers, ends)
            while step.short and offers.best.shape[1] < offers.classes:
                offers = offers.wider(2 * offers.best.shape[1])
                step = _step(search, offers, ends)
            going = search.advance(step)
            if not going.rows.size:
                break
            frontier.advance(going.rows, going.tokens)
        found = search.found()
        endings.tell(found)
        return packed(found, plan)


def _step(search: BeamSearch, offers: Offers, ends: Int[np.ndarray, " E"]) -> Step:
    """What is next, of the ends and the best tokens of each hypothesis."""
    ids = np.concatenate([np.broadcast_to(ends, (len(offers.best), len(ends))), offers.best], axis=1)
    return search.step(offers.candidates(ids), len(ends))
