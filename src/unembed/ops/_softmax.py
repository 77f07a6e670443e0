"""Softmax and its logarithm with a temperature and a mask, defined at every edge.

Shapes: any; one dimension holds the V classes of a row.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unembed.ops._require import require
from unembed.ops._scores import widened


def _reference(
    x: Float[Tensor, ...],
    dim: int = -1,
    *,
    temperature: float | Float[Tensor, ...] = 1.0,
    mask: Bool[Tensor, ...] | None = None,
) -> Float[Tensor, ...]:
    """What `softmax` means, in float64, a row at a time."""
    found = torch.zeros_like(x, dtype=torch.float64).movedim(dim, -1).contiguous()
    if not x.numel():
        return found.movedim(-1, dim)
    spread = torch.as_tensor(temperature, dtype=torch.float64)
    keep = torch.ones_like(x, dtype=torch.bool) if mask is None else mask
    given = [torch.broadcast_to(tensor, x.shape).movedim(dim, -1) for tensor in (x.double(), spread, keep)]
    rows = (tensor.reshape(-1, found.shape[-1]) for tensor in (found, *given))
    for row, everything, (t, *_), part in zip(*rows, strict=True):
        classes = (part & (everything != -torch.inf)).nonzero().flatten()
        if not len(classes):
            continue
        scores = everything[classes]
        if not scores.max() < torch.inf:
            row[classes] = torch.nan
        elif t == 0:
            row[classes[(scores == scores.max()).nonzero()[0]]] = 1
        else:
            weights = ((scores - scores.max()) / t).exp()
            row[classes] = weights / weights.sum()
    return found.movedim(-1, dim)


def softmax(
    x: Float[Tensor, ...],
    dim: int = -1,
    *,
    temperature: float | Float[Tensor, ...] = 1.0,
    mask: Bool[Tensor, ...] | None = None,
) -> Float[Tensor, ...]:
    r"""$p_v \propto e^{x_v / T}$ along `dim`, computed in float32 or wider, in the dtype of `x`.

    A score of `-inf` or outside the mask has probability 0 and gradient 0; a row without any score is all zeros with
    zero gradients. `T = 0` gives 1 to the largest score (the first of equal ones), `T = inf` the same to all that take
    part; their gradients are 0. A score of NaN or `+inf` makes all that take part in its row NaN.

    Args:
        x: Scores.
        dim: The dimension of the classes.
        temperature: T, a number or a tensor that broadcasts to `x` with size 1 along `dim`; it may learn.
        mask: True where a class takes part; broadcasts to `x`.

    Raises:
        ValueError: If `x` is not floating point, or a temperature is negative or NaN, or one does not broadcast.
    """
    if _is_plain(x, temperature, mask):
        p = torch.softmax(x, dim, dtype=widened(x.dtype))
        if not bool(p.select(dim, 0).isnan().any()):  # all NaN is what a row of only -inf comes to
            return p.to(x.dtype)
    scores, excluded = _at_temperature(x, dim, temperature, mask)
    return torch.where(excluded, 0.0, torch.softmax(scores, dim)).to(x.dtype)


def log_softmax(
    x: Float[Tensor, ...],
    dim: int = -1,
    *,
    temperature: float | Float[Tensor, ...] = 1.0,
    mask: Bool[Tensor, ...] | None = None,
) -> Float[Tensor, ...]:
    r"""$\log p_v$ of `softmax`; what has probability 0 is `-inf` without a gradient, as is a row without any score.

    Args:
        x: Scores.
        dim: The dimension of the classes.
        temperature: As for `softmax`.
        mask: True where a class takes part; broadcasts to `x`.

    Raises:
        ValueError: As for `softmax`.
    """
    if _is_plain(x, temperature, mask):
        found = torch.log_softmax(x, dim, dtype=widened(x.dtype))
        if bool(found.detach().amin() > -torch.inf):  # PyTorch's -inf would pass a gradient on, and NaN is no answer
            return found.to(x.dtype)
    scores, excluded = _at_temperature(x, dim, temperature, mask)
    return torch.where(excluded, -torch.inf, torch.log_softmax(scores, dim)).to(x.dtype)


def softmax_jvp(probabilities: Float[Tensor, ...], tangent: Float[Tensor, ...], dim: int = -1) -> Float[Tensor, ...]:
    r"""$(\mathrm{diag}(p) - p p^T)\, t$: the Jacobian of softmax times a vector. It is symmetric, so also `t^T J`.

    Relative accuracy holds for rows that are nearly one-hot, where `1 - p` of the largest cannot be told from 0.

    Args:
        probabilities: p along `dim`, as `softmax` gives it at T = 1; each row sums to 1, or is all zeros.
        tangent: t; the two broadcast.
        dim: The dimension of the classes.

    Returns:
        In the dtype of `tangent`.
    """
    wide = torch.promote_types(widened(probabilities.dtype), tangent.dtype)
    p, t = torch.broadcast_tensors(probabilities.to(wide), tangent.to(wide))
    if class_count(p, dim):
        # J has no part along a constant. So measured, t of the likeliest class is 0 and the sum is one over the others.
        t = t - t.gather(dim, p.detach().argmax(dim, keepdim=True))
    return (p * (t - (p * t).sum(dim, keepdim=True))).to(tangent.dtype)


def class_count(x: Tensor, dim: int) -> int:
    """Classes of a row; a tensor without dimensions is one class, as for PyTorch."""
    return x.shape[dim] if x.ndim else 1


def excluded_from(x: Tensor, mask: Tensor | None) -> Tensor:
    """Which scores take no part: `-inf`, or outside the mask.

    Raises:
        ValueError: If scores are not floating point, or the mask is not boolean or does not broadcast.
    """
    if not x.is_floating_point():
        raise ValueError(f"`x` must be floating point, got {x.dtype}.")
    gone = x.detach() == -torch.inf
    if mask is None:
        return gone
    if mask.dtype != torch.bool:
        raise ValueError(f"`mask` must be boolean, True where a class takes part, got {mask.dtype}.")
    return gone | ~broadcast("mask", mask, x)


def per_row(name: str, tensor: Tensor, like: Tensor, dim: int) -> Tensor:
    """A tensor that has one number for each row of `like`, with its dimensions and size 1 along `dim`.

    Raises:
        ValueError: If it does not broadcast so.
    """
    if not tensor.ndim:  # a number, wherever it lies
        tensor = tensor.to(like.device)
    tensor = tensor.reshape((1,) * (like.ndim - tensor.ndim) + tensor.shape)
    if tensor.ndim != like.ndim or class_count(tensor, dim) != 1:
        raise ValueError(
            f"`{name}` must be a number, or broadcast to scores {tuple(like.shape)} with size 1 along dimension {dim}, "
            f"got {tuple(tensor.shape)}; one a row of [n, V] is [n, 1]."
        )
    broadcast(name, tensor, like)
    return tensor


def broadcast(name: str, tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor in the shape of the scores.

    Raises:
        ValueError: If it does not broadcast to them.
    """
    try:
        return torch.broadcast_to(tensor, like.shape)
    except RuntimeError:
        raise ValueError(
            f"`{name}` of shape {tuple(tensor.shape)} does not broadcast to scores of shape {tuple(like.shape)}."
        ) from None


def _is_plain(x: Tensor, temperature: float | int | Tensor, mask: Tensor | None) -> bool:
    """Whether PyTorch's own softmax can be tried, and its answer looked at without waiting for a device."""
    if torch.compiler.is_compiling() or type(x) not in (Tensor, torch.nn.Parameter) or x.device.type != "cpu":
        return False
    if mask is not None or isinstance(temperature, Tensor) or temperature != 1:
        return False
    filled = x.is_floating_point() and x.ndim > 0 and x.numel() > 0
    return filled and not torch._C._are_functorch_transforms_active()


def shifted_from(x: Tensor, excluded: Tensor, dim: int) -> Tensor:
    """Scores minus their row's maximum, float32 or wider; 0 where a class takes no part."""
    x = x.to(widened(x.dtype))
    if not class_count(x, dim):
        return x
    peak = torch.where(excluded, -torch.inf, x.detach()).amax(dim, keepdim=True)
    return torch.where(excluded, 0.0, x - torch.where(peak == -torch.inf, 0.0, peak))


def _at_temperature(
    x: Tensor, dim: int, temperature: float | int | Tensor, mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Scores over T, `-inf` where a class takes no part, and where that is; in a row without any all are alike."""
    excluded = excluded_from(x, mask)
    shifted = shifted_from(x, excluded, dim)
    if not isinstance(temperature, Tensor) and temperature == 1:
        scores = shifted
    elif isinstance(temperature, Tensor):
        inverse, cold = _inverse(temperature, shifted, dim)
        # Not `shifted / T`: the gradient of T would then be 0 times an infinite quotient where that overflows.
        scores = torch.where(cold, _frozen(shifted, excluded, dim), _bounded(shifted) * inverse)
    elif not temperature >= 0:
        raise ValueError(f"`temperature` must be at least 0, got {temperature}.")
    elif temperature < torch.finfo(shifted.dtype).tiny:
        scores = _frozen(shifted, excluded, dim)
    else:
        scores = _bounded(shifted) / temperature
    return torch.where(excluded & ~excluded.all(dim, keepdim=True), -torch.inf, scores), excluded


def _bounded(shifted: Tensor) -> Tensor:
    """Finite: a difference may overflow, and infinity times an inverse of 0, or times a gradient of 0, is NaN."""
    return shifted.clamp(min=torch.finfo(shifted.dtype).min)


def _frozen(shifted: Tensor, excluded: Tensor, dim: int) -> Tensor:
    """Scores at T = 0: 0 for the first of the largest, `-inf` for the others; the gradient is 0."""
    size = class_count(shifted, dim)
    if not size:
        return shifted
    sizes = [1] * shifted.ndim
    if shifted.ndim:
        sizes[dim] = size
    best = torch.where(excluded, -torch.inf, shifted.detach()).argmax(dim, keepdim=True)
    first = torch.arange(size, device=shifted.device).view(sizes) == best
    return torch.where(first, shifted * 0.0, -torch.inf)


def _inverse(temperature: Tensor, like: Tensor, dim: int) -> tuple[Tensor, Tensor]:
    """`1 / T`, 0 where T is 0 or infinite; and where it is 0. NaN where it is negative and could not be looked at."""
    t = per_row("temperature", temperature, like, dim).to(like.dtype)
    held = t.detach()
    require(held >= 0, "`temperature` must be at least 0 everywhere, got less or NaN.")
    cold = (held >= 0) & (held < torch.finfo(held.dtype).tiny)  # 1 / T of less is infinite
    edge = cold | (held == torch.inf)
    t, held = torch.where(edge, 1.0, t), torch.where(edge, 1.0, held)
    # The same as 1 / T, derivatives too, but a gradient of 0 is divided twice where PyTorch has it times 1 / T^2, which
    # may be infinite.
    return torch.where(edge, 0.0, (1 / held) * (held.log() - t.log()).exp()), cold
