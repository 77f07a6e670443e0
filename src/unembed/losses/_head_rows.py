"""Numbers of each token out of the scores of one head or several, a chunk at a time.

Shapes: n tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from unembed.heads import Head
from unembed.heads._streamed import refuse_random
from unembed.ops import Rows, chunk_rows, evaluate

_COPIES = 4  # of the scores that a chunk counts as: some are held while they are differentiated


def of_scores(
    heads: Sequence[Head],
    hidden: Sequence[Tensor],
    more: Sequence[Tensor],
    function: Callable[[Sequence[Tensor], Sequence[Tensor]], Tensor],
    *,
    chunk: int | None,
) -> Tensor:
    """`function(scores of each head, more)` of every token, with exact derivatives of any order.

    Args:
        heads: Whose scores are needed.
        hidden: The hidden states of each, with one token dimension.
        more: Further tensors with a row a token.
        function: From scores and the rest, of a chunk, to one number a token.
        chunk: Tokens at a time; chosen from the heads when None.
    """
    for head in heads:
        refuse_random(head)
    rows = chunk_rows(_COPIES * sum(head.alive for head in heads), hidden[0].device, chunk)
    shared = [parameter for head in heads for parameter in head.parameters()]
    (found,), _ = evaluate(_OfScores(heads, function, rows), (*hidden, *more), shared)
    return found


class _OfScores(Rows):
    def __init__(self, heads: Sequence[Head], function: Callable[..., Tensor], chunk: int) -> None:
        super().__init__(chunk, 1, 0)
        self._heads, self._function = heads, function

    def __call__(self, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> tuple[tuple[Tensor], tuple[()]]:
        """The definition."""
        given, scores = iter(shared), []
        for head, hidden in zip(self._heads, tokens, strict=False):
            parameters = {name: next(given) for name, _ in head.named_parameters()}
            found = torch.func.functional_call(head, parameters, (hidden,))
            scores.append(found.to(torch.promote_types(found.dtype, torch.float32)))
        return (self._function(scores, tokens[len(self._heads) :]),), ()


def reduced(
    loss: Tensor, weight: Tensor | None, shape: tuple[int, ...], reduction: str, when_empty: str = "zero"
) -> Tensor:
    """`mean` over the weights, `sum`, or `none`; a weight of 0 takes a token out, whatever its loss."""
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"`reduction` must be mean, sum or none, got {reduction!r}.")
    if when_empty not in ("zero", "nan"):
        raise ValueError(f"`when_empty` must be zero or nan, got {when_empty!r}.")
    if weight is not None and tuple(weight.shape) != shape:
        raise ValueError(f"Expected `token_weight` {shape} like the tokens of `hidden`, got {tuple(weight.shape)}.")
    weights = torch.ones_like(loss) if weight is None else weight.reshape(-1).to(loss.dtype)
    loss = torch.where(weights == 0, 0.0, loss) * weights
    if reduction == "none":
        return loss.reshape(shape)
    if reduction == "sum":
        return loss.sum()
    total = weights.sum()
    mean = loss.sum() / torch.where(total == 0, torch.ones_like(total), total)
    return torch.where(total == 0, torch.nan, mean) if when_empty == "nan" else mean
