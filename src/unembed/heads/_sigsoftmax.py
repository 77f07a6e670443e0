"""Sigsoftmax (Kanai et al., 2018, arXiv:1805.10829): scores that no rank of `W` bounds, at the cost of a softmax.

Shapes: n or * tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unembed import ops
from unembed.heads._base import EXACT, Head, start_of, uniform_
from unembed.heads._product import product

_SATURATED = 14.0  # |log sigmoid| is below 1e-6 from here on


def _reference(head: Sigsoftmax, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
    """Scores as the formula has them, in float64."""
    u = hidden.double() @ head.weight.double().T
    u = u if head.bias is None else u + head.bias.double()
    return u - torch.logaddexp(torch.zeros_like(u), -u)


class Sigsoftmax(Head):
    r"""$p \propto e^u \sigma(u)$ with $u = h W^T + b$, as scores $z = u + \log\sigma(u)$.

    The product itself is never formed: far below zero both factors are 0 in floating point and every class would have
    the probability 0 / 0. `z` is about `u` for large u and `2 u` for very negative u.

    Args:
        in_features: D.
        out_features: V.
        bias: Whether to add one number a class. Unlike in a softmax, the same number on all classes matters.
        device: Where the parameters are.
        dtype: Of the parameters.
    """

    names = ("sigsoftmax",)
    least_rows = ops.LEAST_ROWS

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def options(self) -> dict[str, Any]:
        """As given to `__init__`."""
        return {"bias": self.bias is not None}

    def reset_parameters(self) -> None:
        """Draw weight and bias as `nn.Linear` does."""
        uniform_(self.weight, self.in_features)
        if self.bias is not None:
            uniform_(self.bias, self.in_features)

    def forward(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Scores, float32 or wider: the bias of a warm start is large, and would cost a narrow dtype its digits."""
        u = product(hidden, self.weight)
        u = u.to(ops.widened(u.dtype))
        u = u if self.bias is None else u + self.bias
        return u + nn.functional.logsigmoid(u)

    def terms(
        self,
        hidden: Float[Tensor, "*n D"],
        targets: Int[Tensor, "*n"],
        *,
        ignore_index: int = -100,
        spread: Float[Tensor, " V"] | None = None,
        chunk: int | None = None,
    ) -> tuple[Float[Tensor, "*n"], ...]:
        """By `ops.linear_terms`."""
        return ops.linear_terms(
            hidden,
            self.weight,
            targets,
            bias=self.bias,
            sigsoftmax=True,
            ignore_index=ignore_index,
            spread=spread,
            chunk=chunk,
        )

    def loss(
        self,
        hidden: Float[Tensor, "n D"],
        targets: Int[Tensor, " n"],
        coefficients: Float[Tensor, "n 4"],
        *,
        ignore_index: int = -100,
        spread: Float[Tensor, " V"] | None = None,
        chunk: int | None = None,
    ) -> Float[Tensor, ""]:
        """By `ops.linear_loss`: three products, gradients included."""
        return ops.linear_loss(
            hidden,
            self.weight,
            targets,
            coefficients,
            bias=self.bias,
            sigsoftmax=True,
            ignore_index=ignore_index,
            spread=spread,
            chunk=chunk,
        )

    @classmethod
    def from_linear(cls, linear: Any, *, norm: float | None = None) -> Self:
        r"""A sigsoftmax head that starts as the linear head, to 1e-6 nats and the rounding of its scores.

        The bias is raised on all classes by $c = 14 + \max_v (|w_v| \rho - b_v)$ (at least 14), $\rho$ the norm of the
        hidden states. Then $u \ge 14$, so $|\log\sigma(u)| < 10^{-6}$ and z is the linear head's score plus c, which
        softmax does not see. What c costs: scores are rounded at its size (c = 64 in float32: 4e-6 nats), and a bias
        that is not constant is rounded so in the dtype of the head. The head leaves the linear regime slowly, since
        the slope of log sigmoid is that small too; a smaller `norm` starts less exactly and learns sooner. Warns where
        the rounding of the bias comes to more than 1e-5 nats.

        Args:
            linear: An `nn.Linear`, or a `Linear` head without soft-cap; its scale goes into weight and bias.
            norm: Largest norm of a hidden state; $2\sqrt{D}$ when None, twice that of a normalised state.

        Raises:
            ValueError: If the linear head has a soft-cap.
        """
        weight, bias = start_of(linear, cls)
        norm = 2 * math.sqrt(linear.in_features) if norm is None else norm
        head = cls(linear.in_features, linear.out_features, bias=True, device=weight.device, dtype=weight.dtype)
        wide = ops.widened(weight.dtype)
        wide_bias = weight.new_zeros(len(weight), dtype=wide) if bias is None else bias.to(wide)
        reach = torch.linalg.vector_norm(weight, dim=1, dtype=wide) * norm
        assert head.bias is not None
        with torch.no_grad():
            head.weight.copy_(weight)
            raised = wide_bias + (_SATURATED + _deepest(reach - wide_bias))
            head.bias.copy_(raised)
        gap = _rounded_off(head.bias.detach().to(wide), raised)
        if gap > EXACT:
            warnings.warn(
                f"{cls.__name__} starts up to {gap:.1e} nats from the linear head: {head.bias.dtype} rounds its bias "
                "that far; a smaller `norm` or a wider dtype brings it nearer.",
                stacklevel=2,
            )
        return head

    @classmethod
    def examples(cls, in_features: int, out_features: int) -> Sequence[Self]:
        """Without and with a bias."""
        return [cls(in_features, out_features), cls(in_features, out_features, bias=True)]


def _rounded_off(bias: Tensor, wanted: Tensor) -> float:
    """How far two classes have moved against each other; softmax does not see what all share. 0 on the meta device."""
    if bias.is_meta:
        return 0.0
    off = (bias - wanted)[wanted != -torch.inf]
    return float(off.amax() - off.amin()) if len(off) else 0.0


def _deepest(depth: Tensor) -> Tensor:
    """The largest depth below zero of a class that can have a probability: a bias of `-inf` stays one."""
    return torch.where(depth == torch.inf, 0.0, depth).amax().clamp(min=0).ceil()
