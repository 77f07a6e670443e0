"""Hierarchical softmax (Morin and Bengio, 2005; Mnih and Hinton, 2009): a token is a path of choices.

Shapes: n or * tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unembed import ops
from unembed.heads import _tree
from unembed.heads._base import Head, uniform_
from unembed.heads._best_first import best_leaves, best_of_classes
from unembed.heads._product import product
from unembed.ops import chunk_rows
from unembed.ops._tree_classes import block_nll
from unembed.ops._tree_nll import tree_nll

# Part of all scores that best-first search may take for one hidden state, about what costs as much as all of them do.
# Nodes are scored one by one; classes by one product each, against one that few tokens share the reading of W in.
_NODES, _CLASSES, _SHARED = 1 / 128, 1 / 12, 1 / 8


class HierarchicalSoftmax(Head):
    r"""A distribution from choices down a tree: of a branch at each inner node, or of a class and then a token.

    $$\log p(v) = \sum_{j \in \mathrm{path}(v)} \log\sigma(\pm\, n_j \cdot h) \qquad\text{or}\qquad
      p(v) = \mathrm{softmax}(C h)_{c(v)}\, \mathrm{softmax}_{c(v)}(W h)_v$$

    `weight` is [V - 1, D], the nodes, so no embedding can be tied to it; with `tree="classes"` it is [V, D] and can be.
    One tree serves the loss, the distribution and the draws. Its buffer `depths` [V] says which, and is saved.

    Args:
        in_features: D.
        out_features: V.
        tree: `huffman`, frequent tokens near the root; `balanced`, depths differ by one at most; `classes`, about
            sqrt(V) classes of consecutive tokens.
        counts: How often each token occurs, for `huffman`; when None in proportion to one over its number, as most
            tokenizers number tokens from frequent to rare.
        device: Where the parameters are.
        dtype: Of the parameters.
    """

    names = ("hierarchical", "huffman")
    normalised = True
    depths: Tensor
    ranks: Tensor
    places: Tensor
    order: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        tree: Literal["huffman", "balanced", "classes"] = "huffman",
        counts: Sequence[float] | Tensor | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        if tree not in ("huffman", "balanced", "classes"):
            raise ValueError(f"`tree` must be huffman, balanced or classes, got {tree!r}.")
        if counts is not None and tree != "huffman":
            raise ValueError(f"`counts` belong to tree='huffman', got tree={tree!r}.")
        self.tree = tree
        like = {"device": device, "dtype": dtype}
        self.class_size = math.isqrt(out_features - 1) + 1  # the root, rounded up
        classes = -(-out_features // self.class_size)
        rows = out_features if tree == "classes" else out_features - 1
        self.weight = nn.Parameter(torch.empty(rows, in_features, **like))
        self.class_weight = nn.Parameter(torch.empty(classes, in_features, **like)) if tree == "classes" else None
        if tree != "classes":
            given = None if counts is None else _checked(counts, out_features)
            depths = (
                _tree.balanced_depths(out_features)
                if tree == "balanced"
                else _tree.huffman_depths(given or _tree.zipf_counts(out_features))
            )
            self._plant(torch.tensor(depths, device="cpu"), device)
            self.register_load_state_dict_post_hook(_replant)
        self.reset_parameters()

    def options(self) -> dict[str, Any]:
        """The kind of tree; the tree itself is among the buffers."""
        return {"tree": self.tree}

    def reset_parameters(self) -> None:
        """Draw all as `nn.Linear` does; the tree stays, and is written anew where `to_empty` left nothing."""
        for parameter in self.parameters():
            uniform_(parameter, self.in_features)
        if self.tree != "classes":
            for name in ("depths", "ranks", "places", "order"):
                getattr(self, name).copy_(getattr(self._tree, name))

    @property
    def rank_bound(self) -> int | None:
        """None for a binary tree; D + classes in two levels, where a class takes off one number a token."""
        if self.class_weight is None:
            return None
        return min(self.in_features + len(self.class_weight), self.out_features)

    @property
    def alive(self) -> int:
        """Scores of all nodes, and log-probabilities on the way down."""
        return 2 * self.out_features

    def forward(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Log-probabilities, float32 or wider."""
        if self.class_weight is not None:
            within = self._log_softmax(hidden, self.weight, blocks=True)
            joint = within + self._log_softmax(hidden, self.class_weight)[..., None]
            return joint.flatten(-2)[..., : self.out_features]
        scores = ops.linear_scores(hidden, self.weight)
        return _tree.walked(scores.to(ops.widened(scores.dtype)), self._tree.levels, self.ranks)

    def terms(
        self,
        hidden: Float[Tensor, "*n D"],
        targets: Int[Tensor, "*n"],
        *,
        ignore_index: int = -100,
        spread: Float[Tensor, " V"] | None = None,
        chunk: int | None = None,
    ) -> tuple[Float[Tensor, "*n"], ...]:
        """From the paths of the targets; a sum over all classes needs all log-probabilities."""
        if spread is not None:
            return super().terms(hidden, targets, ignore_index=ignore_index, spread=spread, chunk=chunk)
        flat, targets, shape = self.flattened(hidden, targets)
        ops.check_targets(targets, self.out_features, ignore_index)
        options = {"ignore_index": ignore_index, "chunk": chunk}
        if self.class_weight is None:
            leaves = {"levels": self._tree.levels, "depths": self.depths, "places": self.places}
            nll = tree_nll(flat, self.weight, targets, **leaves, **options)
        else:
            of_class = torch.where(targets == ignore_index, -1, targets // self.class_size)
            nll = ops.linear_terms(flat, self.class_weight, of_class, ignore_index=-1, chunk=chunk)[0]
            nll = nll + block_nll(flat, self.weight, targets, self.class_size, **options)
        nll = nll.reshape(shape)
        return nll, torch.zeros_like(nll)

    @torch.no_grad()
    def topk(self, hidden: Float[Tensor, "*n D"], k: int) -> tuple[Float[Tensor, "*n k"], Int[Tensor, "*n k"]]:
        """The k largest log-probabilities and their tokens, exact; the scores are those that best-first search needs.

        No token is more probable than a node or a class above it. Where that leaves too many to look at, for many k or
        hidden states that are sure of nothing, all scores are taken.
        """
        self.check_k(k)
        flat, shape = hidden.reshape(-1, self.in_features), (*hidden.shape[:-1], k)
        part = _NODES if self.class_weight is None else _CLASSES + _SHARED / max(len(flat), 1)
        limit = int(self.out_features * part)
        if k * self.out_features.bit_length() > limit:
            return super().topk(hidden, k)
        found = [self._best(part, k, limit) for part in flat.split(chunk_rows(6 * limit, flat.device))]
        return torch.cat([one[0] for one in found]).reshape(shape), torch.cat([one[1] for one in found]).reshape(shape)

    @property
    def alive_drawn(self) -> int:
        """A node's vector, or the scores of the classes and then of one class."""
        return self.in_features if self.class_weight is None else 3 * self.class_size

    def draws(self, hidden: Float[Tensor, "n D"], noise: ops.Noise) -> Int[Tensor, " n"]:
        """One draw a choice, from the root down."""
        if self.class_weight is None:
            return self.order[_tree.descended(hidden, self.weight, self._tree.levels, noise)]
        chosen = ops.draw(self._log_softmax(hidden, self.class_weight), noise(0))
        return chosen * self.class_size + ops.draw(self._within(hidden, chosen), noise(1))

    def _best(self, hidden: Float[Tensor, "n D"], k: int, limit: int) -> tuple[Tensor, Tensor]:
        """Best first; by all scores where that has given up."""
        if self.class_weight is None:
            values, places, exact = best_leaves(hidden, self.weight, self._tree.levels, k, limit)
            tokens = self.order[places]
        else:
            bounds = self._log_softmax(hidden, self.class_weight)
            values, tokens, exact = best_of_classes(
                bounds, lambda rows, numbers: self._within(hidden[rows], numbers), k, limit
            )
        rest = (~exact).nonzero().squeeze(1)
        if len(rest):
            all_values, tokens[rest] = super().topk(hidden[rest], k)
            values[rest] = all_values.to(values.dtype)
        return values, tokens

    def _within(self, hidden: Float[Tensor, "n D"], numbers: Int[Tensor, " n"]) -> Float[Tensor, "n s"]:
        """Log-probabilities inside one class each, by one product a class; `-inf` beyond the last token."""
        wide, size = ops.widened(torch.promote_types(hidden.dtype, self.weight.dtype)), self.class_size
        scores = hidden.new_full((len(hidden), size), -torch.inf, dtype=wide)
        ordered, order = numbers.sort()
        each, counts = torch.unique_consecutive(ordered, return_counts=True)
        for number, rows in zip(each.tolist(), order.split(counts.tolist()), strict=True):
            block = self.weight[number * size : (number + 1) * size]
            scores[rows, : len(block)] = product(hidden[rows], block).to(wide)
        return torch.log_softmax(scores, -1)

    def flops(self) -> int:
        """`D` multiply-adds a choice on the path of one target, drawn with each branch of a node as likely."""
        if self.class_weight is None:
            return round(2 * self.in_features * _tree.expected_depth(self._tree))
        return 2 * self.in_features * (len(self.class_weight) + self.class_size)

    def _log_softmax(self, hidden: Tensor, weight: Tensor, *, blocks: bool = False) -> Tensor:
        scores = product(hidden, weight)
        scores = scores.to(ops.widened(scores.dtype))
        if blocks:
            missing = -self.out_features % self.class_size
            scores = nn.functional.pad(scores, (0, missing), value=-torch.inf).unflatten(-1, (-1, self.class_size))
        return torch.log_softmax(scores, -1)

    def _plant(self, depths: Tensor, device: Any) -> None:
        """Make `depths` the tree."""
        self._tree = _tree.tree_of(depths)
        self.register_buffer("depths", self._tree.depths.to(device))
        for name in ("ranks", "places", "order"):  # follow from the depths
            self.register_buffer(name, getattr(self._tree, name).to(device), persistent=False)

    @classmethod
    def examples(cls, in_features: int, out_features: int) -> Sequence[Self]:
        """Each kind of tree, and one from counts."""
        counts = [(7 * token) % 11 for token in range(out_features)]
        return [
            cls(in_features, out_features),
            cls(in_features, out_features, counts=counts),
            cls(in_features, out_features, tree="balanced"),
            cls(in_features, out_features, tree="classes"),
        ]


def _replant(head: HierarchicalSoftmax, _incompatible: Any) -> None:
    """After `load_state_dict`: the depths may be those of another tree."""
    if not head.depths.is_meta:
        head._plant(head.depths, head.depths.device)


def _checked(counts: Sequence[float] | Tensor, classes: int) -> list[float]:
    listed = counts.tolist() if isinstance(counts, Tensor) else list(counts)
    if len(listed) != classes or not all(0 <= count < math.inf for count in listed):
        raise ValueError(f"`counts` must be {classes} finite numbers, none negative, one a token.")
    return listed
