"""Negative log-likelihood along the path of each target in a binary tree.

Only the (token, node) pairs on paths are computed, from flat lists: paths are ragged.

Shapes: n tokens, D hidden size, V vocabulary, I = V - 1 inner nodes, L depth of the tree, P pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.ops._linear_nll import chunk_rows
from unembed.ops._rows import Pullback, Rows, Tensors, Wanted, evaluate
from unembed.ops._scores import widened

_PAIRED = 1 << 20  # numbers gathered at once: 4 MiB in float32


class Level(NamedTuple):
    """One level of a canonical tree: its leaves come first, then its inner nodes."""

    node: int  # number of its first inner node
    inner: int
    leaves: int


def paths(
    levels: Sequence[Level], depths: Int[Tensor, " n"], places: Int[Tensor, " n"]
) -> tuple[Int[Tensor, "n L"], Int[Tensor, "n L"]]:
    """Nodes from the root to each leaf, and the branch taken: 1 or -1, and 0 beyond the leaf.

    Args:
        levels: Of the tree.
        depths: Of the leaves.
        places: Of the leaves, on their levels.
    """
    nodes, signs = [], []
    for depth in range(len(levels) - 1, 0, -1):
        above, on = levels[depth - 1], depths >= depth
        parent = places >> 1  # a division of integers costs as much as all the rest here
        nodes.append(torch.where(on, above.node + parent, 0))
        signs.append(torch.where(on, 1 - 2 * (places & 1), 0))
        places = torch.where(on, above.leaves + parent, places)
    if not nodes:
        return depths.new_zeros(len(depths), 0), depths.new_zeros(len(depths), 0)
    return torch.stack(nodes[::-1], dim=1), torch.stack(signs[::-1], dim=1)


def tree_nll(
    hidden: Float[Tensor, "n D"],
    weight: Float[Tensor, "I D"],
    targets: Int[Tensor, " n"],
    *,
    levels: tuple[Level, ...],
    depths: Int[Tensor, " V"],
    places: Int[Tensor, " V"],
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Float[Tensor, " n"]:
    r"""$-\sum_{j \in \mathrm{path}(t)} \log\sigma(\pm\, n_j \cdot h)$ in nats, float32 or wider; never negative.

    Gradients are exact, of any order.

    Args:
        hidden: Hidden states.
        weight: Vectors of the inner nodes.
        targets: Next tokens, checked by the caller.
        levels: Of the tree.
        depths: Of all leaves.
        places: Of all leaves, on their levels.
        ignore_index: Target of tokens that do not count: their loss is 0.
        chunk: Tokens whose paths are alive at once.
    """
    alive = max(1, (len(levels) - 1) * hidden.shape[1])
    function = TreeTerms(levels, chunk_rows(alive, hidden.device, chunk), ignore_index)
    (nll,), _ = evaluate(function, (hidden, targets), (weight, depths, places))
    return nll


class TreeTerms(Rows):
    """`nll` of each token; tokens `(hidden, targets)`, shared `(weight, depths, places)`."""

    def __init__(self, levels: tuple[Level, ...], chunk: int, ignore_index: int) -> None:
        super().__init__(chunk, 1, 0)
        self.levels, self.ignore_index = levels, ignore_index

    def paths(self, targets: Tensor, shared: Tensors) -> tuple[Tensor, Tensor]:
        """Nodes and signs, none for an ignored token."""
        counts = targets != self.ignore_index
        safe = torch.where(counts, targets, 0)
        depths = torch.where(counts, shared[1].index_select(0, safe), 0)
        return paths(self.levels, depths, shared[2].index_select(0, safe))

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The definition, with all paths as long as the longest."""
        hidden, targets = tokens
        nodes, signs = self.paths(targets, shared)
        wide = _wide(hidden, shared[0])
        if nodes.shape[1] == 0:  # one token: probability one
            return (hidden[:, :0].to(wide).sum(1),), ()
        rows = shared[0].index_select(0, nodes.flatten()).view(*nodes.shape, -1).to(wide)
        scores = (rows @ hidden.to(wide)[:, :, None]).squeeze(2) * signs.to(wide)
        return (torch.where(signs == 0, 0.0, -torch.nn.functional.logsigmoid(scores)).sum(1),), ()

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """From the pairs alone; keeps the slope of each."""
        hidden, targets = tokens
        nodes, signs = self.paths(targets, shared)
        wide = _wide(hidden, shared[0])
        scores = pair_scores(hidden, shared[0], nodes, signs, wide).mul_(signs)
        loss = torch.where(signs == 0, 0.0, -torch.nn.functional.logsigmoid(scores))
        slopes = torch.sigmoid(-scores).mul_(-signs)
        return (loss.sum(1),), (), (slopes,)

    def pullback(self, wanted: Wanted, outputs: Tensors, kept: Tensors) -> tuple[Rows, Tensors, Tensors]:
        """By hand."""
        return _TreeGradients(self, wanted), kept, ()


class _TreeGradients(Pullback):
    """Gradients of `TreeTerms`: sums of node vectors over a token's pairs, and of hidden states over a node's."""

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """Takes the slopes beside its inputs."""
        assert isinstance(self.function, TreeTerms)
        hidden, targets, upstream, slopes = tokens
        weight = shared[0]
        nodes, signs = self.function.paths(targets, shared)
        wide = slopes.dtype
        pairs = (signs != 0).nonzero()
        owner, node = pairs[:, 0], nodes[pairs[:, 0], pairs[:, 1]]
        factor = (slopes * upstream.to(wide)[:, None])[pairs[:, 0], pairs[:, 1]]
        ordered, order = node.sort()
        touched, local = torch.unique_consecutive(ordered, return_inverse=True)
        of_tokens, of_shared = [], []
        if self.wanted[0][0]:
            rows = weight.index_select(0, touched).to(wide)
            of_tokens.append(
                _bags(rows, torch.empty_like(local).scatter_(0, order, local), owner, factor, len(hidden)).to(
                    hidden.dtype
                )
            )
        if self.wanted[1][0]:
            rows = _bags(hidden.to(wide), owner[order], local, factor[order], len(touched))
            of_shared.append(torch.zeros_like(weight).index_copy_(0, touched, rows.to(weight.dtype)))
        return tuple(of_tokens), tuple(of_shared), ()


def pair_scores(hidden: Tensor, weight: Tensor, nodes: Tensor, signs: Tensor, wide: torch.dtype) -> Tensor:
    """`h . n_j` where there is a sign, 0 elsewhere."""
    scores = hidden.new_zeros(nodes.shape, dtype=wide)
    pairs = (signs != 0).nonzero()
    flat = scores.new_empty(len(pairs))
    step = max(1, _PAIRED // hidden.shape[1])
    for start in range(0, len(pairs), step):
        owner, level = pairs[start : start + step].unbind(1)
        rows = weight.index_select(0, nodes[owner, level]).to(wide)
        flat[start : start + step] = rows.mul_(hidden.index_select(0, owner)).sum(1)
    scores[pairs[:, 0], pairs[:, 1]] = flat
    return scores


def _bags(rows: Tensor, index: Tensor, bag: Tensor, factor: Tensor, bags: int) -> Tensor:
    """`sum_p f_p rows[index_p]` over the pairs p of each bag; `bag` is sorted. Nothing of P x D is made."""
    if len(index) == 0:
        return rows.new_zeros(bags, rows.shape[1])
    offsets = torch.searchsorted(bag, torch.arange(bags, device=bag.device))
    return torch.nn.functional.embedding_bag(index, rows, offsets, mode="sum", per_sample_weights=factor)


def _wide(hidden: Tensor, weight: Tensor) -> torch.dtype:
    return widened(torch.promote_types(hidden.dtype, weight.dtype))
