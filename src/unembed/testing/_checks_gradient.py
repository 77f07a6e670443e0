"""Checks of derivatives: against a float64 definition, against differences, and of graphs used in unusual ways."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from unembed.testing._case import (
    Case,
    FailedError,
    NotApplicableError,
    brief,
    close,
    close_gradients,
    definition,
    expect,
    gradients,
)
from unembed.testing._registry import check

AFTER = ("law", "nll", "gradients")


@check("gradients")
def gradients_of_nll(case: Case) -> None:
    """The gradients of `nll` (hidden states and every parameter) are those of a float64 copy's `-log_prob[target]`."""
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 3e-5)):
        head, hidden, targets = case.pair(dtype=dtype)
        upstream = torch.rand(head.nll(hidden, targets).shape, device=case.device, dtype=torch.float64) + 0.5
        values, got = gradients(head, hidden, targets, upstream=upstream)
        truth, want = gradients(case.head(torch.float64), hidden.double(), targets, definition, upstream)
        close(values, truth, tolerance, f"nll in {dtype}")
        for name, gradient in got.items():
            expect(gradient.dtype == dtype, f"gradient of `{name}`: expected {dtype}, got {gradient.dtype}")
        close_gradients(got, want, tolerance, f" in {dtype}")


@check("gradcheck", after=AFTER)
def gradcheck(case: Case) -> None:
    """`torch.autograd.gradcheck` of `nll` holds in float64."""
    _numeric(case, torch.autograd.gradcheck)


@check("gradgradcheck", after=AFTER)
def gradgradcheck(case: Case) -> None:
    """`torch.autograd.gradgradcheck` of `nll` holds in float64."""
    _numeric(case, torch.autograd.gradgradcheck)


def _numeric(case: Case, compare: Callable[..., bool]) -> None:
    head, hidden, targets = case.pair(dtype=torch.float64)
    trained = {name: one.detach() for name, one in head.named_parameters() if one.requires_grad}
    sizes = [one.numel() for one in trained.values()]
    module = Loss(head)

    def function(hidden: Tensor, *flat: Tensor) -> Tensor:
        parts = flat[0].split(sizes) if flat else ()
        swapped = {f"head.{name}": one.view_as(trained[name]) for name, one in zip(trained, parts, strict=False)}
        return torch.func.functional_call(module, swapped, (hidden, targets))

    # Fast mode compares along random directions: one of hidden states, one of all parameters, however many there are.
    inputs = [hidden, *([torch.cat([one.flatten() for one in trained.values()])] if trained else ())]
    inputs = [one.requires_grad_() for one in inputs]
    try:
        compare(function, inputs, fast_mode=True)
    except GradcheckError as error:
        # What follows is about how PyTorch compares, and holds whole matrices.
        raise FailedError(brief(error).split(" The above quantities", maxsplit=1)[0]) from error


class Loss(torch.nn.Module):
    """A module whose forward is the head's `nll`, for `functional_call`."""

    def __init__(self, head: Any) -> None:
        super().__init__()
        self.head: Any = head

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """The loss of each token."""
        return self.head.nll(hidden, targets)


@check("chunk", after=AFTER)
def chunk(case: Case) -> None:
    """`nll(..., chunk=c)` and its gradients do not depend on c, and c must be positive."""
    import inspect

    head, hidden, targets = case.pair(dtype=torch.float64)
    if "chunk" not in inspect.signature(head.nll).parameters:
        raise NotApplicableError("`nll` takes no `chunk`")
    want, slopes = gradients(head, hidden, targets)
    for size in (1, 4, 1000):
        got, found = gradients(head, hidden, targets, lambda head, *rest, size=size: head.nll(*rest, chunk=size))
        close(got, want, 1e-11, f"nll with chunk={size}")
        close_gradients(found, slopes, 1e-11, f" with chunk={size}")
    try:
        head.nll(hidden, targets, chunk=0)
    except ValueError:
        return
    expect(False, "expected a ValueError for chunk=0, got a loss")


@check("frozen", after=AFTER)
def frozen(case: Case) -> None:
    """Frozen parameters get no gradient, the others theirs, and with nothing to train there is no graph."""
    head, hidden, targets = case.pair(dtype=torch.float64)
    _, want = gradients(head, hidden, targets)
    names = [name for name, parameter in head.named_parameters() if parameter.requires_grad]
    for name in names:
        head.get_parameter(name).requires_grad_(False)
        _, got = gradients(head, hidden, targets)
        expect(name not in got and head.get_parameter(name).grad is None, f"frozen `{name}` has a gradient")
        close_gradients(got, {key: want[key] for key in got}, 1e-11, f" with `{name}` frozen")
        head.get_parameter(name).requires_grad_(True)
    head.requires_grad_(False)
    expect(not head.nll(hidden, targets).requires_grad, "with everything frozen the loss still carries a graph")
    _, got = gradients(head, hidden, targets)
    close(got["hidden"], want["hidden"], 1e-11, "gradient of `hidden` with all parameters frozen")
    head.requires_grad_(True)
    head.nll(hidden.detach(), targets).sum().backward()
    for name in names:
        found = head.get_parameter(name).grad
        found = torch.zeros_like(want[name]) if found is None else found
        close(found, want[name], 1e-11, f"gradient of `{name}` with hidden states that need none")


@check("retained", after=AFTER)
def retained(case: Case) -> None:
    """One graph gives right gradients for two different upstream gradients, the second not spoilt by the first."""
    head, hidden, targets = case.pair(dtype=torch.float64)
    hidden.requires_grad_()
    names, parameters = zip(*[item for item in head.named_parameters() if item[1].requires_grad], strict=True)
    values = head.nll(hidden, targets)
    for scale in (1.0, -3.0):
        upstream = scale * torch.rand_like(values)
        found = torch.autograd.grad(values, [hidden, *parameters], upstream, retain_graph=True, allow_unused=True)
        _, want = gradients(head, hidden, targets, upstream=upstream)
        got = dict(zip(["hidden", *names], found, strict=True))
        got = {name: torch.zeros_like(want[name]) if one is None else one for name, one in got.items()}
        close_gradients(got, want, 1e-11, f" for upstream gradients times {scale}")
