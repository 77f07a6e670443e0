"""Checks under transforms of the loss: `torch.func` and `torch.compile`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from unembed import losses
from unembed.testing._case import Case, close, close_gradients, definition, gradients, nll
from unembed.testing._checks_gradient import AFTER, Loss
from unembed.testing._checks_loss import takes_cross_entropy
from unembed.testing._registry import check


def _functional(head: Any) -> tuple[Any, dict[str, Tensor]]:
    """`(parameters, hidden, targets) -> nll` and the parameters."""
    module = Loss(head)
    parameters = {name.removeprefix("head."): one.detach() for name, one in module.named_parameters()}

    def function(parameters: dict[str, Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
        swapped = {f"head.{name}": one for name, one in parameters.items()}
        return torch.func.functional_call(module, swapped, (hidden, targets))

    return function, parameters


@check("func_grad", after=AFTER)
def func_grad(case: Case) -> None:
    """`torch.func.grad` of `nll`, and a gradient of it again, are those of the definition."""
    head, hidden, targets = case.pair(dtype=torch.float64)
    function, parameters = _functional(head)

    def total(parameters: dict[str, Tensor], hidden: Tensor) -> Tensor:
        return function(parameters, hidden, targets).sum()

    got, slope = torch.func.grad(total, argnums=(0, 1))(parameters, hidden)
    _, want = gradients(head, hidden, targets, definition)
    close_gradients({"hidden": slope, **got}, want, 1e-10, " by torch.func.grad")

    def steepness(hidden: Tensor) -> Tensor:
        return torch.func.grad(total, argnums=1)(parameters, hidden).square().sum()

    again = torch.func.grad(steepness)(hidden)
    given = hidden.clone().requires_grad_()
    (first,) = torch.autograd.grad(definition(head, given, targets).sum(), given, create_graph=True)
    (second,) = torch.autograd.grad(first.square().sum(), given)
    close(again, second, 1e-9, "gradient of the squared gradient of `hidden`")


@check("func_vmap", after=(*AFTER, "func_grad"))
def func_vmap(case: Case) -> None:
    """`torch.func.vmap` of `nll`, and of its gradient, are those of one example after the other."""
    head, hidden, targets = case.pair(dtype=torch.float64)
    function, parameters = _functional(head)
    batch = torch.stack([hidden, hidden.flip(0)])
    aims = torch.stack([targets, targets.roll(1, 0)])
    got = torch.func.vmap(function, in_dims=(None, 0, 0))(parameters, batch, aims)
    close(got, torch.stack([definition(head, *one) for one in zip(batch, aims, strict=True)]), 1e-10, "nll under vmap")

    def total(parameters: dict[str, Tensor], hidden: Tensor, targets: Tensor) -> Tensor:
        return function(parameters, hidden, targets).sum()

    each = torch.func.vmap(torch.func.grad(total), in_dims=(None, 0, 0))(parameters, batch, aims)
    for place in range(len(batch)):
        _, want = gradients(head, batch[place], aims[place], definition)
        want = {name: one for name, one in want.items() if name in each}
        close_gradients(
            {name: one[place] for name, one in each.items()}, want, 1e-10, f" of example {place} under vmap"
        )


@check("func_jvp", after=AFTER)
def func_jvp(case: Case) -> None:
    """`torch.func.jvp` of `nll` is its gradient along the tangent, for hidden states and parameters."""
    head, hidden, targets = case.pair(dtype=torch.float64)
    function, parameters = _functional(head)
    tangent = torch.randn_like(hidden)
    tangents = {name: torch.randn_like(one) for name, one in parameters.items()}
    moved = torch.func.jvp(
        lambda parameters, hidden: function(parameters, hidden, targets), (parameters, hidden), (tangents, tangent)
    )
    value, along = moved[0], moved[1]
    truth, slopes = gradients(head, hidden, targets, definition)
    want = sum((slopes[name] * one).sum() for name, one in {"hidden": tangent, **tangents}.items() if name in slopes)
    close(value, truth, 1e-10, "value beside the tangent")
    close(along.sum(), torch.as_tensor(want), 1e-9, "tangent of the summed loss")


@check("compile", after=AFTER, compiles=True)
def compile_nll(case: Case) -> None:
    """`torch.compile(fullgraph=True)` of `nll` gives the values and gradients of the definition."""
    _compiled(case, nll, definition)


@check("compile_cross_entropy", after=(*AFTER, "cross_entropy"), compiles=True)
def compile_cross_entropy(case: Case) -> None:
    """`torch.compile(fullgraph=True)` of `losses.cross_entropy` gives what it gives without."""
    takes_cross_entropy(case)
    _compiled(case, losses.cross_entropy, losses.cross_entropy)


def _compiled(case: Case, loss: Any, reference: Any) -> None:
    head, hidden, targets = case.pair()
    targets.view(-1)[0] = -100
    truth, want = gradients(case.head(torch.float64), hidden.double(), targets, reference)
    torch.compiler.reset()
    try:
        got, found = gradients(head, hidden, targets, torch.compile(loss, fullgraph=True, backend=case.backend))
    finally:
        torch.compiler.reset()
    close(got, truth, 3e-5, "compiled loss")
    close_gradients(found, want, 3e-5, " of the compiled loss")
