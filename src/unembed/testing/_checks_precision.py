"""Checks of low precision: bfloat16, float16 and autocast.

The rule: parameters and hidden states are rounded to the dtype, and the truth is the definition in float64 at those
rounded values. The root mean square error of `nll`, and of each of its gradients, is at most
`MARGIN * (1 + 3 / sqrt(n))` times that of PyTorch's own form of the same head in the same dtype,
`F.cross_entropy(head(hidden).float(), targets)`, plus half a rounding unit of the dtype relative to the root mean
square of the truth. Here n is how many numbers there are: the ratio of two such errors is itself uncertain by about
1 / sqrt(n).
"""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from unembed.testing._case import Case, FailedError, definition, expect, gradients, log_prob, nll
from unembed.testing._checks_gradient import AFTER
from unembed.testing._registry import check

MARGIN = 1.5
_SHAPE = (4, 16)


@check("bfloat16", after=AFTER)
def bfloat16(case: Case) -> None:
    """In bfloat16 the errors of `nll` and its gradients are within the budget set by PyTorch's own (1.5 times)."""
    _rounded(case, torch.bfloat16)


@check("float16", after=AFTER)
def float16(case: Case) -> None:
    """In float16 the errors of `nll` and its gradients are within the budget set by PyTorch's own (1.5 times)."""
    _rounded(case, torch.float16)


@check("autocast", after=AFTER)
def autocast(case: Case) -> None:
    """Under bfloat16 autocast a float32 head keeps that budget, and its gradients stay float32."""
    case.plain()
    context = torch.autocast(case.device.type, dtype=torch.bfloat16)
    head, hidden, targets = case.pair(_SHAPE)
    _budget(head, hidden, targets, torch.bfloat16, context)


def _rounded(case: Case, dtype: torch.dtype) -> None:
    case.plain()
    head, hidden, targets = case.pair(_SHAPE, dtype)
    for name, found in (("log_prob", log_prob(head, hidden)), ("nll", head.nll(hidden, targets))):
        expect(found.dtype == torch.float32, f"`{name}` of a {dtype} head: expected float32, got {found.dtype}")
    _budget(head, hidden, targets, dtype, contextlib.nullcontext())


def _materialised(head: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    scores = head(hidden).float()
    return F.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="none").reshape(targets.shape)


def _budget(head: Any, hidden: Tensor, targets: Tensor, dtype: torch.dtype, context: Any) -> None:
    with context:
        values, ours = gradients(head, hidden, targets, nll)
        plain, theirs = gradients(head, hidden, targets, _materialised)
    for name, gradient in ours.items():
        expect(gradient.dtype == hidden.dtype, f"gradient of `{name}`: expected {hidden.dtype}, got {gradient.dtype}")
    truth, slopes = gradients(copy.deepcopy(head).double(), hidden.double(), targets, definition)
    ours, theirs, slopes = {"nll": values, **ours}, {"nll": plain, **theirs}, {"nll": truth, **slopes}
    for name, true in slopes.items():
        error, peer = _rms(ours[name].double() - true), _rms(theirs[name].double() - true)
        allowed = MARGIN * (1 + 3 / max(true.numel(), 1) ** 0.5) * peer + 0.5 * torch.finfo(dtype).eps * _rms(true)
        if not error <= allowed:
            what = name if name == "nll" else f"gradient of `{name}`"
            raise FailedError(
                f"{what} in {dtype}: expected an error of at most {allowed:.2e} (PyTorch's {peer:.2e}), got {error:.2e}"
            )


def _rms(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt()) if tensor.numel() else 0.0
