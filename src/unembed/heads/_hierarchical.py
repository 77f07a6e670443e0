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
from unembed.heads._base import Head, draw, uniform_
from unembed.heads._product import product
from unembed.ops import chunk_rows
from unembed.ops._tree_classes import block_nll
from unembed.ops._tree_nll import tree_nll


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
            for name in ("depths", "ranks", "places"):
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
    def sample(self, hidden: Float[Tensor, "*n D"], *, generator: torch.Generator | None = None) -> Int[Tensor, "*n"]:
        """One draw a choice, from the root down."""
        flat = hidden.reshape(-1, self.in_features)
        if self.class_weight is None:
            order = self.ranks.argsort()
            parts = flat.split(chunk_rows(self.in_features, flat.device))
            ranks = [_tree.descended(part, self.weight, self._tree.levels, generator) for part in parts]
            return order[torch.cat(ranks)].reshape(hidden.shape[:-1])
        parts = flat.split(chunk_rows(self.class_size, flat.device))
        chosen = torch.cat([draw(self._log_softmax(part, self.class_weight), generator) for part in parts])
        tokens = torch.empty_like(chosen)
        for number in chosen.unique().tolist():
            rows, start = (chosen == number).nonzero().squeeze(1), number * self.class_size
            for part in rows.split(chunk_rows(self.class_size, flat.device)):
                log_prob = self._log_softmax(flat[part], self.weight[start : start + self.class_size])
                tokens[part] = start + draw(log_prob, generator)
        return tokens.reshape(hidden.shape[:-1])

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
        for name in ("ranks", "places"):  # follow from the depths
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
