"""Softmax attention, by PyTorch's fused kernel where that is exact and by its definition elsewhere.

Shapes: L queries, S keys, E width of queries and keys, F width of values; any batch dimensions in front.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn import functional

from unembed.ops._linear_nll import as_autocast
from unembed.ops._scores import widened


class _How(NamedTuple):
    """What there is beside the tensors: where to look or what to add, `is_causal`, and the factor of the scores."""

    added: Tensor | None
    causal: bool
    scale: float


def _reference(
    query: Float[Tensor, "*B L E"],
    key: Float[Tensor, "*B S E"],
    value: Float[Tensor, "*B S F"],
    *,
    mask: Bool[Tensor, "*m"] | None = None,
    bias: Float[Tensor, "*a"] | None = None,
    causal: bool = False,
    key_mask: Bool[Tensor, "*b S"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "*B L F"]:
    """What `attention` means, in float64 with all weights at once."""
    length, keys = query.shape[-2], key.shape[-2]
    scores = query.double() @ key.double().mT * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if bias is not None:
        scores = scores + bias.double()
    seen = torch.ones_like(scores, dtype=torch.bool) if mask is None else torch.broadcast_to(mask, scores.shape)
    if key_mask is not None:
        between = (1,) * (scores.ndim - 1 - key_mask.ndim)
        seen = seen & key_mask.reshape(*key_mask.shape[:-1], *between, 1, keys)
    if causal:
        i, j = torch.arange(length)[:, None], torch.arange(keys)
        seen = seen & (j <= i + keys - length)
    seen = seen & (scores != -torch.inf)
    sees_one = seen.any(-1, keepdim=True)
    # The weights of a query that sees nothing are replaced, not multiplied by 0: NaN times 0 is NaN.
    weights = torch.softmax(torch.where(seen, scores, torch.where(sees_one, -torch.inf, 0.0)), -1)
    return torch.where(sees_one, weights, 0.0) @ value.double()


def attention(
    query: Float[Tensor, "*B L E"],
    key: Float[Tensor, "*B S E"],
    value: Float[Tensor, "*B S F"],
    *,
    mask: Bool[Tensor, "*m"] | None = None,
    bias: Float[Tensor, "*a"] | None = None,
    causal: bool = False,
    key_mask: Bool[Tensor, "*b S"] | None = None,
    scale: float | None = None,
    fused: bool | None = None,
) -> Float[Tensor, "*B L F"]:
    r"""$\mathrm{softmax}(s\, Q K^T + B)\, V$, computed in float32 or wider, in the dtype of `query`.

    A query that may look at nothing gives zeros with zero gradients. First and second derivatives are exact (under
    torch.compile the kernel has the first only). Through the fused kernel memory does not grow with L x S, except in a
    backward pass with `create_graph=True`. On a GPU half-precision inputs go to the kernel as they are; it accumulates
    in float32.

    Args:
        query: Q.
        key: K.
        value: V; what masked keys hold must be finite.
        mask: True where a query may look at a key; broadcasts to `[*B, L, S]`.
        bias: B, broadcasts to `[*B, L, S]`; `-inf` excludes.
        causal: Query i sees the keys j <= i + S - L: the last query sees all, as with a cache of earlier keys.
            (PyTorch's `is_causal` aligns the first ones.)
        key_mask: True at real keys, `[*b, S]` with `*b` the first of the batch dimensions: `[batch, S]` serves
            `[batch, heads, L, E]`.
        scale: s; `1 / sqrt(E)` when None.
        fused: True demands PyTorch's fused kernel, False the definition; None takes the kernel where it is exact.

    Raises:
        ValueError: If shapes do not fit, or `fused=True` where `fused_obstacle` gives a reason against it.
    """
    require_shapes(query, key, value, key_mask)
    obstacle = fused_obstacle(query, key, value, bias=bias)
    if fused and obstacle is not None:
        raise ValueError(f"`fused=True` cannot be: {obstacle}.")
    query, key, value = (as_autocast(x, x, None)[0] for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        allowed = _allowed(query, key, mask=mask, bias=bias, causal=causal, key_mask=key_mask)
        blind = None if allowed is None else ~allowed.any(-1, keepdim=True)
        wide = torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype)
        own = fused is False or obstacle is not None
        if own or query.device.type == "cpu":  # where the kernel rounds the weights to half precision
            wide = widened(wide)
        batch = query.shape[:-2]
        how = _How(
            None if allowed is None else _in_four(_added(allowed, bias, wide), batch),
            causal and allowed is None and query.shape[-2] > 1,
            1 / math.sqrt(max(1, query.shape[-1])) if scale is None else float(scale),
        )
        q, k, v = (_in_four(x.to(wide), batch) for x in (query, key, value))
        out = _materialised(q, k, v, how) if own else _fused(q, k, v, how)
        out = out.reshape(*batch, query.shape[-2], value.shape[-1])
        return (out if blind is None else torch.where(blind, 0.0, out)).to(query.dtype)


def fused_obstacle(
    query: Float[Tensor, "*B L E"],
    key: Float[Tensor, "*B S E"],
    value: Float[Tensor, "*B S F"],
    *,
    bias: Float[Tensor, "*a"] | None = None,
) -> str | None:
    """Why `attention` cannot use PyTorch's fused kernel for these inputs; None where it can.

    Masks, lengths, widths and ranks are no obstacle.
    """
    if bias is not None and bias.requires_grad and torch.is_grad_enabled():
        return "the kernel gives no gradient to a bias"
    if torch.compiler.is_compiling():
        return None
    if torch._C._are_functorch_transforms_active():
        return "the kernel has no forward mode and no second derivative, which torch.func may ask for"
    if forward_ad._current_level >= 0:
        given = (x for x in (query, key, value, bias) if x is not None)
        if any(forward_ad.unpack_dual(x).tangent is not None for x in given):
            return "the kernel has no forward mode"
    return None


def require_shapes(query: Tensor, key: Tensor, value: Tensor, key_mask: Tensor | None) -> None:
    """Refuse inputs of attention that do not fit.

    Raises:
        ValueError: If they do not.
    """
    for name, x in (("query", query), ("key", key), ("value", value)):
        if x.ndim < 2 or not x.is_floating_point():
            raise ValueError(f"`{name}` must be floats of at least 2 dimensions, got {x.dtype} {tuple(x.shape)}.")
    if key.shape[:-2] != query.shape[:-2] or key.shape[-1] != query.shape[-1]:
        raise ValueError(
            f"`key` must be [*B, S, E] for a query [*B, L, E] of shape {tuple(query.shape)}, got {tuple(key.shape)}."
        )
    if value.shape[:-1] != key.shape[:-1]:
        raise ValueError(f"`value` must be [*B, S, F] for a key of shape {tuple(key.shape)}, got {tuple(value.shape)}.")
    if key_mask is None:
        return
    if key_mask.dtype != torch.bool:
        raise ValueError(f"`key_mask` must be boolean, True at real keys, got {key_mask.dtype}.")
    batch, lead = key.shape[:-2], key_mask.shape[:-1]
    fits = key_mask.ndim >= 1 and len(lead) <= len(batch) and key_mask.shape[-1] == key.shape[-2]
    if not fits or any(m not in (1, n) for m, n in zip(lead, batch, strict=False)):
        raise ValueError(
            f"`key_mask` must be [*b, S] with *b the first of {tuple(batch)} and S = {key.shape[-2]}, "
            f"got {tuple(key_mask.shape)}."
        )


def per_key(key_mask: Bool[Tensor, "*b S"], batch: tuple[int, ...]) -> Bool[Tensor, "*B S"]:
    """A mask of keys with the batch's number of dimensions and S last."""
    between = (1,) * (len(batch) + 1 - key_mask.ndim)
    return key_mask.reshape(*key_mask.shape[:-1], *between, key_mask.shape[-1])


def _allowed(
    query: Tensor,
    key: Tensor,
    *,
    mask: Tensor | None,
    bias: Tensor | None,
    causal: bool,
    key_mask: Tensor | None,
) -> Tensor | None:
    """True where a query may look, sizes of 1 kept; None where all may, or `is_causal` says it."""
    length, keys, batch = query.shape[-2], key.shape[-2], query.shape[:-2]
    found = []
    if mask is not None:
        if mask.dtype != torch.bool:
            raise ValueError(f"`mask` must be boolean, True where a query may look, got {mask.dtype}; see `bias`.")
        found.append(_like_scores("mask", mask, (*batch, length, keys)))
    if bias is not None:
        found.append(_like_scores("bias", bias.detach(), (*batch, length, keys)) != -torch.inf)
    if key_mask is not None:
        found.append(per_key(key_mask, batch).unsqueeze(-2))
    if causal and (length != keys or found) and (length > 1 or not keys):
        seen = torch.ones(length, keys, dtype=torch.bool, device=query.device).tril(keys - length)
        found.append(seen.reshape((1,) * len(batch) + seen.shape))
    allowed = None
    for part in found:
        allowed = part if allowed is None else allowed & part
    return allowed


def _like_scores(name: str, x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The tensor with leading sizes of 1 up to the scores' number of dimensions."""
    try:
        fits = torch.broadcast_shapes(x.shape, shape) == torch.Size(shape)
    except RuntimeError:
        fits = False
    if not fits:
        raise ValueError(f"`{name}` of shape {tuple(x.shape)} does not broadcast to scores of shape {shape}.")
    return x.reshape((1,) * (len(shape) - x.ndim) + x.shape)


def _added(allowed: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Where to look, or what to add to the scores. A query that sees nothing sees all: its output is dropped."""
    blind = ~allowed.any(-1, keepdim=True)
    if bias is None:
        return allowed | blind
    return torch.where(blind, 0.0, torch.where(allowed, bias.to(dtype), -torch.inf))


def _in_four(x: Tensor, batch: tuple[int, ...]) -> Tensor:
    """`[*B, n, m]` with two batch dimensions, which the fused kernel wants; sizes of 1 where all are."""
    rows = x.shape[-2:]
    if len(batch) < 2:
        return x.reshape((1,) * (2 - len(batch)) + x.shape)
    if len(batch) == 2:
        return x
    if all(size == 1 for size in x.shape[:-2]):
        return x.reshape(1, 1, *rows)
    return x.expand(*batch, *rows).reshape(math.prod(batch[:-1]), batch[-1], *rows)


def _materialised(query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
    """The definition, all scores at once, each query seeing at least one key; float32 or wider."""
    query, key, value = (x.to(widened(x.dtype)) for x in (query, key, value))
    scores, added = (query * how.scale) @ key.mT, how.added
    if how.causal:
        added = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).tril()
    if added is not None:
        scores = torch.where(added, scores, -torch.inf) if added.dtype == torch.bool else scores + added
    return torch.softmax(scores, -1) @ value


def _fused(query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
    """The kernel, with second derivatives where a graph may ask for them."""
    graph = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, value))
    if graph and not torch.compiler.is_compiling():
        return _Fused.apply(query, key, value, how)
    return _kernel(query, key, value, how)


def _kernel(query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
    """PyTorch's kernel. Values of another width than the keys, or gaps within a row, would make it materialise."""
    width = value.shape[-1]
    most = max(width, query.shape[-1])
    padded = [x if x.shape[-1] == most else functional.pad(x, (0, most - x.shape[-1])) for x in (query, key, value)]
    q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in padded)
    out = functional.scaled_dot_product_attention(q, k, v, how.added, is_causal=how.causal, scale=how.scale)
    return out[..., :width]


class _Fused(torch.autograd.Function):
    """The kernel with its own first derivative; a backward pass that keeps a graph goes by the definition."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, how: _How) -> Tensor:
        ctx.save_for_backward(query, key, value)
        ctx.how = how
        ctx.inner = _Fused._inside(ctx, query, key, value)
        return ctx.inner[1].detach()

    @staticmethod
    def _inside(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> tuple[list[Tensor], Tensor]:
        """Inputs and output of the kernel with a graph of its own, which the first backward uses up."""
        needed = ctx.needs_input_grad[:3]
        q, k, v = leaves = [x.detach().requires_grad_(n) for x, n in zip((query, key, value), needed, strict=True)]
        with torch.enable_grad():
            out = _kernel(q, k, v, ctx.how)
        return leaves, out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        needed, keeps = ctx.needs_input_grad[:3], torch.is_grad_enabled()
        if not keeps:
            # Of a graph that was kept the first backward has freed what is inside.
            leaves, out = ctx.inner or _Fused._inside(ctx, *ctx.saved_tensors)
            ctx.inner = None
        else:
            # Views: one tensor may be query, key and value at once, and each place wants its own gradient.
            q, k, v = leaves = [x.view_as(x) for x in ctx.saved_tensors]
            out = _materialised(q, k, v, ctx.how).to(upstream[0].dtype)
        wanted = [x for x, n in zip(leaves, needed, strict=True) if n]
        found = iter(torch.autograd.grad(out, wanted, upstream, create_graph=keeps))
        return (*(next(found) if n else None for n in needed), None)
