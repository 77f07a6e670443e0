r"""Fenchel-Young losses of alpha-entmax under a linear head, a chunk of scores alive at a time.

Of a chunk's classes only those that some token gives a probability have a part in the products of the gradients.

Shapes: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.ops import _entmax_find as fast
from unembed.ops._entmax import check_alpha, fast_epsilon
from unembed.ops._entmax_loss import loss_rows
from unembed.ops._linear_nll import LEAST_ROWS, chunk_rows, linear_loss, linear_nll, prepared, requiring
from unembed.ops._linear_work import LinearOptions, Sums, Work
from unembed.ops._rows import Pullback, Rows, Tensors, Wanted, evaluate
from unembed.ops._summed import Summed
from unembed.ops._token_terms import weighted

_FEW = 0.5  # share of the classes up to which rows of the matrix are copied out


def linear_fenchel_young(
    hidden: Float[Tensor, "*N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "*N"],
    alpha: float = 1.5,
    *,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Float[Tensor, "*N"]:
    """`fenchel_young` of a linear head's scores for each token, one chunk of scores alive.

    A backward pass makes the scores once more; classes that no token of a chunk gives a probability have no part in its
    products.

    Args:
        hidden: Hidden states after the final norm.
        weight: The unembedding matrix.
        targets: Next tokens.
        alpha: A number from 1 to 2.5.
        bias: Added before scale and soft-cap; `-inf` takes a class out.
        softcap: Cap of the scores; none when None.
        scale: Factor on the scores.
        ignore_index: Target of tokens that do not count: their loss is 0.
        chunk: Tokens whose scores are alive at once. Chosen from V when None.

    Raises:
        ValueError: If alpha is outside [1, 2.5], shapes do not fit, `chunk` is not positive, or a target is no class.
    """
    check_alpha(alpha)
    common: dict[str, Any] = {"bias": bias, "softcap": softcap, "scale": scale, "ignore_index": ignore_index}
    if alpha == 1:
        return linear_nll(hidden, weight, targets, chunk=chunk, **common)
    options, hidden, shared = prepared(hidden, weight, targets, **common)
    rows = chunk_rows(len(weight), hidden.device, chunk, least=LEAST_ROWS)
    tokens = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).long())
    (loss,), _ = evaluate(_Tokens(options, alpha, rows), tokens, shared)
    return loss.reshape(targets.shape)


def linear_fenchel_young_loss(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " N"],
    coefficients: Float[Tensor, " N"],
    alpha: float = 1.5,
    *,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Float[Tensor, ""]:
    """The sum of `linear_fenchel_young`, each token times its coefficient, with gradients made in the same pass.

    Args:
        hidden: Hidden states after the final norm.
        weight: The unembedding matrix.
        targets: Next tokens.
        coefficients: Of each token; 0 takes a token out, whatever its loss.
        alpha: A number from 1 to 2.5.
        bias: Added before scale and soft-cap; `-inf` takes a class out.
        softcap: Cap of the scores; none when None.
        scale: Factor on the scores.
        ignore_index: Target of tokens that do not count.
        chunk: Tokens whose scores are alive at once. Chosen from V when None.
    """
    check_alpha(alpha)
    common: dict[str, Any] = {"bias": bias, "softcap": softcap, "scale": scale, "ignore_index": ignore_index}
    if alpha == 1:
        zeros = torch.zeros_like(coefficients)
        terms = torch.stack([coefficients, zeros, zeros, zeros], dim=1)
        return linear_loss(hidden, weight, targets, terms, chunk=chunk, **common)
    options, hidden, shared = prepared(hidden, weight, targets, **common)
    rows = chunk_rows(len(weight), hidden.device, chunk, least=LEAST_ROWS)
    tokens = (hidden, targets.long(), coefficients)
    _, (total,) = evaluate(_Sum(options, alpha, rows, (requiring(tokens), requiring(shared))), tokens, shared)
    return total


class _Tokens(Rows):
    """The loss of each token; tokens `(hidden, targets)`, shared `(weight,)` or `(weight, bias)`."""

    def __init__(self, options: LinearOptions, alpha: float, chunk: int) -> None:
        super().__init__(chunk, 1, 0)
        self.options, self.alpha = options, alpha

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The definition."""
        weight, bias, _ = self.options.shared(shared)
        scores = self.options.scores(tokens[0], weight, bias)
        return (loss_rows(scores, tokens[1], self.alpha, self.options.ignore_index),), ()

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """In place, one chunk of scores alive."""
        if fast_epsilon(self.alpha, tokens[0].device) is None:
            return super().run(tokens, shared)
        nothing = (False, False, False)
        loss, _ = _walk(self, tokens, shared, torch.zeros_like(tokens[0][:, 0]), nothing)
        return (loss,), (), ()

    def pullback(self, wanted: Wanted, outputs: Tensors, kept: Tensors) -> tuple[Rows, Tensors, Tensors]:
        """By a second look at the scores."""
        return _Gradients(self, wanted), (), ()


class _Gradients(Pullback):
    """Gradients of `_Tokens`."""

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """In place, one chunk of scores alive."""
        function = self.function
        assert isinstance(function, _Tokens)
        if fast_epsilon(function.alpha, tokens[0].device) is None:
            return super().run(tokens, shared)
        wanted = (self.wanted[0][0], self.wanted[1][0], function.options.biased and self.wanted[1][1])
        _, sums = _walk(function, tokens[:2], shared, tokens[2], wanted)
        weight, bias, _ = function.options.shared(shared)
        return *sums.result(tokens[0], weight, bias), ()


class _Sum(Summed):
    """The sum of the losses, each times its coefficient; tokens `(hidden, targets, coefficients)`."""

    def __init__(self, options: LinearOptions, alpha: float, chunk: int, asked: Wanted) -> None:
        super().__init__(chunk, asked)
        self._tokens = _Tokens(options, alpha, chunk)

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The definition."""
        (loss,), _ = self._tokens(tokens[:2], shared)
        return (), (weighted([loss], tokens[2][:, None]),)

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """In place, one chunk of scores alive."""
        function, biased = self._tokens, self._tokens.options.biased
        if fast_epsilon(function.alpha, tokens[0].device) is None:
            return super().run(tokens, shared)
        asked = (self.asked[0][0], self.asked[1][0], biased and self.asked[1][1])
        loss, sums = _walk(function, tokens[:2], shared, tokens[2], asked)
        found = (sums.hidden, loss if self.asked[0][2] else None, sums.weight, sums.bias)
        kept = tuple(part for part in found if part is not None)
        return (), (weighted([loss], tokens[2][:, None]),), kept


def _walk(
    function: _Tokens, tokens: Tensors, shared: Tensors, coefficients: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor, Sums]:
    """The loss of each token, and the gradients of their sum, each times its coefficient."""
    hidden, targets = tokens
    options, epsilon = function.options, function.alpha - 1
    weight, bias, _ = options.shared(shared)
    work = Work(options, hidden, weight, bias, function.chunk)
    sums = Sums(work, hidden, wanted)
    counts = targets != options.ignore_index
    safe = torch.where(counts, targets, 0)
    coefficients = torch.where(counts, coefficients.to(work.wide), 0.0)
    loss, rest = hidden.new_empty(2, len(hidden), dtype=work.wide)
    steep = hidden.new_ones(len(hidden), dtype=work.wide)
    for part in work.chunks(len(hidden)):
        products = work.fill(hidden[part])
        alive = torch.zeros(len(weight), dtype=torch.bool, device=hidden.device)
        for at, scores, slope in work.pieces(part, products, slope=any(wanted)):
            found = fast.find(scores, epsilon)
            if slope is not None:
                steep[at] = slope.gather(1, safe[at, None])[:, 0]
            loss[at], rest[at] = fast.settle(scores, safe[at], found, epsilon, scores)
            if slope is not None:
                scores.mul_(slope)
            alive[slice(None) if found.columns is None else found.columns] = True
        if any(wanted):
            on_target = -coefficients[part] * rest[part] * steep[part]
            sums.add(part, products, coefficients[part], on_target, safe[part], columns=_few(alive))
    return loss.masked_fill_(~counts, 0.0), sums


def _few(alive: Tensor) -> Tensor | None:
    """The classes that are alive, where taking them out of the matrices is worth it; None for all."""
    columns = alive.nonzero()[:, 0]
    return columns if len(columns) < _FEW * len(alive) else None
