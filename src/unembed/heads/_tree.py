"""Binary trees over a vocabulary, each given by the depth of its leaves.

A tree is kept in canonical form: on each level the leaves come first, in the order of their tokens, then the inner
nodes; inner nodes are numbered level by level from the root, 0. So depths say everything, a path is arithmetic, and
training and decoding cannot walk different trees.

Shapes: n or * tokens, D hidden size, V vocabulary, I = V - 1 inner nodes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.ops import Noise
from unembed.ops._tree_nll import Level


def huffman_depths(counts: Sequence[float]) -> list[int]:
    r"""Lengths of a Huffman code: they minimise $\sum_v c_v d_v$ (Huffman, 1952, doi:10.1109/JRPROC.1952.273898).

    Args:
        counts: How often each token occurs; not negative. Ties favour the flatter tree.
    """
    total = len(counts)
    order = sorted(range(total), key=counts.__getitem__)
    weights = [counts[token] for token in order]
    parents = [0] * (2 * total - 1)
    leaf, inner = 0, total  # both queues are sorted, so the least of all is at one of their heads
    for new in range(total, 2 * total - 1):
        weight = 0.0
        for _ in range(2):
            if leaf < total and (inner >= new or weights[leaf] <= weights[inner]):
                least, leaf = leaf, leaf + 1
            else:
                least, inner = inner, inner + 1
            parents[least] = new
            weight += weights[least]
        weights.append(weight)
    above = [0] * (2 * total - 1)
    for vertex in range(2 * total - 3, -1, -1):
        above[vertex] = above[parents[vertex]] + 1
    depths = [0] * total
    for place, token in enumerate(order):
        depths[token] = above[place]
    return depths


def balanced_depths(total: int) -> list[int]:
    """Depths that differ by one at most; the first tokens have the shorter paths."""
    depth = total.bit_length() - 1
    short = 2 ** (depth + 1) - total
    return [depth] * short + [depth + 1] * (total - short)


def zipf_counts(total: int) -> list[float]:
    """Counts in proportion to one over the rank, with tokens numbered from frequent to rare."""
    return [1 / rank for rank in range(1, total + 1)]


@dataclass(frozen=True)
class Tree:
    """Levels, and for each token its rank in order of depth and its place among the leaves of its level.

    Args:
        levels: From the root on.
        depths: Length of the path of each token.
        ranks: Place in the order of depth, tokens of one depth by number.
        places: The same among tokens of one depth.
        order: Tokens in order of depth: `ranks` the other way round.
    """

    levels: tuple[Level, ...]
    depths: Int[Tensor, " V"]
    ranks: Int[Tensor, " V"]
    places: Int[Tensor, " V"]
    order: Int[Tensor, " V"]


def tree_of(depths: Int[Tensor, " V"]) -> Tree:
    """The canonical tree with leaves at these depths.

    Raises:
        ValueError: If no tree has exactly these leaves.
    """
    depths = depths.detach().cpu().long()
    if depths.min() < 0 or depths.max() >= len(depths):
        raise ValueError(f"Depths of leaves must lie in [0, {len(depths)}), got {depths.min()} to {depths.max()}.")
    leaves = torch.bincount(depths).tolist()
    levels, vertices, nodes = [], 1, 0
    for count in leaves:
        levels.append(Level(node=nodes, inner=vertices - count, leaves=count))
        nodes += vertices - count
        vertices = 2 * (vertices - count)
        if vertices < 0:
            break
    if vertices != 0:
        raise ValueError("No binary tree has leaves at exactly these depths.")
    before = torch.tensor([0, *itertools.accumulate(leaves)], device="cpu")
    ranks = torch.empty_like(depths)
    order = depths.argsort(stable=True)
    ranks[order] = torch.arange(len(depths), device="cpu")
    return Tree(tuple(levels), depths, ranks, ranks - before[depths], order)


def walked(scores: Float[Tensor, "*n I"], levels: Sequence[Level], ranks: Int[Tensor, " V"]) -> Float[Tensor, "*n V"]:
    """Log-probabilities of all tokens from the scores of all nodes: down the levels, each branch added once."""
    vertices = scores[..., :0].sum(-1, keepdim=True)  # the root has probability one, with a gradient of zero
    leaves = []
    for level in levels:
        leaves.append(vertices[..., : level.leaves])
        above, part = vertices[..., level.leaves :], scores[..., level.node : level.node + level.inner]
        sides = [above + torch.nn.functional.logsigmoid(sign) for sign in (part, -part)]
        vertices = torch.stack(sides, dim=-1).flatten(-2)
    return torch.cat(leaves, dim=-1).index_select(-1, ranks)


def descended(
    hidden: Float[Tensor, "n D"], weight: Float[Tensor, "I D"], levels: Sequence[Level], noise: Noise
) -> Int[Tensor, " n"]:
    """The rank of the leaf that each token reaches by one draw a node; the level is the step of the noise."""
    found = torch.empty(len(hidden), dtype=torch.int64, device=hidden.device)
    rows, place, before = torch.arange(len(hidden), device=hidden.device), torch.zeros_like(found), 0
    for depth, level in enumerate(levels):
        arrived = place < level.leaves
        found[rows[arrived]] = before + place[arrived]
        before += level.leaves
        rows, inner = rows[~arrived], place[~arrived] - level.leaves
        wide = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
        scores = (weight[level.node + inner].to(wide) * hidden[rows].to(wide)).sum(-1)
        if bool(scores.isnan().any()):
            raise ValueError("A score on the way down the tree is NaN: there is nothing to draw from.")
        # Logistic noise against the score: a uniform draw of exactly 0 or 1 would take an impossible branch.
        place = 2 * inner + (torch.logit(noise.at(rows)(depth), eps=1e-16) >= scores).long()
    return found


def expected_depth(tree: Tree) -> float:
    """Mean length of a path when each branch of a node is as likely: of a token drawn from an untrained head."""
    return math.fsum(level.leaves * depth * 2.0**-depth for depth, level in enumerate(tree.levels))
