"""Draws through Gumbel noise: a relaxed one that has a gradient, and exact ones without replacement.

Shapes: any; one dimension holds the V classes of a row.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unembed.ops._scores import widened
from unembed.ops._softmax import class_count, excluded_from, log_softmax, shifted_from, softmax

_BITS = 52  # of a uniform draw: with the half added it fills the 53 of float64


def gumbel_softmax(
    x: Float[Tensor, ...],
    temperature: float | Float[Tensor, ...] = 1.0,
    *,
    hard: bool = False,
    dim: int = -1,
    mask: Bool[Tensor, ...] | None = None,
    generator: torch.Generator | None = None,
) -> Float[Tensor, ...]:
    r"""$\mathrm{softmax}((x + g) / T)$ with standard Gumbel noise g (Jang et al., 2017, arXiv:1611.01144).

    The largest entry is a draw from `softmax(x)`, whatever T. Noise is finite for every draw and dtype, so it makes no
    row NaN. Edges are those of `softmax`: `T = 0` is the one-hot draw, a row without any score is zeros.

    Args:
        x: Scores.
        temperature: T, a number or a tensor, 0 and infinity included.
        hard: Whether to return the one-hot draw, with the gradient of the relaxed one (straight-through).
        dim: The dimension of the classes.
        mask: True where a class takes part; broadcasts to `x`.
        generator: Of the noise; torch.compile takes none.

    Raises:
        ValueError: As for `softmax`.
    """
    excluded = excluded_from(x, mask)
    shifted = shifted_from(x, excluded, dim)  # or noise would be rounded at the size of an offset
    noisy = shifted + gumbel_noise(shifted, generator).to(shifted.dtype)
    soft = softmax(noisy, dim, temperature=temperature, mask=~excluded)
    if not hard:
        return soft.to(x.dtype)
    drawn = softmax(noisy.detach(), dim, temperature=0.0, mask=~excluded)
    return (drawn + (soft - soft.detach())).to(x.dtype)  # in this order the sum is exact


def gumbel_topk(
    x: Float[Tensor, ...],
    k: int,
    *,
    dim: int = -1,
    mask: Bool[Tensor, ...] | None = None,
    generator: torch.Generator | None = None,
) -> tuple[Int[Tensor, ...], Float[Tensor, ...]]:
    """K classes drawn one after the other without replacement from `softmax(x)` (Kool et al., 2019, arXiv:1903.06059).

    Args:
        x: Scores; `-inf` is never drawn.
        k: Classes to draw.
        dim: The dimension of the classes.
        mask: True where a class takes part; broadcasts to `x`.
        generator: Of the noise; torch.compile takes none.

    Returns:
        The classes in the order they were drawn, and their perturbed log-probabilities `log p + g`, from which
        importance weights can be made, in float32 or wider; k stands in the place of V. Where a row has fewer than k
        classes that take part, -1 and `-inf` stand for the missing ones; a row with NaN is -1 and NaN.

    Raises:
        ValueError: If `k` is not in [1, V], or as for `softmax`.
    """
    if not 1 <= k <= class_count(x, dim):
        raise ValueError(f"`k` must lie in [1, {class_count(x, dim)}], got {k}.")
    if not x.is_floating_point():
        raise ValueError(f"`x` must be floating point, got {x.dtype}.")
    log_p = log_softmax(x.to(widened(x.dtype)), dim, mask=mask)
    found = (log_p + gumbel_noise(log_p, generator)).topk(k, dim)
    return torch.where(found.values > -torch.inf, found.indices, -1), found.values.to(log_p.dtype)


def gumbel_noise(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Standard Gumbel noise `-log E`, E exponential, in the shape of `like`; float64 where the device has it.

    The uniform draws below are the odd multiples of 2^-53, so E is never 0 and the noise lies in [-3.61, 36.8]. From
    float32 draws it would end at 16.6, and a class of less than that probability could never win. They are made from
    integers since torch.compile makes float64 draws from float32 ones.
    """
    wide = torch.float32 if like.device.type == "mps" else torch.float64
    drawn = torch.randint(1 << _BITS, like.shape, device=like.device, generator=generator)
    uniform = (drawn.to(wide) + 0.5) * 2.0**-_BITS
    # float32 rounds the largest ones to 1, of which E is infinite.
    waiting = uniform.clamp(max=1 - torch.finfo(wide).eps / 2).neg_().log1p_().neg_()
    return waiting.log_().neg_()
