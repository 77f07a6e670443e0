"""Checks of targets: those that do not count, and those that are none."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from unembed.testing._case import (
    Case,
    FailedError,
    NotApplicableError,
    close,
    close_gradients,
    during,
    expect,
    gradients,
    log_prob,
)
from unembed.testing._checks_gradient import AFTER
from unembed.testing._registry import check


@check("ignore_index", after=AFTER)
def ignore_index(case: Case) -> None:
    """A target equal to `ignore_index` (-100, or any other) has loss 0, gradient 0 and no part in other gradients."""
    head, hidden, targets = case.pair(dtype=torch.float64)
    counts = torch.ones_like(targets, dtype=torch.bool)
    counts[0] = False
    if not hasattr(head, "definition_nll"):
        counts.view(-1)[-1] = False  # one token of a sequence, beside a whole one
    values, want = gradients(head, hidden, targets, upstream=counts)
    other = 255 if case.classes <= 255 else -1
    for index in (-100, other):
        ignored = torch.where(counts, targets, index)
        with during(f"ignore_index={index}"):
            got, found = gradients(
                head, hidden, ignored, lambda head, *rest, index=index: head.nll(*rest, ignore_index=index)
            )
        close(got[~counts], torch.zeros_like(got[~counts]), 0.0, f"nll where the target is ignore_index={index}")
        close(got[counts], values[counts], 1e-11, f"nll of tokens beside an ignored one, ignore_index={index}")
        close_gradients(found, want, 1e-11, f" with ignored targets, ignore_index={index}")
    everything = torch.full_like(targets, -100)
    got, found = gradients(head, hidden, everything)
    close(got, torch.zeros_like(got), 0.0, "nll with every target ignored")
    close_gradients(found, {name: torch.zeros_like(one) for name, one in found.items()}, 0.0, ", every target ignored")


@check("out_of_range")
def out_of_range(case: Case) -> None:
    """A target that is neither a class nor ignored is a ValueError."""
    head, hidden, targets = case.pair()
    for wrong in (case.classes, -1, -4, case.classes + 1000):
        changed = targets.clone()
        changed.view(-1)[-1] = wrong
        _refused(head, hidden, changed)


@check("ignored_class", after=("law", "nll", "gradients", "ignore_index", "out_of_range"))
def ignored_class(case: Case) -> None:
    """`ignore_index` may be the number of a class, such as that of padding; then -100 is no target."""
    case.plain()
    head, hidden, targets = case.pair(dtype=torch.float64)
    chosen = int(targets.flatten()[0])
    want = torch.where(targets == chosen, 0.0, head.nll(hidden, targets))
    close(head.nll(hidden, targets, ignore_index=chosen), want, 1e-11, f"nll with ignore_index={chosen}")
    _refused(head, hidden, torch.full_like(targets, -100), ignore_index=chosen)


def _refused(head: Any, hidden: Tensor, targets: Tensor, **options: int) -> None:
    wrong = int(targets.flatten()[-1])
    try:
        head.nll(hidden, targets, **options)
    except ValueError:
        return
    except Exception as error:
        raise FailedError(f"target {wrong}: expected a ValueError, got {type(error).__name__}") from error
    raise FailedError(f"target {wrong}: expected a ValueError, got a loss")


@check("untouched", after=("law", "nll", "gradients", "ignore_index"))
def untouched(case: Case) -> None:
    """Hidden states, targets and parameters of the caller are not overwritten."""
    head, hidden, targets = case.pair()
    targets[0] = -100
    before = {"hidden": hidden.clone(), "targets": targets.clone(), **copy.deepcopy(head.state_dict())}
    given = hidden.clone().requires_grad_()
    head.nll(given, targets).sum().backward()
    with torch.no_grad():
        for part in (given.detach(), hidden):
            head.nll(part, targets)
            log_prob(head, part)
            if hasattr(head, "topk"):
                head.topk(part, 1)
            if hasattr(head, "sample"):
                head.sample(part)
    expect(torch.equal(given.detach(), hidden), "`hidden` was overwritten")
    for name, value in before.items():
        after = {"hidden": hidden, "targets": targets, **head.state_dict()}[name]
        expect(torch.equal(value, after), f"`{name}` was overwritten")


@check("ignored_nan", after=("law", "nll", "gradients", "ignore_index", "shapes", "untouched"))
def ignored_nan(case: Case) -> None:
    """A hidden state of NaN at an ignored token spoils no loss, and no gradient of another token's hidden state.

    Gradients of parameters are not part of the promise: they are sums of products in which NaN times 0 is NaN.
    """
    head, hidden, targets = case.pair(dtype=torch.float64)
    targets[0] = -100
    want, slopes = gradients(head, hidden, targets)
    poisoned = hidden.clone()
    poisoned[0] = torch.nan
    got, found = gradients(head, poisoned, targets)
    if hidden.shape[0] != targets.shape[0]:
        raise NotApplicableError("the first dimension of hidden states is not that of targets")
    close(got, want, 1e-11, "nll beside and at a NaN of an ignored token")
    close(found["hidden"][1:], slopes["hidden"][1:], 1e-11, "gradient of `hidden` beside a NaN of an ignored token")
    expect(bool(got.isfinite().all()), "a loss is not finite")
