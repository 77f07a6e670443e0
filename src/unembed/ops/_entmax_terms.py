r"""alpha-entmax and its Fenchel-Young loss as definitions, with derivatives exact up to the third order.

With $\epsilon = \alpha - 1$ every formula is written in the centred form

$$p_v = [1 + \epsilon (x_v - c)]_+^{1/\epsilon}, \qquad \sum_v p_v = 1$$

which goes over into $e^{x_v - c}$, c the log-sum-exp, as alpha goes to 1, without a singularity. c is at least the
largest score; the threshold of the usual form is $\tau = \epsilon c - 1$.

Shapes: n rows, V classes.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unembed.ops._scores import widened

_SERIES = 0.1  # below it log1p(t) / t comes from its series: the derivatives of the quotient cancel there
_TERMS = 18  # of the series: 0.1^18 / 19 is below the rounding of float64
_STEPS = 40  # of Newton's method; one from the left divides the product of excess and slope by 4 at least
_CLOSE = 1e-9  # of the sum of p to 1, after which the two last steps do the rest


def probabilities(
    x: Float[Tensor, "n V"], epsilon: Float[Tensor, "#n 1"], *, convex: bool = False
) -> tuple[Float[Tensor, "n V"], Float[Tensor, "n 1"]]:
    """Probabilities p of each row, and c over its largest score; a row of only `-inf` has p = 0 and c = 0.

    The root c is found without a derivative. Two steps of Newton's method that have one come after it: one makes first
    derivatives right, since at a root a step no longer depends on where it began, two make all up to the third.

    Args:
        x: Scores, float32 or wider.
        epsilon: alpha - 1, not negative.
        convex: Whether it is known to be 1 at most, which halves the search.
    """
    steps = _STEPS * (1 if convex else 2)
    gone = x.detach() == -torch.inf
    none = gone.all(1, keepdim=True)
    peak = x.detach().amax(1, keepdim=True)
    peak = torch.where(none, 0.0, peak)
    x = torch.where(gone, 0.0, x - peak)
    with torch.no_grad():
        search = searched if torch.compiler.is_compiling() else _search
        c = search(x.detach(), gone, epsilon.detach(), steps)
    for _ in range(2):
        p, u = _powers(x, gone, c, epsilon)
        total, slope = p.sum(1, keepdim=True), u.sum(1, keepdim=True)
        c = c + torch.where(none, 1.0, total).log() * total / torch.where(none, 1.0, slope)
    return _powers(x, gone, c, epsilon)[0], c


def defined(
    x: Float[Tensor, "n V"], alpha: float | Float[Tensor, "#n 1"]
) -> tuple[Float[Tensor, "n V"], Float[Tensor, "n 1"], Float[Tensor, "#n 1"]]:
    """p, c and alpha of each row, in float32 or wider, and where alpha may be above 2 in float64 if the device has it.

    There the slope of p at the border of the support is infinite, which costs a narrow dtype half of its digits.
    """
    convex = not isinstance(alpha, Tensor) and alpha <= 2
    narrow = convex or x.device.type == "mps"
    wide = x.to(widened(x.dtype) if narrow else torch.float64)
    exponent = alpha.to(wide.dtype) if isinstance(alpha, Tensor) else wide.new_full((1, 1), alpha)
    return *probabilities(wide, exponent - 1, convex=convex), exponent


def tsallis(p: Float[Tensor, "n V"], alpha: Float[Tensor, "#n 1"]) -> Float[Tensor, "n 1"]:
    r"""$(1 - \sum_v p_v^\alpha) / \alpha$, which is $\epsilon$ times the Tsallis entropy of each row.

    The Fenchel-Young loss $\langle p - e_y, x \rangle + H_\alpha(p)$ is $(c - x_y)$ minus this: what is singular in the
    entropy cancels.
    """
    powers = torch.where(p == 0, 0.0, torch.where(p == 0, 1.0, p) ** alpha)
    return (1 - powers.sum(1, keepdim=True)) / alpha


def _powers(x: Tensor, gone: Tensor, c: Tensor, epsilon: Tensor) -> tuple[Tensor, Tensor]:
    r"""$p = b^{1/\epsilon}$ and $u = b^{1/\epsilon - 1} = p^{1 - \epsilon}$, $b = [1 + \epsilon (x - c)]_+$."""
    y = x - c
    out = gone | (epsilon * y <= -1)
    log_p = _log_power(torch.where(out, 0.0, y), epsilon)
    return torch.where(out, 0.0, log_p.exp()), torch.where(out, 0.0, ((1 - epsilon) * log_p).exp())


def _log_power(y: Tensor, epsilon: Tensor) -> Tensor:
    r"""$\log(1 + \epsilon y) / \epsilon$, which is y where epsilon is 0."""
    t = epsilon * y
    near = t.abs() < _SERIES
    small = torch.where(near, t, 0.0)
    series = torch.full_like(small, 1 / (_TERMS + 1))
    for power in range(_TERMS, 0, -1):
        series = 1 / power - small * series
    far = torch.where(near, 1.0, t)
    return y * torch.where(near, series, torch.log1p(far) / far)


def _search(x: Tensor, gone: Tensor, epsilon: Tensor, steps: int) -> Tensor:
    """The root c of each row whose largest score is 0, no derivatives: Newton's method in a bracket.

    Up to alpha = 2 it is monotone from the left, since the norm that it finds the root of is convex in c. Beyond, every
    other step halves the bracket.
    """
    low = torch.zeros_like(x[:, :1])
    log_v = torch.full_like(low, x.shape[1]).log()
    high = low + power_log(log_v, -epsilon)
    c = low
    for step in range(steps):
        p, u = _powers(x, gone, c, epsilon)
        total, slope = p.sum(1, keepdim=True), u.sum(1, keepdim=True)
        if _is_close(total):
            break
        low, high = torch.where(total >= 1, c, low), torch.where(total < 1, c, high)
        log_total = torch.where(total == 0, 1.0, total).log()
        moved = c + power_log(log_total, epsilon) * torch.exp((1 - epsilon) * log_total) / slope
        fits = (moved >= low) & (moved <= high)
        c = torch.where(fits & ((epsilon <= 1) | (step % 2 == 0)), moved, (low + high) / 2)
    return c


# The schema is spelt out: run-time type checks hide the annotations from torch.
@torch.library.custom_op(
    "unembed::entmax_centre",
    mutates_args=(),
    schema="(Tensor x, Tensor gone, Tensor epsilon, int steps) -> Tensor",
)
def searched(x: Tensor, gone: Tensor, epsilon: Tensor, steps: int) -> Tensor:
    """The search as one node of a compiled graph, where its loop would be unrolled."""
    return _search(x, gone, epsilon, steps)


@searched.register_fake
def _(x: Tensor, _gone: Tensor, _epsilon: Tensor, _steps: int) -> Tensor:
    return x.new_empty(x.shape[0], 1)


@searched.register_vmap
def _(info: Any, in_dims: Any, *given: Any) -> tuple[Tensor, int]:
    """All examples at once: rows are independent."""
    *tensors, steps = given
    pairs = zip(tensors, in_dims, strict=False)
    x, gone, epsilon = (one.unsqueeze(0) if dim is None else one.movedim(dim, 0) for one, dim in pairs)
    size, rows = info.batch_size, x.shape[1]
    flat = [one.expand(size, rows, one.shape[2]).reshape(size * rows, -1) for one in (x, gone, epsilon)]
    return searched(*flat, steps).reshape(size, rows, 1), 0


def _is_close(total: Tensor) -> bool:
    """Whether every row with a score has found its root, where values can be looked at."""
    try:
        return bool((((total - 1).abs() < _CLOSE) | (total == 0)).all())
    except RuntimeError:  # vmap, a batch of gradients
        return False


def power_log(log: Tensor, epsilon: Tensor) -> Tensor:
    r"""$(e^{\epsilon l} - 1) / \epsilon$, which is l where epsilon is 0."""
    flat = epsilon == 0
    return torch.where(flat, log, torch.expm1(epsilon * log) / torch.where(flat, 1.0, epsilon))
