"""The linear head: `z = softcap(scale * (h W^T + b))`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unembed import ops
from unembed.heads._base import Head, check_linear, uniform_
from unembed.heads._product import product


class Linear(Head):
    """What `lm_head` is in most models; tie it by giving it the weight of the embedding.

    Args:
        in_features: D.
        out_features: V.
        bias: Whether to add one number a class.
        softcap: c of `c tanh(z / c)` on the scores; none when None.
        scale: Factor on the scores.
        device: Where the parameters are.
        dtype: Of the parameters.
    """

    names = ("linear",)
    least_rows = ops.LEAST_ROWS

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = False,
        softcap: float | None = None,
        scale: float = 1.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        if softcap is not None and not softcap > 0:
            raise ValueError(f"`softcap` must be positive, got {softcap}; None means no cap.")
        self.softcap, self.scale = softcap, scale
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None
        self.reset_parameters()

    def options(self) -> dict[str, Any]:
        """As given to `__init__`."""
        return {"bias": self.bias is not None, "softcap": self.softcap, "scale": self.scale}

    def reset_parameters(self) -> None:
        """Draw weight and bias as `nn.Linear` does."""
        uniform_(self.weight, self.in_features)
        if self.bias is not None:
            uniform_(self.bias, self.in_features)

    @property
    def rank_bound(self) -> int | None:
        """D + 1, one more for a bias; none under a soft-cap."""
        return (
            None if self.softcap is not None else min(self.in_features + 1 + (self.bias is not None), self.out_features)
        )

    def forward(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Scores, in the dtype of the product."""
        scores = product(hidden, self.weight, self.bias)
        if self.scale != 1.0:
            scores = scores * self.scale
        if self.softcap is None:
            return scores
        scores = torch.tanh(scores / self.softcap) * self.softcap
        # The cap would lift -inf to -c; what the bias takes out stays out.
        return scores if self.bias is None else torch.where(self.bias == -torch.inf, -torch.inf, scores)

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
            hidden, self.weight, targets, ignore_index=ignore_index, spread=spread, chunk=chunk, **self.score_options()
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
            ignore_index=ignore_index,
            spread=spread,
            chunk=chunk,
            **self.score_options(),
        )

    def score_options(self, temperature: float = 1.0) -> dict[str, Any]:
        """What the ops take beside hidden states and matrix, for scores over a temperature."""
        if self.weight.shape != (self.out_features, self.in_features):
            wanted = (self.out_features, self.in_features)
            raise ValueError(f"`weight` must be {wanted}, got {tuple(self.weight.shape)}: tied to another vocabulary?")
        cap = None if self.softcap is None else self.softcap / temperature
        return {"bias": self.bias, "softcap": cap, "scale": self.scale / temperature}

    @classmethod
    def from_linear(cls, linear: nn.Linear | Linear) -> Self:
        """A copy of a linear layer as a head."""
        check_linear(linear, cls)
        softcap, scale = getattr(linear, "softcap", None), getattr(linear, "scale", 1.0)
        weight = linear.weight
        head = cls(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            softcap=softcap,
            scale=scale,
            device=weight.device,
            dtype=weight.dtype,
        )
        with torch.no_grad():
            head.weight.copy_(weight)
            if head.bias is not None and linear.bias is not None:
                head.bias.copy_(linear.bias)
        return head

    @classmethod
    def examples(cls, in_features: int, out_features: int) -> Sequence[Self]:
        """Plain, and with everything."""
        return [cls(in_features, out_features), cls(in_features, out_features, bias=True, softcap=3.0, scale=0.7)]
