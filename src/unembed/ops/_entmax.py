"""Sparsemax and alpha-entmax along a dimension, exact at any support, without a sort.

Shapes: n rows, V classes.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unembed.ops import _entmax_find as fast
from unembed.ops._entmax_terms import defined
from unembed.ops._require import require
from unembed.ops._rows import Pullback, Rows, Tensors, Wanted, evaluate
from unembed.ops._scores import widened
from unembed.ops._softmax import excluded_from, per_row, softmax

_BUDGET = 1 << 21  # scores a chunk on a CPU: what lies between is a few times as large
_BUDGET_GPU = 1 << 26
MOST_ALPHA = 2.5
_LEAST_ALPHA = 1.1  # of the fast search


def _reference(x: Float[Tensor, "n V"], alpha: float) -> Float[Tensor, "n V"]:
    r"""$p = [(\alpha - 1) x - \tau]_+^{1 / (\alpha - 1)}$ in float64, tau by bisection; softmax for alpha = 1."""
    x = x.double()
    if alpha == 1:
        return torch.softmax(x, 1)
    scaled = (alpha - 1) * (x - x.amax(1, keepdim=True))
    low, high = -torch.ones_like(scaled[:, :1]), torch.zeros_like(scaled[:, :1])
    for _ in range(200):
        tau = (low + high) / 2
        total = (scaled - tau).clamp(min=0).pow(1 / (alpha - 1)).sum(1, keepdim=True)
        low, high = torch.where(total >= 1, tau, low), torch.where(total < 1, tau, high)
    p = (scaled - low).clamp(min=0).pow(1 / (alpha - 1))
    return p / p.sum(1, keepdim=True)


def sparsemax(x: Float[Tensor, ...], dim: int = -1, *, mask: Bool[Tensor, ...] | None = None) -> Float[Tensor, ...]:
    r"""The nearest point of the simplex, $p = [x - \tau]_+$ (Martins and Astudillo, 2016, arXiv:1602.02068).

    `entmax` with alpha = 2.
    """
    return entmax(x, 2.0, dim, mask=mask)


def entmax(
    x: Float[Tensor, ...],
    alpha: float | Float[Tensor, ...] = 1.5,
    dim: int = -1,
    *,
    mask: Bool[Tensor, ...] | None = None,
) -> Float[Tensor, ...]:
    r"""$p = [(\alpha - 1) x - \tau]_+^{1 / (\alpha - 1)}$ that sums to 1 (Peters et al., 2019, arXiv:1905.05702).

    alpha = 1 is softmax, and the limit is smooth; alpha = 2 is sparsemax; beyond 1, small scores get exactly 0. Exact
    at any support, computed in float32 or wider, in the dtype of `x`. Derivatives are exact up to the third order, with
    respect to alpha too (Correia et al., 2019, arXiv:1909.00015); at the border of the support, where there is none,
    they are those from outside. A score of `-inf` has probability 0 and gradient 0; a row without any score is zeros.

    Args:
        x: Scores.
        alpha: From 1 to 2.5, a number, or a tensor that broadcasts to `x` with size 1 along `dim`. It may learn, as
            `1 + sigmoid(a)`, which stays in range. Beyond 2 the slope of p at the border of its support is infinite;
            from 3 on float64 would no longer make p sum to 1.
        dim: The dimension of the classes.
        mask: True where a class takes part; broadcasts to `x`.

    Raises:
        ValueError: If an alpha is outside [1, 2.5], or does not broadcast, or `x` is not floating point.
    """
    if not isinstance(alpha, Tensor):
        check_alpha(alpha)
        if alpha == 1:
            return softmax(x, dim, mask=mask)
    if not x.is_floating_point():
        raise ValueError(f"`x` must be floating point, got {x.dtype}.")
    if not x.ndim:  # a single class
        return entmax(x.reshape(1), alpha, dim, mask=None if mask is None else mask.reshape(1)).reshape(())
    if mask is not None:
        x = x.masked_fill(excluded_from(x, mask), -torch.inf)
    rows = x.movedim(dim, -1)
    shape = rows.shape
    tokens, shared, number = with_alpha(rows, alpha, x, dim)
    if not x.numel():
        return x.clone()
    budget = _BUDGET if x.device.type == "cpu" else _BUDGET_GPU
    function = EntmaxRows(number, max(1, budget // shape[-1]))
    (p,), _ = evaluate(function, tokens, shared)
    return p.reshape(shape).movedim(-1, dim)


def check_alpha(alpha: float | Tensor) -> None:
    """Refuse what is no alpha.

    Raises:
        ValueError: If it is less than 1, NaN or infinite.
    """
    if isinstance(alpha, Tensor):
        raise ValueError("`alpha` must be a number here; one that learns goes to `ops.entmax` or `ops.fenchel_young`.")
    if not 1 <= alpha <= MOST_ALPHA:
        raise ValueError(f"`alpha` must lie in [1, {MOST_ALPHA}], got {alpha}.")


def fast_epsilon(alpha: float | None, device: torch.device) -> float | None:
    """The epsilon, alpha - 1, where the fast search holds: one alpha in [1.1, 2] for all rows, and float64 there.

    Below, `b ** (1 / epsilon)` would raise the rounding of b to a power too large; the definition has logarithms.
    """
    return None if alpha is None or not _LEAST_ALPHA <= alpha <= 2 or device.type == "mps" else alpha - 1


def with_alpha(
    rows: Tensor, alpha: float | Tensor, x: Tensor, dim: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...], float | None]:
    """Rows, with an alpha each where they differ; one alpha for all where that is a tensor; or as a number."""
    flat = rows.reshape(math.prod(rows.shape[:-1]), rows.shape[-1])
    if not isinstance(alpha, Tensor):
        check_alpha(alpha)
        return (flat,), (), float(alpha)
    held = alpha.detach()
    require(
        (held >= 1) & (held <= MOST_ALPHA),
        f"`alpha` must lie in [1, {MOST_ALPHA}] everywhere; one that learns stays there as `1 + sigmoid(a)`.",
    )
    alpha = per_row("alpha", alpha, x, dim)
    if alpha.numel() == 1:
        return (flat,), (alpha.reshape(1, 1),), None
    return (flat, alpha.movedim(dim, -1).expand(*rows.shape[:-1], 1).reshape(-1, 1)), (), None


class EntmaxRows(Rows):
    """p of rows of scores; tokens `(x,)` or `(x, alpha)`, shared `()` or `(alpha,)`.

    Args:
        alpha: A number larger than 1; None where it comes as a tensor.
        chunk: Rows at a time.
    """

    def __init__(self, alpha: float | None, chunk: int) -> None:
        super().__init__(chunk, 1, 0)
        self.alpha = alpha

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The definition."""
        x, *own = tokens
        p, _, _ = defined(x, self.alpha if self.alpha is not None else (*own, *shared)[0])
        return (p.to(x.dtype),), ()

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """By the fast search where it holds; keeps the largest score and the root of each row."""
        x = tokens[0]
        epsilon = self.fast(tokens, shared)
        peak = x.new_zeros(len(x), 1, dtype=widened(x.dtype))
        centre = x.new_zeros(len(x), 1, dtype=torch.float64 if epsilon is not None else peak.dtype)
        if epsilon is None:  # as many kept as in the other case: under vmap each example may be of either
            return *super().run(tokens, shared)[:2], (peak, centre)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for start in range(0, len(x), self.chunk):
            part = slice(start, start + self.chunk)
            scores = x[part].to(peak.dtype).contiguous()
            found = fast.find(scores, epsilon)
            fast.fill(scores, found, epsilon, out[part])
            peak[part], centre[part] = found.peak, found.centre
        return (out,), (), (peak, centre)

    def fast(self, tokens: Tensors, shared: Tensors) -> float | None:
        """The epsilon, alpha - 1, where the fast search holds: one alpha for all rows, in (1, 2]."""
        alpha = None if len(tokens) > 1 else self.alpha if self.alpha is not None else float(shared[0])
        return fast_epsilon(alpha, tokens[0].device)

    def pullback(self, wanted: Wanted, outputs: Tensors, kept: Tensors) -> tuple[Rows, Tensors, Tensors]:
        """From the roots, where the gradient of the scores is all that is wanted."""
        if not kept or any(wanted[0][1:]) or any(wanted[1]):
            return super().pullback(wanted, outputs, ())
        return _Gradient(self, wanted), kept, ()


class _Gradient(Pullback):
    r"""$u (g - \sum u g / \sum u)$ with $u = p^{2 - \alpha}$ on the support."""

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """In place, a piece at a time."""
        assert isinstance(self.function, EntmaxRows)
        x, *own, upstream, peak, centre = tokens
        epsilon = self.function.fast((x, *own), shared)
        if epsilon is None:
            return super().run(tokens, shared)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        for part in fast.pieces(x):
            scores, g = x[part].to(peak.dtype), upstream[part].to(peak.dtype)
            base = fast.shifted(scores, peak[part], centre[part], epsilon)
            u = fast.slopes_(base.clamp_(min=0), epsilon)
            found = out[part] if out.dtype == u.dtype else torch.empty_like(u)
            torch.mul(u, g, out=found)
            mean = found.sum(1, keepdim=True) / u.sum(1, keepdim=True).clamp(min=torch.finfo(u.dtype).tiny)
            found.sub_(u.mul_(mean))
            if found.dtype != out.dtype:
                out[part] = found
        return (out,), (), ()
