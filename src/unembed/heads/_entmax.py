"""The alpha-entmax head: a distribution that gives most tokens exactly 0 (Martins et al., 2020, arXiv:2004.02644).

Shapes: n or * tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unembed import ops
from unembed.heads._base import Head, start_of, uniform_
from unembed.heads._product import product


def _reference(head: Entmax, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
    """Log-probabilities in float64, the threshold by bisection."""
    z = hidden.double() @ head.weight.double().T
    z = z if head.bias is None else z + head.bias.double()
    epsilon = head.alpha - 1
    if epsilon == 0:
        return torch.log_softmax(z, -1)
    scaled = epsilon * z
    high = scaled.amax(-1, keepdim=True)
    low = high - 1
    for _ in range(200):
        tau = (low + high) / 2
        over = (scaled - tau).clamp(min=0).pow(1 / epsilon).sum(-1, keepdim=True) >= 1
        low, high = torch.where(over, tau, low), torch.where(over, high, tau)
    return (scaled - low).clamp(min=0).log() / epsilon


class Entmax(Head):
    r"""$p = \mathrm{entmax}_\alpha(h W^T + b)$: 0 for every token whose score is too far below the best.

    How far is $1 / (\alpha - 1)$ at most. `forward` gives log-probabilities, `-inf` outside the support, and `nll` is
    infinite there. So train it by `losses.fenchel_young`, which is finite, convex in the scores, and 0 where the target
    has probability 1.

    Args:
        in_features: D.
        out_features: V.
        alpha: A number from 1 to 2.5; 1 is the softmax head, 2 sparsemax. It may be set anew while training.
        bias: Whether to add one number a class.
        device: Where the parameters are.
        dtype: Of the parameters.
    """

    names = ("entmax",)
    least_rows = ops.LEAST_ROWS
    normalised = True
    from_linear_exact: ClassVar[bool] = False  # a linear head gives every token a probability

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        alpha: float = 1.5,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        ops.check_alpha(alpha)
        self.alpha = float(alpha)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def options(self) -> dict[str, Any]:
        """As given to `__init__`."""
        return {"alpha": self.alpha, "bias": self.bias is not None}

    def reset_parameters(self) -> None:
        """Draw weight and bias as `nn.Linear` does."""
        uniform_(self.weight, self.in_features)
        if self.bias is not None:
            uniform_(self.bias, self.in_features)

    @property
    def sparse(self) -> bool:
        """Whether there are zeros: for alpha = 1 there are none."""
        return self.alpha > 1

    @property
    def rank_bound(self) -> int | None:
        """That of a linear head for alpha = 1; none otherwise."""
        bound = self.in_features + 1 + (self.bias is not None)
        return min(bound, self.out_features) if self.alpha == 1 else None

    def scores(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """What entmax is applied to, in the dtype of the product."""
        return product(hidden, self.weight, self.bias)

    def forward(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Log-probabilities, float32 or wider; `-inf` is a probability of exactly 0."""
        scores = self.scores(hidden)
        wide = ops.widened(scores.dtype)
        if self.alpha == 1:
            return ops.log_softmax(scores.to(wide))
        # In float64 where there is one: a small p, and with it its logarithm, would be 0 in float32.
        p = ops.entmax(scores.to(wide if scores.device.type == "mps" else torch.float64), self.alpha)
        return torch.where(p == 0, -torch.inf, torch.where(p == 0, 1.0, p).log()).to(wide)

    def example_targets(self, hidden: Tensor) -> Tensor:
        """Draws of the head: any other target may have probability 0, and an infinite loss."""
        return self.sample(hidden)

    def score_options(self) -> dict[str, Any]:
        """What the ops of the Fenchel-Young loss take beside hidden states and matrix."""
        return {"alpha": self.alpha, "bias": self.bias}

    @classmethod
    def from_linear(cls, linear: Any, *, alpha: float = 1.5) -> Self:
        """A head with the matrix of a linear one: the order of the tokens is the same, the distribution is another.

        For alpha = 1 it is the same too. Otherwise there is no start that is: the linear head gives every token a
        probability.

        Args:
            linear: An `nn.Linear`, or a `Linear` head without soft-cap; its scale goes into weight and bias.
            alpha: Of the new head.

        Raises:
            ValueError: If the linear head has a soft-cap.
        """
        weight, bias = start_of(linear, cls)
        sizes = (linear.in_features, linear.out_features)
        head = cls(*sizes, alpha=alpha, bias=bias is not None, device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            head.weight.copy_(weight)
            if head.bias is not None and bias is not None:
                head.bias.copy_(bias)
        return head

    @classmethod
    def examples(cls, in_features: int, out_features: int) -> Sequence[Self]:
        """Of each way that entmax goes."""
        return [
            cls(in_features, out_features, alpha=1.5, bias=True),
            cls(in_features, out_features, alpha=2.0),
            cls(in_features, out_features, alpha=1.2),
        ]
