"""One token at a time: the loop of every strategy with one sequence a prompt, greedy choice, and sampling.

Shapes: n running rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.decoding._generation import Generation
from unembed.decoding._largest import largest
from unembed.decoding._plan import Plan
from unembed.decoding._sample import sample
from unembed.decoding._scorer import Scorer
from unembed.decoding._strategy import Strategy
from unembed.decoding._writer import Writer
from unembed.ops import widened


@dataclass(frozen=True)
class Choice:
    """A token for each running row.

    Args:
        tokens: Ids; -1 where nothing is allowed.
        drawn_log_probs: Under the distribution that the strategy chose from; None where that is the model's own.
    """

    tokens: Int[Tensor, " n"]
    drawn_log_probs: Float[Tensor, " n"] | None


# Maps allowed scores, the row of the request that each belongs to, and the number of tokens written.
Choose = Callable[[Float[Tensor, "n V"], Int[Tensor, " n"], int], Choice]


@dataclass(frozen=True)
class Greedy(Strategy):
    """The most probable token at each step, the first of equal ones."""

    def run(self, scorer: Scorer, plan: Plan) -> Generation:
        """Write until each row ends."""
        return stepwise(scorer, plan, lambda allowed, rows, written: _largest_of(allowed, own=not plan.ruled))


@dataclass(frozen=True)
class Sample(Strategy):
    """A draw at each step, as `sample` makes it. With seeds, that of a row depends on its seed, place and scores alone.

    Args:
        joint: Whether the mass of top-p is that of the whole distribution, whatever top-k.
    """

    fused: ClassVar[bool] = True
    joint: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.joint, bool):
            raise ValueError(f"`joint` must be True or False, got {self.joint!r:.80}.")

    def run(self, scorer: Scorer, plan: Plan) -> Generation:
        """Write until each row ends."""

        def drawn(allowed: Tensor, rows: Tensor, written: int) -> Choice:
            best = allowed.amax(-1)
            check_finite(best)
            alive = (best > -torch.inf).nonzero().squeeze(1)
            if len(alive) < len(rows):
                allowed = allowed[alive]
            drawing, seeds = plan.drawing.at(rows[alive]), plan.seeds
            found = sample(
                allowed,
                **drawing.options(),
                joint=self.joint,
                seeds=None if seeds is None else seeds[rows[alive].cpu().numpy()],
                positions=None if seeds is None else np.full(len(alive), written),
                generator=plan.generator,
            )
            tokens = torch.full_like(rows, -1).index_copy(0, alive, found)
            if drawing.plain and not plan.ruled:
                return Choice(tokens, None)
            log_probs = drawing.log_prob(allowed, found, joint=self.joint)
            return Choice(tokens, torch.zeros_like(best).index_copy(0, alive, log_probs))

        return stepwise(scorer, plan, drawn)


def stepwise(scorer: Scorer, plan: Plan, choose: Choose) -> Generation:
    """Let a rule choose a token of each row until all have ended.

    Rows that have ended leave the scorer once they are a quarter of its rows: leaving copies its cache.
    """
    writer, written = Writer(plan), plan.prompts[:, :0]
    rows = places = torch.arange(len(plan.prompts), device=plan.prompts.device)  # of the request, and of the scorer
    size = len(rows)
    scores = scorer.start(plan.prompts, plan.prompts >= 0)
    while True:
        scores = scores.to(widened(scores.dtype))
        history = plan.history(rows, written) if plan.ruled else None
        choice = choose(plan.allowed(scores, history), rows, written.shape[1])
        going = put(writer, plan, scores, rows, choice)
        if not going:
            return writer.generation()
        keep = torch.tensor(going, device=rows.device)
        tokens = choice.tokens[keep]
        rows, places = rows[keep], places[keep]
        written = torch.cat([written[keep], tokens[:, None]], 1)
        if 4 * (size - len(places)) >= size:
            scorer.select(places)
            size = len(places)
            places = torch.arange(size, device=places.device)
        fed = tokens.new_zeros(size).index_copy(0, places, tokens)
        scores = scorer.extend(fed[:, None])[:, -1]
        if len(places) < size:
            scores = scores[places]


def _largest_of(allowed: Float[Tensor, "n V"], *, own: bool) -> Choice:
    """The first of the largest scores of each row; whether these are the model's own."""
    found = largest(allowed, 1)  # a tenth of the time of PyTorch's `max` with indices
    best = found.values.squeeze(-1)
    check_finite(best)
    tokens = found.indices.squeeze(-1).masked_fill(best == -torch.inf, -1)
    return Choice(tokens, None if own else best - allowed.logsumexp(-1))


def put(writer: Writer, plan: Plan, scores: Float[Tensor, "n V"], rows: Int[Tensor, " n"], choice: Choice) -> list[int]:
    """Write a choice; the places of the rows that go on."""
    lse = scores.logsumexp(-1)
    told = (scores.gather(-1, choice.tokens.clamp(min=0)[:, None]).squeeze(-1) - lse).tolist()
    drawn = told if choice.drawn_log_probs is None else choice.drawn_log_probs.tolist()
    tokens, others, going = choice.tokens.tolist(), plan.others(scores, lse), []
    for place, row in enumerate(rows.tolist()):
        if tokens[place] < 0:
            writer.dead_end(row)
        elif writer.put(row, tokens[place], told[place], drawn[place], others[place]):
            going.append(place)
    return going


def check_finite(best: Float[Tensor, " n"]) -> None:
    """Refuse rows whose largest score is NaN or +inf.

    Raises:
        ValueError: With the score.
    """
    odd = best.isnan() | (best == torch.inf)
    if bool(odd.any()):
        raise ValueError(f"The model's scores hold {float(best[odd][0])}: expected finite scores or -inf.")
