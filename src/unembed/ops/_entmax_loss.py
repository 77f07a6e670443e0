r"""Fenchel-Young losses of alpha-entmax, of rows of scores.

$$L = \langle p - e_y, x \rangle + H_\alpha(p), \qquad \partial L / \partial x = p - e_y$$

Shapes: n or * rows, V classes.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.ops import _entmax_find as fast
from unembed.ops._entmax import _reference as _entmax_reference
from unembed.ops._entmax import fast_epsilon, with_alpha
from unembed.ops._entmax_terms import defined, tsallis
from unembed.ops._linear_nll import check_targets, chunk_rows
from unembed.ops._rows import Pullback, Rows, Tensors, Wanted, evaluate
from unembed.ops._scores import widened

_COPIES = 4  # of the scores that a chunk of the definition counts as


def _reference(x: Float[Tensor, "n V"], targets: Int[Tensor, " n"], alpha: float) -> Float[Tensor, " n"]:
    """What `fenchel_young` means, in float64, by the entropy."""
    x = x.double()
    if alpha == 1:
        return torch.nn.functional.cross_entropy(x, targets, reduction="none")
    p = _entmax_reference(x, alpha)
    entropy = (p - p**alpha).sum(1) / (alpha * (alpha - 1))
    return torch.where(p == 0, 0.0, p * x).sum(1) - x.gather(1, targets[:, None]).squeeze(1) + entropy


def fenchel_young(
    x: Float[Tensor, "*n V"],
    targets: Int[Tensor, "*n"],
    alpha: float | Float[Tensor, ...] = 1.5,
    *,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Float[Tensor, "*n"]:
    r"""The loss that `entmax` minimises, of each row of scores (Blondel et al., 2020, arXiv:1901.02324).

    Never negative; 0 once the target's score leads all others by $1 / (\alpha - 1)$. For alpha = 1 it is cross-entropy.
    Losses of different alpha are not comparable: the loss falls with alpha by itself, so an alpha that learns must
    learn from another one. Float32 or wider, derivatives exact up to the third order. A score of `-inf` takes no part;
    that of a target makes the loss infinite, with the gradient `p - e_y` all the same.

    Args:
        x: Scores.
        targets: Classes.
        alpha: From 1 to 2.5; a tensor has one number, or one a row with size 1 in the place of V.
        ignore_index: Target of rows that do not count: their loss is 0.
        chunk: Rows at a time; chosen from V when None.

    Raises:
        ValueError: If alpha is outside [1, 2.5], shapes do not fit, or a target is no class.
    """
    if not x.is_floating_point():
        raise ValueError(f"`x` must be floating point, got {x.dtype}.")
    check_targets(targets, x.shape[-1], ignore_index)
    if x.shape[:-1] != targets.shape:
        raise ValueError(
            f"Expected `targets` {tuple(x.shape[:-1])} beside scores {tuple(x.shape)}, got {tuple(targets.shape)}."
        )
    tokens, shared, number = with_alpha(x, alpha, x, -1)
    if not x.shape[-1]:  # without classes all rows are ignored, or a target was refused
        return x.new_zeros(targets.shape, dtype=widened(x.dtype))
    function = _Losses(number, ignore_index, chunk_rows(_COPIES * max(1, x.shape[-1]), x.device, chunk))
    (loss,), _ = evaluate(function, (*tokens, targets.reshape(-1).long()), shared)
    return loss.reshape(targets.shape)


def loss_rows(
    x: Float[Tensor, "n V"], targets: Int[Tensor, " n"], alpha: float | Tensor, ignore_index: int
) -> Float[Tensor, " n"]:
    """The definition, with derivatives exact up to the third order; float32 or wider.

    Args:
        x: Scores.
        targets: Classes.
        alpha: A number, or numbers [1 or n, 1].
        ignore_index: Target of rows that do not count.
    """
    dtype = widened(x.dtype)
    p, centre, alpha = defined(x, alpha)
    x = x.to(p.dtype)
    counts = targets != ignore_index
    peak = x.detach().amax(1, keepdim=True)
    own = x.gather(1, torch.where(counts, targets, 0)[:, None]) - torch.where(peak == -torch.inf, 0.0, peak)
    loss = centre - own - tsallis(p, alpha)  # infinite for a target of -inf, with the gradient p - e_y all the same
    loss = loss - loss.detach().clamp(max=0)  # rounding may leave it below 0
    loss = torch.where(peak == -torch.inf, torch.inf, loss)
    return torch.where(counts, loss[:, 0], 0.0).to(dtype)


class _Losses(Rows):
    """The loss of each row; tokens `(x, targets)` or `(x, alpha, targets)`, shared `()` or `(alpha,)`.

    Args:
        alpha: A number; None where it comes as a tensor.
        ignore_index: Target of rows that do not count.
        chunk: Rows at a time.
    """

    def __init__(self, alpha: float | None, ignore_index: int, chunk: int) -> None:
        super().__init__(chunk, 1, 0)
        self.alpha, self.ignore_index = alpha, ignore_index

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The definition."""
        x, *own, targets = tokens
        alpha = self.alpha if self.alpha is not None else (*own, *shared)[0]
        return (loss_rows(x, targets, alpha, self.ignore_index),), ()

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """By the fast search where it holds."""
        epsilon = self.fast(tokens, shared)
        if epsilon is None:
            return super().run(tokens, shared)
        loss = tokens[0].new_empty(len(tokens[0]), dtype=widened(tokens[0].dtype))
        for at, _, of_rows, _ in self.settled(tokens[0], tokens[-1], epsilon):
            loss[at] = of_rows
        return (loss.masked_fill_(tokens[-1] == self.ignore_index, 0.0),), (), ()

    def fast(self, tokens: Tensors, shared: Tensors) -> float | None:
        """The epsilon, alpha - 1, where the fast search holds."""
        alpha = None if len(tokens) > 2 else self.alpha if self.alpha is not None else float(shared[0])
        return fast_epsilon(alpha, tokens[0].device)

    def settled(self, x: Tensor, targets: Tensor, epsilon: float) -> Iterator[tuple[slice, Tensor, Tensor, Tensor]]:
        """Rows of a chunk, their p without the target's, their losses, and what is left for the target."""
        safe = torch.where(targets == self.ignore_index, 0, targets)
        for start in range(0, len(x), self.chunk):
            at = slice(start, start + self.chunk)
            scores = x[at].to(widened(x.dtype)).contiguous()
            p = torch.empty_like(scores)
            yield at, p, *fast.settle(scores, safe[at], fast.find(scores, epsilon), epsilon, p)

    def pullback(self, wanted: Wanted, outputs: Tensors, kept: Tensors) -> tuple[Rows, Tensors, Tensors]:
        """By a second search, where the gradient of the scores is all that is wanted."""
        of_scores = not any(wanted[0][1:]) and not any(wanted[1])
        return _Gradient(self, wanted) if of_scores else Pullback(self, wanted), (), ()


class _Gradient(Pullback):
    """Upstream times `p - e_y`; the target's part is minus the sum of the others."""

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """A chunk at a time."""
        function = self.function
        assert isinstance(function, _Losses)
        x, *_, targets, upstream = tokens
        epsilon = function.fast(tokens[:-1], shared)
        if epsilon is None:
            return super().run(tokens, shared)
        counts = targets != function.ignore_index
        up = torch.where(counts, upstream, 0.0)[:, None]
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        place = torch.where(counts, targets, 0)[:, None]
        for at, p, _, rest in function.settled(x, targets, epsilon):
            p.scatter_(1, place[at], -rest[:, None].to(p.dtype))
            out[at] = p.mul_(up[at])
        return (out,), (), ()
