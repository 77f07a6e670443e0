"""Checks of extreme scores: classes taken out by `-inf`, and scores far from 0."""

from __future__ import annotations

from typing import Any

import torch

from unembed.testing._case import (
    Case,
    NotApplicableError,
    close,
    close_gradients,
    definition,
    expect,
    gradients,
    log_prob,
)
from unembed.testing._checks_gradient import AFTER
from unembed.testing._registry import check


def needs_bias(case: Case) -> None:
    """Not applicable unless `bias` has one number a class."""
    case.has("bias", "nll")
    shape = tuple(case.given.bias.shape)
    if shape != (case.classes,):
        raise NotApplicableError(f"`bias` has shape {shape}, not one number a class")


def without(case: Case, dtype: torch.dtype, classes: tuple[int, ...]) -> Any:
    """A copy of the head whose bias takes `classes` out."""
    head = case.head(dtype)
    with torch.no_grad():
        head.bias[list(classes)] = -torch.inf
    return head


@check("impossible_class", after=(*AFTER, "tail"))
def impossible_class(case: Case) -> None:
    """A bias of `-inf` is probability 0: the rest sums to 1, nothing turns NaN, and that target's loss is `inf`."""
    needs_bias(case)
    case.plain()
    if case.classes < 3:
        raise NotApplicableError("fewer than three classes")
    out = (0, case.classes - 1)
    head, hidden = without(case, torch.float64, out), case.hidden(dtype=torch.float64)
    found = log_prob(head, hidden)
    expect(bool((found[..., list(out)] == -torch.inf).all()), "expected log_prob `-inf` where the bias is `-inf`")
    total = found.exp().sum(-1)
    close(total, torch.ones_like(total), 1e-12, "sum of the other probabilities")
    targets = torch.randint(1, case.classes - 1, found.shape[:-1], device=case.device)
    got, slopes = gradients(head, hidden, targets)
    for name, gradient in slopes.items():
        expect(bool(gradient.isfinite().all()), f"gradient of `{name}` is not finite beside a class of `-inf`")
    if getattr(case.given, "softcap", None) is None:  # which would lift any finite bias
        far = case.head(torch.float64)
        with torch.no_grad():
            far.bias[list(out)] = -1e4  # its probability underflows to 0, so this is the same head to rounding
        want, truth = gradients(far, hidden, targets, definition)
        close(got, want, 1e-10, "nll beside a class of `-inf`, against a bias of -1e4")
        close_gradients(slopes, truth, 1e-10, " beside a class of `-inf`, against a bias of -1e4")
    loss = head.nll(hidden, torch.zeros_like(targets))
    expect(bool((loss == torch.inf).all()), f"expected loss inf for an impossible target, got {loss.flatten()[0]:.4g}")


@check("impossible_target", after=("law", "nll", "gradients", "shapes", "impossible_class"))
def impossible_target(case: Case) -> None:
    """A token whose target is impossible does not spoil the loss or the gradient of another token."""
    needs_bias(case)
    case.plain()
    head, hidden = without(case, torch.float64, (0,)), case.hidden(dtype=torch.float64)
    targets = torch.ones_like(case.targets(head, hidden))
    want, slopes = gradients(head, hidden[1:], targets[1:])
    targets[0] = 0
    got, found = gradients(head, hidden, targets)
    close(got[1:], want, 1e-11, "nll beside an impossible target")
    close(found["hidden"][1:], slopes["hidden"], 1e-11, "gradient of `hidden` beside an impossible target")


@check("offset", after=("law", "nll"))
def offset(case: Case) -> None:
    """Adding 1e4, 1e6 or 1e8 to every score leaves the loss as it is, in float32.

    All parameters but the bias are 0, so scores are the bias; its numbers are exact in float32 at each offset.
    """
    needs_bias(case)
    head, wide, hidden = case.head(), case.head(torch.float64), case.hidden()
    targets = case.targets(head, hidden)
    steps = torch.arange(case.classes, device=case.device) % 3
    with torch.no_grad():
        for parameter in (*head.parameters(), *wide.parameters()):
            parameter.zero_()
        wide.bias.copy_(8.0 * steps)
        want = wide.nll(hidden.double(), targets)
        wide.bias.add_(1e4)
        moved = wide.nll(hidden.double(), targets)
        if not torch.allclose(moved, want, rtol=0, atol=1e-6):
            raise NotApplicableError("adding a number to every bias changes the distribution of this head")
        for amount in (1e4, 1e6, 1e8):
            head.bias.copy_(8.0 * steps + amount)
            close(head.nll(hidden, targets), want, 1e-5, f"nll with {amount:.0e} added to every score")
            total = log_prob(head, hidden).exp().sum(-1)
            close(total, torch.ones_like(total), 1e-5, f"sum of probabilities with {amount:.0e} added to every score")
