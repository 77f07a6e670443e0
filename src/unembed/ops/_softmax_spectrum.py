r"""What softmax lets through: the eigenvalues of its Jacobian $J = \mathrm{diag}(p) - p p^T$, without forming it.

J takes one direction from a diagonal matrix, so with p in descending order $p_k \ge \lambda_k \ge p_{k+1}$, and between
two different p lies the one root of the secular equation. That is $1 = \sum_i p_i^2 / (p_i - \lambda)$; p sums to 1, so

$$1 - \sum_i \frac{p_i^2}{p_i - \lambda} = -\lambda \sum_i \frac{p_i}{p_i - \lambda}, \qquad\text{so}\qquad
f(\lambda) = \sum_i \frac{p_i}{p_i - \lambda} = 0,$$

which has no root at 0 and no cancellation: a relative error in each term moves the root by about as much.

Shapes: n rows, V classes, m roots.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from unembed.ops._softmax import class_count, excluded_from, per_row, softmax

_BLOCK = 1 << 21  # numbers alive at once in one float64 array
_FAST_STEPS = 12  # of a rational model; from there on every other step halves the bracket, whatever it may do
_STEPS = 160  # 64 halvings of a bracket from 1e-308 to 1
_EXACT = 1e-13  # relative change at which the next step could only be rounding


class SoftmaxSaturation(NamedTuple):
    """How much of a gradient the Jacobian J of softmax keeps, per row, in float64.

    Attributes:
        largest: The operator norm of J, the largest factor on the norm of a gradient.
        trace: 1 - sum p^2.
        frobenius: The Frobenius norm of J.
        typical: frobenius / sqrt(V): the root mean square factor on the norm of a random gradient. V counts the classes
            that take part, those with a score above `-inf`.
        effective_rank: trace^2 / frobenius^2, the participation ratio of the eigenvalues; 0 where J is 0.
    """

    largest: Float[Tensor, ...]
    trace: Float[Tensor, ...]
    frobenius: Float[Tensor, ...]
    typical: Float[Tensor, ...]
    effective_rank: Float[Tensor, ...]


@torch.no_grad()
def softmax_spectrum(
    x: Float[Tensor, ...],
    k: int | None = None,
    dim: int = -1,
    *,
    temperature: float | Float[Tensor, ...] = 1.0,
) -> Float[Tensor, ...]:
    r"""The k largest eigenvalues of $J = \mathrm{diag}(p) - p p^T$, $p = \mathrm{softmax}(x / T)$, descending; float64.

    They have relative accuracy, also where p is nearly one-hot. J is the Jacobian with respect to `x / T`; divide by T
    for that with respect to `x`. A row without any score, or at `T = 0`, has zeros; one with NaN has NaN. There are no
    derivatives.

    An eigenvalue costs about ten passes over its row, so all of them cost about $10 V^2$ a row.

    Args:
        x: Scores.
        k: Eigenvalues to return; all V when None.
        dim: The dimension of the classes; k stands in its place.
        temperature: T, a number or a tensor that broadcasts to `x` with size 1 along `dim`.

    Raises:
        ValueError: If `k` is not in [1, V], or as for `softmax`.
    """
    size = class_count(x, dim)
    if k is not None and not 1 <= k <= size:
        raise ValueError(f"`k` must lie in [1, {size}], got {k}.")
    k = size if k is None else k
    parts = [_eigenvalues(p, k) for p, _ in _rows(x, dim, temperature)]
    lead = x.movedim(dim, -1).shape[:-1]
    found = torch.cat(parts) if parts else x.new_zeros((0, k), dtype=torch.float64)
    return found.view(*lead, k).movedim(-1, dim) if x.ndim else found.view(())


@torch.no_grad()
def softmax_saturation(
    x: Float[Tensor, ...], dim: int = -1, *, temperature: float | Float[Tensor, ...] = 1.0
) -> SoftmaxSaturation:
    r"""Norms of $J = \mathrm{diag}(p) - p p^T$, $p = \mathrm{softmax}(x / T)$, from which saturation can be read.

    All have relative accuracy, also where p is nearly one-hot: $1 - p$ of the largest is the sum of the others. J is as
    in `softmax_spectrum`, and so are the edges. No derivatives.

    Args:
        x: Scores.
        dim: The dimension of the classes.
        temperature: T, a number or a tensor that broadcasts to `x` with size 1 along `dim`.

    Raises:
        ValueError: As for `softmax`.
    """
    parts = [torch.stack([_eigenvalues(p, 1)[:, 0], *_norms(p, taking)]) for p, taking in _rows(x, dim, temperature)]
    lead = x.movedim(dim, -1).shape[:-1]
    found = torch.cat(parts, 1) if parts else x.new_zeros((5, lead.numel()), dtype=torch.float64)
    return SoftmaxSaturation(*found.view(5, *lead))


def _rows(x: Tensor, dim: int, temperature: float | int | Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Probabilities of some rows at a time, and how many classes take part in each."""
    excluded_from(x, None)  # refuses what holds no scores
    rows = x.movedim(dim, -1).reshape(-1, class_count(x, dim)) if x.numel() else x.new_zeros(0, 1)
    spread = None
    if isinstance(temperature, Tensor):
        spread = torch.broadcast_to(per_row("temperature", temperature, x, dim), _with_one(x, dim))
        spread = spread.movedim(dim, -1).reshape(-1, 1).double()
    step = max(1, _BLOCK // rows.shape[1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        p = softmax(rows[part].double(), 1, temperature=temperature if spread is None else spread[part])
        yield p, (rows[part] != -torch.inf).sum(1)


def _with_one(x: Tensor, dim: int) -> list[int]:
    """The shape of what has one number for each row."""
    sizes = list(x.shape)
    if sizes:
        sizes[dim] = 1
    return sizes


def _norms(p: Float[Tensor, "n V"], taking: Tensor) -> tuple[Tensor, ...]:
    """trace, frobenius, typical and effective rank of each row."""
    likeliest = p.argmax(1, keepdim=True)
    top = p.gather(1, likeliest)[:, 0]
    others = p.scatter(1, likeliest, 0.0)
    rest, unit = others.sum(1), others.amax(1)
    # In units of the second largest p, so that no square is rounded to 0.
    unit = torch.where(unit == 0, 1.0, unit)
    kept, scaled = others * (1 - others), others / unit[:, None]
    trace = top * rest + kept.sum(1)
    squares = scaled.square()
    second, fourth = squares.sum(1), squares.square().sum(1)
    diagonal = (top * (rest / unit)).square() + (squares * (1 - others).square()).sum(1)
    beside = 2 * top.square() * second + unit.square() * (second.square() - fourth)
    frobenius = unit * (diagonal + beside).sqrt()
    rank = (trace / torch.where(frobenius == 0, 1.0, frobenius)).square()
    return trace, frobenius, frobenius / taking.clamp(min=1).double().sqrt(), rank


def _eigenvalues(p: Float[Tensor, "n V"], k: int) -> Float[Tensor, "n k"]:
    """The k largest of each row. Where two p are equal or the lower is 0, that is an eigenvalue; elsewhere a root."""
    bounds = p.topk(min(k + 1, p.shape[1]), dim=1).values
    bounds = torch.nn.functional.pad(bounds, (0, k + 1 - bounds.shape[1]))
    high, low = bounds[:, :-1], bounds[:, 1:]
    found = torch.where(bounds[:, :1].isnan(), torch.nan, low)
    rows, places = ((low > 0) & (low < high)).nonzero(as_tuple=True)
    for part in torch.arange(len(rows), device=p.device).split(max(1, _BLOCK // p.shape[1])):
        row, place = rows[part], places[part]
        found[row, place] = _roots(p[row], high[row, place], low[row, place])
    return found


def _roots(p: Float[Tensor, "m V"], above: Float[Tensor, " m"], below: Float[Tensor, " m"]) -> Float[Tensor, " m"]:
    """The root of f between two neighbouring p of each row, by a rational model in a bracket, else by halving that."""
    low, high = below, above
    x = low.sqrt() * high.sqrt()
    for step in range(_STEPS):
        gap = p - x[:, None]
        terms = p / gap
        total = terms.sum(1)
        low, high = torch.where(total < 0, x, low), torch.where(total < 0, high, x)
        middle = (low.sqrt() * high.sqrt()).clamp(low, high)
        moved = x * (1 + _model_step(x, terms, gap, total, (above / x - 1, below / x - 1)))
        fits = (moved >= low) & (moved <= high)
        if step >= _FAST_STEPS:
            fits &= step % 2 == 0
        before, x = x, torch.where(total == 0, x, torch.where(fits, moved, middle))
        if bool(((x - before).abs() <= _EXACT * x).all()):
            break
    return x


def _model_step(x: Tensor, terms: Tensor, gap: Tensor, total: Tensor, poles: tuple[Tensor, Tensor]) -> Tensor:
    r"""Relative step to the root of a model of f that has its value and its slopes from either side (Li, 1993).

    With the poles a and b next to x, and the parts of the slope of f that come from p above and below x, the model is
    $c + s / (a - \lambda) + S / (b - \lambda)$, in units of x. Its root solves a quadratic equation.
    """
    to_above, to_below = poles
    slopes = terms * (x[:, None] / gap)
    upper = torch.where(terms > 0, slopes, 0.0).sum(1)
    lower = torch.where(terms > 0, 0.0, slopes).sum(1)
    constant = total - to_above * upper - to_below * lower
    linear = constant * (to_above + to_below) + to_above.square() * upper + to_below.square() * lower
    last = to_above * to_below * total
    root = (linear.square() - 4 * constant * last).clamp(min=0).sqrt()
    step = torch.where(linear > 0, 2 * last / (linear + root), (linear - root) / (2 * constant))
    return torch.where(root == torch.inf, torch.nan, step)  # or it would be 0, as at the root
