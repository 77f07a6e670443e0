r"""Linear attention: weights $\phi(q)\cdot\phi(k)$ in the place of $e^{s\,q\cdot k}$, so keys and values sum up first.

Shapes: L queries, S keys, E width of queries and keys, F width of values, M features; any batch dimensions in front.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unembed.ops._attention import per_key, require_shapes
from unembed.ops._feature_maps import FeatureMap, build_map
from unembed.ops._linear_nll import as_autocast
from unembed.ops._scores import widened


class LinearState(NamedTuple):
    """What the keys so far come to, in float32 or wider; its size does not depend on their number."""

    sums: Float[Tensor, "*B M F"]
    r"""$\sum_j e^{-m} \phi(k_j) v_j^T$"""
    normaliser: Float[Tensor, "*B M"]
    r"""$\sum_j e^{-m} \phi(k_j)$"""
    shift: Float[Tensor, "*B"] | None
    """m: the largest logarithm of a feature of a key, `-inf` before the first key; None (0) where the map has none."""


def _reference(
    query: Float[Tensor, "*B L E"],
    key: Float[Tensor, "*B S E"],
    value: Float[Tensor, "*B S F"],
    *,
    feature_map: str | FeatureMap = "elu",
    causal: bool = False,
    key_mask: Bool[Tensor, "*b S"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "*B L F"]:
    """What `linear_attention` means, in float64 with all weights at once."""
    kind = build_map(feature_map)
    scale = kind.check(query.shape[-1], scale)
    queries, keys = kind(query.double(), scale), kind(key.double(), scale)
    if kind.exponential:
        logs = torch.logsumexp(queries.unsqueeze(-2) + keys.unsqueeze(-3), -1)
        seen = _seen(logs, key_mask, causal=causal)
        peak = torch.where(seen, logs, -torch.inf).detach().logsumexp(-1, keepdim=True)
        weights = torch.where(seen, logs - torch.where(peak == -torch.inf, 0.0, peak), -torch.inf).exp()
    else:
        weights = queries @ keys.mT
        weights = torch.where(_seen(weights, key_mask, causal=causal), weights, 0.0)
    total = weights.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, weights / torch.where(total == 0, 1.0, total)) @ value.double()


def _seen(weights: Tensor, key_mask: Tensor | None, *, causal: bool) -> Tensor:
    """Which keys each query sees."""
    seen = torch.ones_like(weights, dtype=torch.bool)
    if key_mask is not None:
        seen = seen & per_key(key_mask, weights.shape[:-2]).unsqueeze(-2)
    return seen.tril() if causal else seen


def linear_attention(
    query: Float[Tensor, "*B L E"],
    key: Float[Tensor, "*B S E"],
    value: Float[Tensor, "*B S F"],
    *,
    feature_map: str | FeatureMap = "elu",
    causal: bool = False,
    key_mask: Bool[Tensor, "*b S"] | None = None,
    scale: float | None = None,
    chunk: int = 128,
    state: LinearState | None = None,
    return_state: bool = False,
) -> Float[Tensor, "*B L F"] | tuple[Float[Tensor, "*B L F"], LinearState]:
    r"""$\sum_j w_{ij} v_j / \sum_j w_{ij}$ with $w_{ij} = \phi(q_i)\cdot\phi(k_j)$, in float32 or wider.

    The result has the dtype of `query`. Time and memory grow with L + S, not with L x S. A query whose weights are all
    0 gives zeros with zero gradients. Derivatives of any order. Features of an exponential map below `e^-87` of the
    largest of their head are 0 in float32, as are those of `elu` below -87.

    Args:
        query: Q.
        key: K.
        value: V.
        feature_map: A name (`elu`, `relu`, `exp`, `polynomial`, `taylor`) or an instance, as `Favor` needs.
        causal: Query i sees the keys j <= i, and what `state` holds. L and S must be equal.
        key_mask: True at real keys, `[*b, S]` with `*b` the first of the batch dimensions. The others count nowhere,
            whatever they hold.
        scale: s of the maps that depend on `s q . k`; `1 / sqrt(E)` when None. Elementwise maps take none.
        chunk: Keys of the causal form that are taken at once.
        state: Keys that all queries see before these ones, as an earlier call returned it with the same map and scale
            (that they are the same is not checked).
        return_state: Whether to return the state after these keys too.

    Returns:
        The outputs, and with `return_state` the `LinearState` to go on from.

    Raises:
        ValueError: If shapes or the state do not fit, `chunk` is not positive, or the map does not take the scale.
    """
    require_shapes(query, key, value, key_mask)
    if chunk < 1:
        raise ValueError(f"`chunk` must be at least 1, got {chunk}.")
    if causal and query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"`causal` needs as many keys as queries, got {key.shape[-2]} and {query.shape[-2]}; pass earlier keys "
            "through `state`."
        )
    kind = build_map(feature_map)
    scale = kind.check(query.shape[-1], scale)
    dtype = query.dtype
    query, key, value = (as_autocast(x, x, None)[0] for x in (query, key, value))
    with torch.autocast(query.device.type, enabled=False):
        wide = widened(torch.promote_types(torch.promote_types(query.dtype, key.dtype), value.dtype))
        keep = None if key_mask is None else per_key(key_mask, query.shape[:-2]).unsqueeze(-1)
        keys, values = _of_keys(kind, key.to(wide), value.to(wide), keep, scale)
        queries = kind(query.to(wide), scale)
        if kind.exponential and queries.shape[-1]:  # a factor of each query: it cancels, so it has no gradient
            queries = (queries - queries.detach().amax(-1, keepdim=True)).exp()
        carried = _start(kind, keys, values, state)
        if causal and queries.shape[-2]:
            out, carried = _causal(queries, keys, values, carried, chunk)
        else:
            out, carried = _all(queries, keys, values, carried)
    out = out.to(dtype)
    if not return_state:
        return out
    return out, LinearState(carried.sums[..., :-1], carried.sums[..., -1], carried.shift)


class _Carried(NamedTuple):
    """A state while it grows: sums and normaliser as one, the normaliser last."""

    sums: Tensor
    shift: Tensor | None


def _of_keys(kind: FeatureMap, key: Tensor, value: Tensor, keep: Tensor | None, scale: float) -> tuple[Tensor, Tensor]:
    """Features of the keys (or their logarithm), and the values with a column of ones: its sum is the normaliser."""
    ones = torch.ones_like(value[..., :1])
    if keep is None:
        return kind(key, scale), torch.cat([value, ones], -1)
    # Padding is taken out before the map too: a gradient of 0 times the slope at NaN would be NaN.
    features = kind(torch.where(keep, key, 0.0), scale)
    features = torch.where(keep, features, -torch.inf if kind.exponential else 0.0)
    return features, torch.where(keep, torch.cat([value, ones], -1), 0.0)


def _start(kind: FeatureMap, keys: Tensor, values: Tensor, state: LinearState | None) -> _Carried:
    """The state to begin with, no keys where none is given."""
    *batch, _, features = keys.shape
    width = values.shape[-1] - 1
    if state is None:
        shift = keys.new_full(batch, -torch.inf) if kind.exponential else None
        return _Carried(keys.new_zeros(*batch, features, width + 1), shift)
    want = (*batch, features, width)
    if tuple(state.sums.shape) != want or tuple(state.normaliser.shape) != want[:-1]:
        raise ValueError(
            f"`state` must hold sums of shape {want} and a normaliser of shape {want[:-1]} for these inputs and this "
            f"map, got {tuple(state.sums.shape)} and {tuple(state.normaliser.shape)}."
        )
    shape, given = tuple(batch) if kind.exponential else None, None if state.shift is None else tuple(state.shift.shape)
    if given != shape:
        wanted = "None" if shape is None else f"a tensor of shape {shape}"
        raise ValueError(f"`state.shift` must be {wanted} for this map, got {given}.")
    sums = torch.cat([state.sums, state.normaliser.unsqueeze(-1)], -1).to(keys.dtype)
    return _Carried(sums, None if state.shift is None else state.shift.detach().to(keys.dtype))


def _all(queries: Tensor, keys: Tensor, values: Tensor, carried: _Carried) -> tuple[Tensor, _Carried]:
    """Each query sees every key."""
    sums, shift = carried
    if shift is not None:
        last = torch.cat([shift.unsqueeze(-1), _peaks(keys)], -1).amax(-1)
        keys = (keys - _finite(last)[..., None, None]).exp()
        sums, shift = _moved(sums, shift, last), last
    sums = sums + keys.mT @ values
    return _ratio(queries @ sums), _Carried(sums, shift)


def _causal(queries: Tensor, keys: Tensor, values: Tensor, carried: _Carried, chunk: int) -> tuple[Tensor, _Carried]:
    """Each query sees the keys before it and its own: those of earlier chunks by their sum."""
    found = []
    for start in range(0, queries.shape[-2], chunk):
        q, k, v = (x[..., start : start + chunk, :] for x in (queries, keys, values))
        if carried.shift is None:
            both, carried = _plain_chunk(q, k, v, carried.sums)
        else:
            both, carried = _shifted_chunk(q, k, v, carried.sums, carried.shift)
        found.append(_ratio(both))
    return torch.cat(found, -2), carried


def _plain_chunk(queries: Tensor, keys: Tensor, values: Tensor, sums: Tensor) -> tuple[Tensor, _Carried]:
    """Numerators and denominators of a chunk, and the state after it."""
    both = queries @ sums + (queries @ keys.mT).tril() @ values
    return both, _Carried(sums + keys.mT @ values, None)


def _shifted_chunk(
    queries: Tensor, keys: Tensor, values: Tensor, sums: Tensor, shift: Tensor
) -> tuple[Tensor, _Carried]:
    """The same for logarithms of features, each row relative to the largest that its query may see.

    With one shift for the chunk, queries before a large key would have nothing but underflow. So a key is taken
    relative to its own peak, and the difference of the two comes back as a factor `e^(peak_j - running_i) <= 1`.
    """
    peaks = _peaks(keys)
    running = torch.maximum(peaks.cummax(-1).values, shift.unsqueeze(-1))
    keys = (keys - _finite(peaks).unsqueeze(-1)).exp()
    apart = peaks.unsqueeze(-2) - _finite(running).unsqueeze(-1)
    seen = torch.ones_like(apart, dtype=torch.bool).tril()
    weights = (queries @ keys.mT) * torch.where(seen, apart, -torch.inf).exp()
    before = (shift.unsqueeze(-1) - _finite(running)).exp().unsqueeze(-1)
    both = (queries @ sums) * before + weights @ values
    last = running[..., -1]
    keys = keys * (peaks - _finite(last).unsqueeze(-1)).exp().unsqueeze(-1)
    return both, _Carried(_moved(sums, shift, last) + keys.mT @ values, last)


def _peaks(keys: Tensor) -> Tensor:
    """The largest logarithm of a feature of each key, as a constant: the result does not depend on it."""
    return keys.detach().amax(-1) if keys.shape[-1] else keys.new_full(keys.shape[:-1], -torch.inf)


def _finite(shift: Tensor) -> Tensor:
    """0 where there is no key: `-inf - -inf` would be NaN."""
    return torch.where(shift == -torch.inf, 0.0, shift)


def _moved(sums: Tensor, old: Tensor, new: Tensor) -> Tensor:
    """The same sums at a larger shift."""
    return sums * (old - _finite(new)).exp()[..., None, None]


def _ratio(both: Tensor) -> Tensor:
    """Numerator over denominator, 0 where no weight is."""
    total = both[..., -1:]
    return both[..., :-1] / torch.where(total == 0, torch.inf, total)
