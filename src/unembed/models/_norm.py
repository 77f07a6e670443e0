"""The final norm of a model, as a formula.

Shapes: N tokens, D hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

NormKind = Literal["rms", "layer"]


@dataclass(frozen=True, eq=False)
class FinalNorm:
    r"""What turns the last hidden state of the body into the input of the head.

    $$n(x) = g \cdot \frac{x - m}{\sqrt{\overline{(x - m)^2} + \epsilon}} + \beta$$
    with $m$ the mean of $x$ for a layer norm and 0 for an RMS norm (Zhang and Sennrich, 2019, arXiv:1910.07467).

    Args:
        kind: Whether the mean is taken out.
        weight: The effective gain `g` in float32: Gemma's `1 + w` is folded in. None for 1.
        bias: `beta`, None for 0.
        eps: Added to the mean square.
    """

    kind: NormKind
    weight: Float[Tensor, " D"] | None
    bias: Float[Tensor, " D"] | None
    eps: float

    def __call__(self, x: Float[Tensor, "*N D"]) -> Float[Tensor, "*N D"]:
        """The normalised `x`, in float32 or wider whatever its dtype."""
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)
        if self.weight is not None:
            x = x * self.weight
        return x if self.bias is None else x + self.bias

    @property
    def tensors(self) -> dict[str, Float[Tensor, " D"]]:
        """`weight` and `bias`, those that are there."""
        named = {"weight": self.weight, "bias": self.bias}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def to(self, device: str | torch.device) -> FinalNorm:
        """The same norm with its tensors on `device`."""
        return replace(
            self,
            weight=None if self.weight is None else self.weight.to(device),
            bias=None if self.bias is None else self.bias.to(device),
        )
