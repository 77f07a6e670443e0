"""Scores of a linear head, and norms that survive a long sum.

Shapes: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor


def linear_scores(
    hidden: Float[Tensor, "*N D"],
    weight: Float[Tensor, "V D"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    out: Float[Tensor, "N V"] | None = None,
) -> Float[Tensor, "*N V"]:
    r"""Scores of a linear head, in float32 or wider whatever the input dtypes.

    $$z = \mathrm{cap}(s\,(h W^T + b)), \qquad \mathrm{cap}(x) = c \tanh(x / c)$$

    Args:
        hidden: Hidden states after the final norm.
        weight: The unembedding matrix.
        bias: Added before scale and soft-cap.
        softcap: `c`; no cap when None.
        scale: `s`: `logit_scale`, or 1 / `logits_scaling`.
        out: Memory for the result of two-dimensional `hidden`, in the dtype of the result; no gradients then.

    Raises:
        ValueError: If `softcap` is not positive and finite.
    """
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"`softcap` must be positive and finite, got {softcap}; None means no cap.")
    dtype = torch.promote_types(torch.promote_types(hidden.dtype, weight.dtype), torch.float32)
    if out is not None:
        torch.mm(hidden.to(dtype), weight.to(dtype).T, out=out)
        if bias is not None:
            out.add_(bias.to(dtype))
        if scale != 1.0:
            out.mul_(scale)
        return out if softcap is None else out.div_(softcap).tanh_().mul_(softcap)
    scores = torch.nn.functional.linear(hidden.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))
    if scale != 1.0:
        scores = scores * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    return scores


def squared_norms(x: Float[Tensor, "*N V"], *, piece: int = 1 << 14) -> Float[Tensor, "*N"]:
    """Squared norm of each row, in float64.

    `x.norm()` of a long float32 row is biased on a CPU (-4e-4 at 1e7 elements), so pieces of a row are summed in
    float32 and the pieces in float64: relative error about 1e-6 at any length.

    Args:
        x: Rows of any float dtype.
        piece: Elements summed in float32 before the float64 sum takes over.
    """
    total = torch.zeros(x.shape[:-1], dtype=torch.float64)
    for part in x.split(piece, dim=-1):
        total += torch.linalg.vector_norm(part, dim=-1, dtype=widened(part.dtype)).cpu().to(torch.float64).square()
    return total


def widened(dtype: torch.dtype) -> torch.dtype:
    """The dtype sums are held in: float32 or wider."""
    return torch.promote_types(dtype, torch.float32)
