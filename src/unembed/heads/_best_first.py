"""The k most probable tokens of a tree of choices, best first: no token is more probable than what is above it.

Both searches give up on a token that would have to look at too much: they say so, and the caller takes all scores.

Shapes: n tokens, D hidden size, I inner nodes, F open nodes, m nodes scored at once, C classes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unembed.ops import widened
from unembed.ops._tree_nll import Level, pair_scores

_AT_ONCE = 16  # nodes scored at once, at least: a step costs more than 16 products


class Found(NamedTuple):
    """The largest log-probabilities, where they are, and for which tokens this is the answer."""

    values: Float[Tensor, "n k"]
    places: Int[Tensor, "n k"]
    exact: Bool[Tensor, " n"]

    @classmethod
    def nothing(cls, tokens: int, k: int, like: Tensor) -> Found:
        """Before anything is found."""
        places = torch.zeros(tokens, k, dtype=torch.int64, device=like.device)
        return cls(like.new_full((tokens, k), -torch.inf), places, places.new_zeros(tokens, dtype=torch.bool))

    def put(self, rows: Int[Tensor, " r"], best: Found) -> None:
        """Write what was found for some tokens."""
        for own, new in zip(self, best, strict=True):
            own[rows] = new


def best_leaves(
    hidden: Float[Tensor, "n D"], weight: Float[Tensor, "I D"], levels: Sequence[Level], k: int, limit: int
) -> Found:
    """The k most probable leaves of a canonical tree by rank, best first.

    A step scores the m most probable open nodes of each token. What is no more probable than the k-th best leaf so far
    is closed for good; without an open node the search is done.

    Args:
        hidden: Hidden states.
        weight: Vectors of the inner nodes; at least one.
        levels: Of the tree.
        k: Leaves.
        limit: Nodes that may be scored for a token, give or take a step.
    """
    bounds = hidden.new_zeros(len(hidden), 1, dtype=widened(torch.promote_types(hidden.dtype, weight.dtype)))
    nodes = torch.zeros_like(bounds, dtype=torch.int64)
    answer = Found.nothing(len(hidden), k, bounds)
    best, places, scored = answer.values, answer.places, nodes[:, 0]
    rows = torch.arange(len(hidden), device=hidden.device)
    table, step = _Table.of(levels, hidden.device), max(k, _AT_ONCE)
    while len(rows):
        above, which = bounds.topk(min(step, bounds.shape[1]), 1)
        chosen, asked = nodes.gather(1, which), _open(above, best)
        scores = pair_scores(hidden[rows], weight, chosen, asked, bounds.dtype)
        sides = above[..., None] + torch.nn.functional.logsigmoid(torch.stack([scores, -scores], -1))
        sides = torch.where(asked[..., None], sides, -torch.inf).flatten(1)
        leaf, numbers = table.below(chosen)
        best, places = _merged(best, places, torch.where(leaf, sides, -torch.inf), numbers)
        bounds = torch.cat([bounds.scatter(1, which, -torch.inf), torch.where(leaf, -torch.inf, sides)], 1)
        nodes = torch.cat([nodes, torch.where(leaf, 0, numbers)], 1)
        done, scored = ~_open(bounds, best).any(1), scored + asked.sum(1)
        ends = done | (scored > limit)
        if bool(ends.any()):
            answer.put(rows[ends], Found(best[ends], places[ends], _whole(best[ends]) & done[ends]))
            on = (~ends).nonzero().squeeze(1)
            rows, best, places, scored = rows[on], best[on], places[on], scored[on]
            bounds, nodes = bounds[on], nodes[on]
    return answer


def best_of_classes(
    bounds: Float[Tensor, "n C"],
    within: Callable[[Int[Tensor, " r"], Int[Tensor, " r"]], Float[Tensor, "r s"]],
    k: int,
    limit: int,
) -> Found:
    """The k most probable tokens of classes of s consecutive tokens, from the most probable class on.

    Args:
        bounds: Log-probabilities of the classes.
        within: Log-probabilities inside one class each, of some of the n hidden states; `-inf` beyond the last token.
        k: Tokens.
        limit: Tokens that may be scored for a hidden state, give or take a class.
    """
    order, answer = bounds.sort(1, descending=True), Found.nothing(len(bounds), k, bounds)
    rows, scored = torch.arange(len(bounds), device=bounds.device), 0
    for visit in range(bounds.shape[1]):
        if not len(rows) or scored > limit:
            break
        number = order.indices[rows, visit]
        joint = order.values[rows, visit, None] + within(rows, number)
        size = joint.shape[1]
        ids = number[:, None] * size + torch.arange(size, device=joint.device)
        merged = Found(*_merged(answer.values[rows], answer.places[rows], joint, ids), answer.exact[rows])
        done = ~_open(order.values[rows, visit + 1 : visit + 2], merged.values).any(1)  # none after the last class
        answer.put(rows, merged._replace(exact=done & _whole(merged.values)))
        rows, scored = rows[~done], scored + size
    return answer


class _Table(NamedTuple):
    """Of each level of a tree: its first inner node, its leaves, and the leaves above it."""

    node: Int[Tensor, " L"]
    leaves: Int[Tensor, " L"]
    before: Int[Tensor, " L"]

    @classmethod
    def of(cls, levels: Sequence[Level], device: torch.device) -> _Table:
        """On a device."""
        node, leaves = (
            torch.tensor([getattr(level, name) for level in levels], device=device) for name in ("node", "leaves")
        )
        return cls(node, leaves, leaves.cumsum(0) - leaves)

    def below(self, nodes: Int[Tensor, "n m"]) -> tuple[Bool[Tensor, "n 2*m"], Int[Tensor, "n 2*m"]]:
        """Whether the children of inner nodes are leaves, and their numbers: ranks of leaves, or of inner nodes."""
        level = torch.searchsorted(self.node, nodes, right=True) - 1  # the last has no inner node
        places = 2 * (nodes - self.node[level])
        places, level = torch.stack([places, places + 1], -1).flatten(1), (level + 1).repeat_interleave(2, 1)
        leaves = self.leaves[level]
        leaf = places < leaves
        return leaf, places + torch.where(leaf, self.before[level], self.node[level] - leaves)


def _open(bounds: Float[Tensor, "n F"], best: Float[Tensor, "n k"]) -> Bool[Tensor, "n F"]:
    """Whether something better than the k-th best can be below; NaN is looked at, so that it comes out."""
    return ~(bounds <= best[:, -1:]) & (bounds != -torch.inf)


def _whole(best: Float[Tensor, "n k"]) -> Bool[Tensor, " n"]:
    """Whether there are k tokens with a probability; which of the others come last is left to the caller."""
    return best.isfinite().all(1)


def _merged(best: Tensor, places: Tensor, values: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    """The k best of what there was and what is new."""
    found = torch.cat([best, values], 1).topk(best.shape[1], 1)
    return found.values, torch.cat([places, ids], 1).gather(1, found.indices)
