"""Negative log-likelihood inside the class of each target: a softmax over a block of consecutive rows.

Shapes: n tokens, D hidden size, V vocabulary, s rows a block.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.ops._linear_nll import as_autocast, chunk_rows
from unembed.ops._rows import Pullback, Rows, Tensors, Wanted, evaluate
from unembed.ops._scores import widened
from unembed.ops._token_terms import token_terms


def block_nll(
    hidden: Float[Tensor, "n D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " n"],
    size: int,
    *,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Float[Tensor, " n"]:
    r"""$\log\sum_{v \in B(t)} e^{h\cdot w_v} - h\cdot w_t$ with $B(t)$ the block of `size` rows that holds t.

    Gradients are exact, of any order; float32 or wider.

    Args:
        hidden: Hidden states.
        weight: Rows of all blocks; the last block may be shorter.
        targets: Next tokens, checked by the caller.
        size: Rows a block.
        ignore_index: Target of tokens that do not count: their loss is 0.
        chunk: Tokens whose blocks are alive at once, where blocks are gathered.
    """
    hidden, weight, _ = as_autocast(hidden, weight, None)
    rows = chunk_rows(size * hidden.shape[1], hidden.device, chunk)
    (nll,), _ = evaluate(BlockTerms(size, rows, ignore_index), (hidden, targets), (weight,))
    return nll


class BlockTerms(Rows):
    """`nll` inside the block; tokens `(hidden, targets)`, shared `(weight,)`."""

    def __init__(self, size: int, chunk: int, ignore_index: int) -> None:
        super().__init__(chunk, 1, 0)
        self.size, self.ignore_index = size, ignore_index

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The definition: the block of each token is gathered."""
        hidden, targets = tokens
        (weight,) = shared
        counts = targets != self.ignore_index
        safe = torch.where(counts, targets, 0)
        inside = safe % self.size
        rows = (safe - inside)[:, None] + torch.arange(self.size, device=targets.device)
        real, dtype = rows < len(weight), torch.promote_types(hidden.dtype, weight.dtype)
        block = weight.index_select(0, torch.where(real, rows, 0).flatten()).view(*rows.shape, -1).to(dtype)
        scores = (block @ hidden.to(dtype)[:, :, None]).squeeze(2).to(widened(dtype))
        scores = torch.where(real, scores, -torch.inf)
        return (token_terms(scores, torch.where(counts, inside, -1), ignore_index=-1)[0],), ()

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """One product a block, for all of its tokens."""
        hidden, targets = tokens
        dtype = torch.promote_types(hidden.dtype, shared[0].dtype)
        nll = hidden.new_zeros(len(hidden), dtype=widened(dtype))
        for rows, block in self.blocks(targets, len(shared[0])):
            scores = (hidden[rows].to(dtype) @ shared[0][block].to(dtype).T).to(nll.dtype)
            nll[rows] = token_terms(scores, targets[rows] - block.start, ignore_index=-1)[0]
        return (nll,), (), ()

    def blocks(self, targets: Tensor, vocab: int) -> Iterator[tuple[Tensor, slice]]:
        """Tokens of each block that has any, and the rows of the block."""
        kept = (targets != self.ignore_index).nonzero().squeeze(1)
        of_token, order = (targets[kept] // self.size).sort()
        numbers, counts = torch.unique_consecutive(of_token, return_counts=True)
        parts = kept[order].split(counts.tolist())
        for number, rows in zip(numbers.tolist(), parts, strict=True):
            yield rows, slice(number * self.size, min((number + 1) * self.size, vocab))

    def pullback(self, wanted: Wanted, outputs: Tensors, kept: Tensors) -> tuple[Rows, Tensors, Tensors]:
        """By hand."""
        return _BlockGradients(self, wanted), (), ()


class _BlockGradients(Pullback):
    """Gradients of `BlockTerms`; the target's is minus the sum of the others, never `p - 1`."""

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """One product a block for the scores, one each for what is wanted."""
        assert isinstance(self.function, BlockTerms)
        hidden, targets, upstream = tokens
        (weight,) = shared
        dtype = torch.promote_types(hidden.dtype, weight.dtype)
        on_hidden = torch.zeros_like(hidden) if self.wanted[0][0] else None
        on_weight = torch.zeros_like(weight) if self.wanted[1][0] else None
        for rows, block in self.function.blocks(targets, len(weight)):
            states, matrix = hidden[rows].to(dtype), weight[block].to(dtype)
            place = targets[rows, None] - block.start
            share = torch.softmax((states @ matrix.T).to(widened(dtype)), 1).scatter_(1, place, 0.0)
            share.scatter_(1, place, -share.sum(1, keepdim=True)).mul_(upstream[rows, None])
            if on_hidden is not None:
                on_hidden[rows] = (share @ matrix.to(share.dtype)).to(hidden.dtype)
            if on_weight is not None:
                on_weight[block] = (share.T @ states.to(share.dtype)).to(weight.dtype)
        return (
            tuple(one for one in (on_hidden,) if one is not None),
            tuple(one for one in (on_weight,) if one is not None),
            (),
        )
