"""Softmax of an increasing function of the scores (Ganea et al., 2019, arXiv:1902.08077): no rank of `W` bounds it.

Shapes: n or * tokens, D hidden size, V vocabulary, S segments of the function.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unembed import ops
from unembed.heads._base import Head, start_of, uniform_
from unembed.heads._product import product

_UNIT = math.log(math.expm1(1.0))  # softplus of this is 1


def _reference(head: MonotonicSoftmax, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
    """Scores as the formula has them, in float64: the integral of the slope from 0, a segment at a time."""
    x = hidden.double() @ head.weight.double().T
    x = x if head.bias is None else x + head.bias.double()
    slopes = torch.log1p(torch.exp(head.slopes.double() + _UNIT))
    inner = torch.linspace(-head.limit, head.limit, head.knots, dtype=torch.float64)[1:-1].tolist()
    total = torch.zeros_like(x)
    for slope, low, high in zip(slopes, [-math.inf, *inner], [*inner, math.inf], strict=True):
        total = total + slope * (x.clamp(low, high) - min(max(0.0, low), high))
    return total


class MonotonicSoftmax(Head):
    r"""$z = f(h W^T + b)$ with one learned, increasing, piecewise linear f for all classes, $f(0) = 0$.

    The knots of f are even from `-limit` to `limit`; on segment i its slope is
    $\mathrm{softplus}(a_i + \log(e - 1)) > 0$, a = `slopes` [S]. The first and the last segment go on beyond the ends.
    At $a = 0$, the start, f is the identity in any dtype.

    Args:
        in_features: D.
        out_features: V.
        knots: Points between which f is linear, S + 1 with the two ends.
        limit: Half the width of the grid, in nats.
        bias: Whether to add one number a class before f.
        device: Where the parameters are.
        dtype: Of the parameters.
    """

    names = ("monotonic",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        knots: int = 33,
        limit: float = 32.0,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        if knots < 2:
            raise ValueError(f"`knots` must be at least 2, got {knots}.")
        if not 0 < limit < math.inf:
            raise ValueError(f"`limit` must be positive and finite, got {limit}.")
        self.knots, self.limit = knots, limit
        like = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **like))
        self.slopes = nn.Parameter(torch.empty(knots - 1, **like))
        self.bias = nn.Parameter(torch.empty(out_features, **like)) if bias else None
        self.reset_parameters()

    def options(self) -> dict[str, Any]:
        """As given to `__init__`."""
        return {"knots": self.knots, "limit": self.limit, "bias": self.bias is not None}

    def reset_parameters(self) -> None:
        """Draw weight and bias as `nn.Linear` does; f is the identity."""
        uniform_(self.weight, self.in_features)
        nn.init.zeros_(self.slopes)
        if self.bias is not None:
            uniform_(self.bias, self.in_features)

    @property
    def alive(self) -> int:
        """Scores before and after f, and the segment of each."""
        return 3 * self.out_features

    def flops(self) -> int:
        """`D V` multiply-adds, one more a class, and finding its segment."""
        return 2 * self.in_features * self.out_features + 5 * self.out_features

    def forward(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Scores, float32 or wider."""
        x = product(hidden, self.weight)
        x = x.to(ops.widened(x.dtype))
        if self.bias is None:
            return self.function(x)
        x = x + self.bias
        out = x == -torch.inf  # these stay out; in f they would put 0 * inf into the gradient of a slope
        return torch.where(out, -torch.inf, self.function(torch.where(out, 0.0, x)))

    def function(self, x: Float[Tensor, "*n"]) -> Float[Tensor, "*n"]:
        """f, at finite x of at least one dimension."""
        slopes, constants = self._lines(x.dtype)
        with torch.no_grad():  # in which segment is no matter of derivatives
            segment = (x + self.limit).mul_((self.knots - 1) / (2 * self.limit))
            segment = segment.clamp_(0, self.knots - 2).long().clamp_(0, self.knots - 2)  # the second is for NaN
        # A table a row: the sums of its gradient go on side by side, not all into the same few numbers.
        rows = (*x.shape[:-1], self.knots - 1)
        return torch.addcmul(constants.expand(rows).gather(-1, segment), slopes.expand(rows).gather(-1, segment), x)

    def _lines(self, dtype: torch.dtype) -> tuple[Float[Tensor, " S"], Float[Tensor, " S"]]:
        """Slope and constant of the line of each segment.

        Lines meet at the knots t: $c_i - c_{i-1} = -(s_i - s_{i-1}) t_i$. Equal slopes so give equal constants, to the
        last bit. The line in the middle goes through 0.
        """
        slopes = nn.functional.softplus(self.slopes.to(dtype) + _UNIT)
        knots = torch.linspace(-self.limit, self.limit, self.knots, dtype=dtype, device=slopes.device)[1:-1]
        steps = torch.cumsum(-slopes.diff() * knots, 0)
        constants = torch.cat([steps.new_zeros(1), steps])
        return slopes, constants - constants[(self.knots - 1) // 2]

    @classmethod
    def from_linear(cls, linear: Any, *, knots: int = 33, limit: float = 32.0) -> Self:
        """A head that starts as the linear head, exactly: f is the identity.

        Args:
            linear: An `nn.Linear`, or a `Linear` head without soft-cap; its scale goes into weight and bias.
            knots: As in `__init__`.
            limit: As in `__init__`.

        Raises:
            ValueError: If the linear head has a soft-cap.
        """
        weight, bias = start_of(linear, cls)
        like = {"device": weight.device, "dtype": weight.dtype}
        options = {"knots": knots, "limit": limit, "bias": bias is not None}
        head = cls(linear.in_features, linear.out_features, **options, **like)
        with torch.no_grad():
            head.weight.copy_(weight)
            if head.bias is not None and bias is not None:
                head.bias.copy_(bias)
        return head

    @classmethod
    def examples(cls, in_features: int, out_features: int) -> Sequence[Self]:
        """As it starts, and with a curve and a bias."""
        curved = cls(in_features, out_features, knots=6, limit=1.5, bias=True)
        with torch.no_grad():
            curved.slopes.copy_(torch.linspace(-1.5, 2.0, 5))
        return [cls(in_features, out_features), curved]
