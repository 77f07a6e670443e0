"""Stochastic beam search: several sequences of one prompt, drawn without replacement from the model's distribution.

Shapes: n running hypotheses, V vocabulary, k candidates of each.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from unembed.decoding._endings import Endings
from unembed.decoding._generation import Finish, Generation
from unembed.decoding._hypotheses import Candidates, Frontier, Node, Offers
from unembed.decoding._plan import Plan
from unembed.decoding._scorer import Scorer
from unembed.decoding._strategy import Strategy, Written, packed
from unembed.decoding._tree_noise import TreeNoise


@dataclass(frozen=True)
class StochasticBeam(Strategy):
    r"""Draws `width` different sequences, without replacement (Kool et al., 2019, arXiv:1903.06059).

    The distribution is that of sampling with the same filters and mask. Each sequence y has a perturbed log-probability
    $G_y = \log p(y) + g_y$ with standard Gumbel noise; the `width` largest are such a sample, in this order, so the
    first one is an exact draw. The search finds them from the top down: the largest G of the children of a hypothesis
    is its own, so what is not among the `width` largest on the way cannot be at the end.

    `extra["perturbed_log_probs"]` [B, R] has the G of each sequence, `-inf` where there are fewer sequences than
    `width`. With the smallest as a threshold $\kappa$, the others have the inclusion probabilities
    $1 - \exp(-\exp(\log p(y) - \kappa))$, from which importance weights are made.

    Args:
        width: Sequences a prompt.
    """

    width: int = 4

    def __post_init__(self) -> None:
        if not isinstance(self.width, int) or self.width < 1:
            raise ValueError(f"`width` must be a whole number of at least 1, got {self.width!r}.")

    def run(self, scorer: Scorer, plan: Plan) -> Generation:
        """Search for all prompts at once; those whose search has ended cost nothing."""
        endings, noise = Endings(plan), TreeNoise(plan)
        limits, roots = plan.max_new_tokens.tolist(), noise.roots().tolist()
        searches = [_Search(self.width, *each) for each in zip(limits, range(len(limits)), roots, strict=True)]
        frontier = Frontier(scorer, plan)
        while True:
            known = [one for search in searches for one in search.running]
            steps = _steps(frontier.offers(), noise, known, self.width)
            first, chosen = 0, []
            for search in searches:
                count = len(search.running)
                if count:
                    chosen += search.advance(first, steps, plan, endings)
                    first += count
            if not chosen:
                break
            parents, tokens = [one.row for one in chosen], [one.node.token for one in chosen]
            frontier.advance(parents, tokens)
            noise.advance(parents, tokens)
        found = [search.found() for search in searches]
        endings.tell(found)
        most = max(map(len, found))
        perturbed = torch.tensor([search.perturbed(most) for search in searches], dtype=torch.float64)
        return packed(found, plan, extra={"perturbed_log_probs": perturbed})


class _Steps(NamedTuple):
    """The children of each hypothesis that can be among the largest, with their G, the largest first."""

    found: Candidates
    perturbed: list[list[float]]


class _Perturbed(NamedTuple):
    """A hypothesis, or a whole sequence if it has an end, and its G."""

    perturbed: float
    node: Node
    finish: Finish | None = None


class _Chosen(NamedTuple):
    """A hypothesis that goes on, and where the scorer has what it comes from."""

    row: int
    node: Node


def _steps(offers: Offers, noise: TreeNoise, known: Sequence[_Perturbed], width: int) -> _Steps:
    """The `width` largest children of each hypothesis."""
    scores, peak, log_sum = offers.allowed
    place, classes = scores.device, scores.shape[-1]
    wide = torch.float32 if place.type == "mps" else torch.float64
    own = torch.tensor([one.perturbed for one in known], dtype=wide, device=place)
    total = torch.tensor([one.node.total for one in known], dtype=wide, device=place)
    log_p = (scores - peak).to(wide) + (total[:, None] - log_sum.to(wide))
    noisy = torch.where(log_p > -torch.inf, log_p + noise.children(classes).to(place, wide), -torch.inf)
    best = noisy.topk(min(width, classes), -1)
    return _Steps(offers.candidates(best.indices.numpy(force=True)), conditioned(best.values, own).tolist())


def conditioned(noisy: Float[Tensor, "n k"], largest: Float[Tensor, " n"]) -> Float[Tensor, "n k"]:
    r"""Gumbel variables of a row, in falling order, given what their maximum is.

    $-\log(e^{-T} - e^{-Z} + e^{-G})$ with Z the first, T what it must become: as $T - \max(0, v) - \log(1 + e^{-|v|})$
    with $v = T - G + \log(1 - e^{G - Z})$, which neither overflows nor cancels (Kool et al., 2019, appendix B.3).
    """
    peak = noisy[:, :1]
    below = torch.where(peak > -torch.inf, noisy - peak, 0.0).clamp(max=0.0)
    v = largest[:, None] - noisy + torch.log(-torch.expm1(below))
    found = largest[:, None] - v.clamp(min=0.0) - torch.log1p((-v.abs()).exp())
    return torch.where(noisy > -torch.inf, found, -torch.inf)


@dataclass(eq=False)
class _Search:
    """The search of one prompt.

    Args:
        width: Sequences to draw.
        limit: Tokens of a sequence at most.
        row: The prompt.
        root: G of the prompt.
        running: Hypotheses that go on, the largest G first.
        leaves: Whole sequences, the same.
    """

    width: int
    limit: int
    row: int
    root: float
    running: list[_Perturbed] = field(init=False)
    leaves: list[_Perturbed] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.running = [_Perturbed(self.root, Node())]

    def advance(self, first: int, steps: _Steps, plan: Plan, endings: Endings) -> list[_Chosen]:
        """Go one token on; the hypotheses that go on then.

        Args:
            first: Row of the first hypothesis among the steps.
            steps: Of all prompts.
            plan: Ends.
            endings: Knows stop strings.
        """
        pool: list[tuple[float, int, int, _Perturbed | None]] = [(-one.perturbed, 0, 0, one) for one in self.leaves]
        for row, parent in enumerate(self.running, first):
            children = [(-own, row, i, None) for i, own in enumerate(steps.perturbed[row]) if own > -math.inf]
            pool += children or [(-parent.perturbed, row, 0, parent._replace(finish="dead end"))]
        parents, chosen = self.running, []
        self.running, self.leaves = [], []
        for cost, row, column, leaf in sorted(pool, key=lambda one: one[0])[: self.width]:
            if leaf is not None:
                self.leaves.append(leaf)
                continue
            node = steps.found.after(parents[row - first].node, row, column)
            node, finish = self._read(node, plan, endings)
            if finish is not None:
                self.leaves.append(_Perturbed(-cost, node, finish))
            else:
                self.running.append(_Perturbed(-cost, node))
                chosen.append(_Chosen(row, node))
        return chosen

    def found(self) -> list[Written]:
        """The sequences in the order in which they were drawn."""
        return [one.node.written(one.finish) for one in self.leaves if one.finish is not None]

    def perturbed(self, count: int) -> list[float]:
        """G of each, and `-inf` for those that there are not."""
        return [*(one.perturbed for one in self.leaves), *[-torch.inf] * (count - len(self.leaves))]

    def _read(self, node: Node, plan: Plan, endings: Endings) -> tuple[Node, Finish | None]:
        """A sequence with its text, and why it ends with its last token; None if it goes on."""
        if node.token in plan.eos_ids:
            return node, "eos"
        node = endings.read(self.row, node)
        full: Finish | None = "length" if node.length >= self.limit else None
        return node, "stop" if node.stopped else full
