"""A draw from the k largest scores of each row.

Shapes: n rows, V vocabulary, k scores of a list.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.decoding._largest import largest
from unembed.decoding._settings import Settings, cooled, part, require_finite
from unembed.ops import Noise
from unembed.ops._draw import block_sums


def draw_listed(
    rows: Float[Tensor, "n V"], settings: Settings, which: Int[Tensor, " n"], noise: Noise
) -> Int[Tensor, " n"]:
    """A class a row. In the order of the list, what top-k, top-p and min-p keep is a prefix, and so is the sum.

    Args:
        rows: Scores, float32 or wider.
        settings: With a `top_k`.
        which: Numbers of the rows in the batch, for noise and errors.
        noise: Uniform draws.
    """
    k = settings.top_k
    assert k is not None
    values, ids = largest(rows, min(int(k.amax()) if isinstance(k, Tensor) else k, rows.shape[-1]))
    peak = values[:, :1]
    require_finite(peak, which)
    t, frozen = cooled(settings.temperature, rows)
    # A few numbers a row are left: for them numpy takes half the time of PyTorch.
    weights = np.exp(_host(values - peak).astype(np.float64) / _host(t))
    total = weights.cumsum(1)
    kept = weights > 0
    if isinstance(k, Tensor):
        kept &= np.arange(kept.shape[1]) < _host(k)
    last = kept.sum(1, keepdims=True) - 1
    if settings.top_p is not None:
        if settings.joint:
            heavy = _host(block_sums((rows - peak).div_(t).exp_()).sum(-1, keepdim=True))
        else:
            heavy = total[np.arange(len(total))[:, None], last]
        reached = total - weights < _host(part(settings.top_p, rows.dtype)) * heavy  # what is in front has not
        last = np.minimum(last, np.maximum(reached.sum(1, keepdims=True) - 1, 0))
    if settings.min_p is not None:
        last = np.minimum(last, (weights >= _host(settings.min_p)).sum(1, keepdims=True) - 1)
    if frozen is not None:
        last = np.where(_host(frozen), 0, last)
    places = torch.from_numpy(_places(total, last[:, 0], _host(noise.at(which)()))).to(ids.device)
    return ids.gather(-1, places[:, None]).squeeze(-1)


def _places(total: np.ndarray, last: np.ndarray, uniform: np.ndarray) -> np.ndarray:
    """Where the running sum passes a part of what is kept, `last` included."""
    rows = np.arange(len(total))
    whole = total[rows, last]
    goal = np.minimum(uniform * whole, np.nextafter(whole, 0.0))
    return np.minimum((total <= goal[:, None]).sum(1), last)


def _host(value: Any) -> Any:
    """A tensor as an array on the host, in float64 where numpy lacks its dtype; a number as it is."""
    if not isinstance(value, Tensor):
        return value
    return (value.double() if value.dtype == torch.bfloat16 else value).numpy(force=True)
