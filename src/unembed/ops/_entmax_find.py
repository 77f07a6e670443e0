r"""The fast way to alpha-entmax, for 1 < alpha <= 2: most scores are looked at once.

The maxima of groups of scores are themselves scores, so the root c of those alone is a lower bound of the row's: adding
classes can only raise it. Only groups whose maximum lies above the threshold of that bound can hold a class of the
support. Where few do, their members go into a list, and the rest is float64 work on that. Where many do, Newton's
method runs over pieces that stay in a core's cache, and its last steps have a threshold in two parts, so that the
smallest probabilities are not rounded away.

Shapes: n rows, V classes, m candidates of all rows together.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

_GROUP = 16  # scores in a group
_SMALL = 1024  # classes below which groups are not worth it
_DENSE = 0.25  # share of all scores in groups that count, from which a list costs more than a pass
_MARGIN = 1e-4  # taken off the bound, for rounding
_CACHED = 1 << 19  # scores of a piece
_BOUND_STEPS = 5
_STEPS = 40  # more than any row needs: a step divides the product of excess and slope by 4 at least
_EXACT = 1e-14
_FINISH = 12  # steps with a threshold in two parts, for many scores within its rounding
_WHOLE, _MOST = 1e-9, 16  # how near to a whole number an exponent counts as one; largest that is made of products


class Found(NamedTuple):
    """Root of each row, and where p is not 0.

    Args:
        peak: Largest score of each row; 0 where all are `-inf`.
        centre: c - peak, float64; NaN in a row with NaN or inf.
        rows: Of the candidates; None where they are no list, but all scores.
        columns: Of the candidates.
        scores: Of the candidates, below the peak, float64.
    """

    peak: Float[Tensor, "n 1"]
    centre: Float[Tensor, "n 1"]
    rows: Int[Tensor, " m"] | None = None
    columns: Int[Tensor, " m"] | None = None
    scores: Float[Tensor, " m"] | None = None


def find(x: Float[Tensor, "n V"], epsilon: float) -> Found:
    """The root c of each row of scores, and the candidates where they are few; no derivatives.

    Args:
        x: Scores, float32 or wider.
        epsilon: alpha - 1, in (0, 1].
    """
    if x.shape[1] < _SMALL:
        peak = _start(x)
        return Found(peak, _dense(x, peak, torch.zeros_like(peak), epsilon))
    size = x.shape[1] // _GROUP
    # The members of a group lie a stride apart, so that their maxima are those of whole vectors.
    grouped, rest = x[:, : size * _GROUP].view(len(x), _GROUP, size), x[:, size * _GROUP :]
    heads = torch.cat([grouped.amax(1), rest], dim=1)
    peak = _start(heads)
    heads -= peak
    bound = _bounded(heads, epsilon)
    least = bound - 1 / epsilon - _MARGIN  # below the peak
    rows, places = (heads > least).nonzero(as_tuple=True)
    if len(rows) * _GROUP > _DENSE * x.numel():
        return Found(peak, _dense(x, peak, bound, epsilon))
    inside = places < size
    members = grouped[rows[inside], :, places[inside]]
    group, member = (members - peak[rows[inside]] > least[rows[inside]]).nonzero(as_tuple=True)
    columns = torch.cat([places[inside][group] + member * size, places[~inside] + size * (_GROUP - 1)])
    found = torch.cat([members[group, member], rest[rows[~inside], places[~inside] - size]])
    rows = torch.cat([rows[inside][group], rows[~inside]])
    scores = found.double().sub_(peak[rows, 0])  # in float64, or what is near the threshold loses its digits
    return Found(peak, _ragged(scores, rows, bound.double(), epsilon), rows, columns, scores)


def fill(x: Float[Tensor, "n V"], found: Found, epsilon: float, out: Float[Tensor, "n V"]) -> None:
    """Write p into `out`, which may be `x` or of another dtype."""
    if found.rows is not None:
        assert found.columns is not None
        assert found.scores is not None
        base = _base(found.scores, found.centre[found.rows, 0], epsilon)
        out.zero_()[found.rows, found.columns] = raised(base, epsilon).to(out.dtype)
    else:
        for part in pieces(x):
            place = out[part] if out.dtype == x.dtype else None
            b = shifted(x[part], found.peak[part], found.centre[part], epsilon, out=place)
            p = raised_(b.clamp_(min=0), epsilon)
            if out.dtype != x.dtype:
                out[part] = p
    lost = found.centre.isnan()
    if bool(lost.any()):
        out.masked_fill_(lost, torch.nan)


def settle(
    x: Float[Tensor, "n V"], targets: Int[Tensor, " n"], found: Found, epsilon: float, out: Float[Tensor, "n V"]
) -> tuple[Float[Tensor, " n"], Float[Tensor, " n"]]:
    r"""Write p into `out` with 0 at the target, which may be `x`; the Fenchel-Young loss and $1 - p_y$, float64.

    Both are sums over the other classes, so nothing cancels when the target is nearly certain.
    """
    place = targets[:, None]
    own = x.gather(1, place).double().sub_(found.peak)[:, 0]
    if found.rows is not None:
        assert found.columns is not None
        assert found.scores is not None
        base = _base(found.scores, found.centre[found.rows, 0], epsilon)
        base.mul_(found.columns != targets[found.rows])
        p = raised(base, epsilon)
        rest = torch.zeros_like(own).index_add_(0, found.rows, p)
        powers = torch.zeros_like(own).index_add_(0, found.rows, base.mul_(p))
        out.zero_()[found.rows, found.columns] = p.to(out.dtype)
    else:
        rest, powers = torch.empty_like(own), torch.empty_like(own)
        for part in pieces(x):
            base = shifted(x[part], found.peak[part], found.centre[part], epsilon, out=out[part]).clamp_(min=0)
            base.scatter_(1, place[part], 0)
            powers[part] = _powers(base, epsilon)
            rest[part] = raised_(base, epsilon).sum(1)
    lost = found.centre.isnan()
    if bool(lost.any()):
        out.masked_fill_(lost, torch.nan)
        rest.masked_fill_(lost[:, 0], torch.nan)
    return _loss(found.centre[:, 0] - own, rest, powers, epsilon), rest


def _powers(base: Tensor, epsilon: float) -> Tensor:
    r"""$\sum_v p_v^\alpha = \sum_v b_v^{\alpha / \epsilon}$ of each row."""
    if epsilon == 1.0:
        return torch.linalg.vector_norm(base, dim=1).square_()
    return power_(base.clone(), 1 / epsilon + 1).sum(1)


def _loss(gap: Tensor, rest: Tensor, powers: Tensor, epsilon: float) -> Tensor:
    r"""The loss, from $c - x_y$, $1 - p_y$ and $\sum_{v \ne y} p_v^\alpha$.

    It is $(c - x_y) - (1 - \sum_v p_v^\alpha) / \alpha$. Of a likely target, $c - x_y$ comes from $1 - p_y$ too.
    """
    alpha, log_own = 1 + epsilon, torch.log1p(-rest.clamp(max=1))
    likely = -torch.expm1(epsilon * log_own) / epsilon + (torch.expm1(alpha * log_own) + powers) / alpha
    own = (1 - epsilon * gap).clamp(min=0).pow(alpha / epsilon)
    unlikely = gap - (1 - own - powers) / alpha
    return torch.where((rest < 0.5) & (own > 0), likely, unlikely).clamp(min=0)


def pieces(x: Tensor) -> Iterator[slice]:
    """Rows that stay in a core's cache together; all at once on other devices."""
    rows = max(1, _CACHED // x.shape[1]) if x.device.type == "cpu" else max(1, len(x))
    for start in range(0, len(x), rows):
        yield slice(start, start + rows)


def shifted(x: Tensor, peak: Tensor, centre: Tensor, epsilon: float, *, out: Tensor | None = None) -> Tensor:
    r"""$1 + \epsilon (x - c)$ as $\epsilon (x - \theta)$, exact near the threshold $\theta = c - 1 / \epsilon$.

    theta is taken off in two parts, the second being what rounding the first leaves.
    """
    theta = centre - 1 / epsilon
    high = (peak + theta).to(x.dtype)
    low = (peak.double() - high + theta).to(x.dtype)
    b = torch.sub(x, high, out=out) if out is not None else x - high
    return b.sub_(low).mul_(epsilon)


def raised(base: Tensor, epsilon: float) -> Tensor:
    r"""$p = b^{1/\epsilon}$."""
    return raised_(base.clone(), epsilon)


def raised_(base: Tensor, epsilon: float) -> Tensor:
    """The same in place."""
    if epsilon == 1.0:
        return base
    return power_(base, 1 / epsilon)


def power_(base: Tensor, exponent: float | int) -> Tensor:
    """`base ** exponent` in place; of whole exponents by products, which are several times faster than a power."""
    whole = round(exponent)
    if abs(exponent - whole) > _WHOLE or not 1 <= whole <= _MOST:
        return base.pow_(exponent)
    if whole == 1:
        return base
    for factor in (2, 3):
        if whole % factor == 0:
            return power_(base, whole // factor).pow_(factor)
    once = base.clone()
    return power_(base, whole - 1).mul_(once)


def slopes_(base: Tensor, epsilon: float) -> Tensor:
    r"""$u = b^{1/\epsilon - 1}$ in place of b, which is not negative; 0 where b is."""
    if epsilon == 1.0:
        return base.sign_()
    return base if epsilon == 0.5 else power_(base, 1 / epsilon - 1)


def _base(scores: Tensor, centre: Tensor, epsilon: float) -> Tensor:
    return (scores - centre).mul_(epsilon).add_(1).clamp_(min=0)


def _start(x: Tensor) -> Tensor:
    """The largest score, the least that c can be; 0 in a row of only `-inf`."""
    peak = x.amax(1, keepdim=True)
    return peak.masked_fill_(peak == -torch.inf, 0.0)


def _bounded(x: Tensor, epsilon: float) -> Tensor:
    """A lower bound of c by steps of Newton's method, monotone from the left; the largest score of a row is 0."""
    c = torch.zeros_like(x[:, :1])
    for _ in range(_BOUND_STEPS):
        c = c + _step(*_sums(torch.add(1 - epsilon * c, x, alpha=epsilon).clamp_(min=0), epsilon), epsilon)
    return c


def _sums(base: Tensor, epsilon: float, *, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Sums of p and of its slope over a row, in `dtype` or that of `base`, which is overwritten."""
    dtype = base.dtype if dtype is None else dtype
    if epsilon == 1.0:
        return base.sum(1, keepdim=True, dtype=dtype), (base > 0).sum(1, keepdim=True).to(dtype)
    if epsilon == 0.5:
        slope = base.sum(1, keepdim=True, dtype=dtype)
        return base.square_().sum(1, keepdim=True, dtype=dtype), slope
    slopes = power_(base.clone(), 1 / epsilon - 1)
    return base.mul_(slopes).sum(1, keepdim=True, dtype=dtype), slopes.sum(1, keepdim=True, dtype=dtype)


def _step(total: Tensor, slope: Tensor, epsilon: float) -> Tensor:
    """Of Newton's method on the root of the sum of p, which is convex in c; 0 where the sum is."""
    step = (total - total.pow(1 - epsilon)) / (epsilon * slope.clamp(min=torch.finfo(slope.dtype).tiny))
    return torch.where(total == 0, 0.0, step)


def _ragged(scores: Tensor, rows: Tensor, centre: Tensor, epsilon: float) -> Tensor:
    """The root c from a list of candidates, in float64."""
    c = centre[:, 0]
    for _ in range(_STEPS):
        base = _base(scores, c[rows], epsilon)
        slopes = slopes_(base.clone(), epsilon)
        slope = torch.zeros_like(c).index_add_(0, rows, slopes)
        step = _step(torch.zeros_like(c).index_add_(0, rows, slopes.mul_(base)), slope, epsilon)
        c = c + step
        if not bool((step.abs() > _EXACT).any()):
            break
    return c[:, None]


def _dense(x: Tensor, peak: Tensor, bound: Tensor, epsilon: float) -> Tensor:
    """The root c from all scores, a piece at a time; the last step with a threshold in two parts."""
    centre, close = bound.double(), max(torch.finfo(x.dtype).eps / 8, _EXACT)
    steps = _FINISH if epsilon > 0.5 else 1  # p of a class at the threshold goes smoothly to 0 up to alpha = 1.5
    for part in pieces(x):
        relative, c = x[part] - peak[part], bound[part]
        memory = torch.empty_like(relative)
        for _ in range(_STEPS):
            base = torch.add(1 - epsilon * c, relative, alpha=epsilon, out=memory).clamp_(min=0)
            step = _step(*_sums(base, epsilon), epsilon)
            c = c + step
            if not bool((step.abs() > 4 * torch.finfo(c.dtype).eps * (1 + c.abs())).any()):
                break
        found = centre[part].copy_(c)
        for _ in range(steps):
            base = shifted(x[part], peak[part], found, epsilon, out=memory).clamp_(min=0)
            total, slope = _sums(base, epsilon, dtype=torch.float64 if steps > 1 else None)
            found.add_(_step(total.double(), slope.double(), epsilon))
            if not bool((((total - 1).abs() > close) & (total > 0)).any()):
                break
    return centre
