"""Products of hidden states and parameters, whose dtypes may differ, and what is made of them in a wide one.

Shapes: n or * tokens, D width, V rows.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unembed import ops
from unembed.ops._linear_nll import as_autocast


def product(
    hidden: Float[Tensor, "*n D"], weight: Float[Tensor, "V D"], bias: Float[Tensor, " V"] | None = None
) -> Float[Tensor, "*n V"]:
    """`h W^T + b` in the wider dtype of h and W, or in that of autocast."""
    hidden, weight = alike(hidden, weight)
    return nn.functional.linear(hidden, weight, None if bias is None else bias.to(hidden.dtype))


def alike(one: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
    """Both in one dtype, as the ops have it: that of autocast, else the wider of the two."""
    if one.dtype == other.dtype:
        return one, other
    if not one.is_meta:  # autocast knows no such device
        one, other, _ = as_autocast(one, other, None)
    dtype = torch.promote_types(one.dtype, other.dtype)
    return one.to(dtype), other.to(dtype)


def log_softmax(scores: Float[Tensor, "*n V"]) -> Float[Tensor, "*n V"]:
    """Over the last dimension, float32 or wider."""
    return torch.log_softmax(scores.to(ops.widened(scores.dtype)), -1)
