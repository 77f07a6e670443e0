"""Checks of parameters as state: drawn anew, copied, saved, made without memory, and started from a linear layer."""

from __future__ import annotations

import copy
import inspect
import tempfile
from typing import Any

import torch
from torch import Tensor, nn

from unembed import heads
from unembed.testing._case import Case, NotApplicableError, close, expect, log_prob
from unembed.testing._registry import check


def _same(case: Case, head: Any, other: Any, what: str) -> None:
    """Fail unless both give the same log-probabilities, bit for bit."""
    hidden = case.hidden()
    with torch.no_grad():
        close(log_prob(other, hidden), log_prob(head, hidden), 0.0, f"log_prob {what}")


@check("reset_parameters", after=())
def reset_parameters(case: Case) -> None:
    """`reset_parameters()` draws new finite values, the same ones for the same seed."""
    case.has("reset_parameters")
    head = case.head()
    drawn: list[dict[str, Tensor]] = [copy.deepcopy(head.state_dict())]
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        head.reset_parameters()
        drawn.append(copy.deepcopy(head.state_dict()))
    before, first, again, other = ({key: one for key, one in each.items() if isinstance(one, Tensor)} for each in drawn)
    for name, value in first.items():
        expect(bool(value.isfinite().all()), f"`{name}` is not finite")
        expect(torch.equal(value, again[name]), f"`{name}` differs between two draws with the same seed")
    for what, one in (("the values before", before), ("those of another seed", other)):
        expect(any(not torch.equal(first[name], one[name]) for name in first), f"all values are equal to {what}")


@check("state_dict", after=("law",))
def state_dict(case: Case) -> None:
    """A new head that loads `state_dict()` gives the same log-probabilities."""
    head = case.head()
    try:
        other = case.fresh().float()
    except NotApplicableError:
        other = case.head()
        if hasattr(other, "reset_parameters"):
            other.reset_parameters()
        else:
            with torch.no_grad():
                for parameter in other.parameters():
                    parameter.add_(1.0)
    found = other.load_state_dict(copy.deepcopy(head.state_dict()))
    expect(not found.missing_keys and not found.unexpected_keys, f"expected the same keys, got {found}")
    _same(case, head, other, "after loading the state of another head")


@check("deepcopy", after=("law",))
def deepcopy(case: Case) -> None:
    """A deep copy gives the same log-probabilities and shares no memory."""
    head = case.head()
    other = copy.deepcopy(head)
    _same(case, head, other, "of a deep copy")
    before = copy.deepcopy(head.state_dict())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(1.0)
    for name, value in head.state_dict().items():
        expect(torch.equal(value, before[name]), f"changing the copy changed `{name}` of the head")


@check("save_load", after=("law", "state_dict"))
def save_load(case: Case) -> None:
    """`heads.save` and `heads.load` give back a head of the same class, options and log-probabilities."""
    if case.kind not in heads.HEADS.values():
        raise NotApplicableError("the class is not registered in `unembed.heads`")
    head = case.head()
    with tempfile.TemporaryDirectory() as folder:
        other = heads.load(heads.save(head, folder), device=case.device).eval()
    expect(type(other) is case.kind, f"expected a {case.kind.__name__}, got a {type(other).__name__}")
    expect(other.options() == head.options(), f"expected options {head.options()}, got {other.options()}")
    _same(case, head, other, "after saving and loading")


@check("meta", after=("law", "reset_parameters"))
def meta(case: Case) -> None:
    """Made on the meta device, then `to_empty` and `reset_parameters()`: every value is set, and the law holds."""
    case.has("reset_parameters")
    if hasattr(case.given, "options"):
        head = case.fresh(device="meta")
        real = [name for name, parameter in head.named_parameters() if not parameter.is_meta]
        expect(not real, f"expected everything on the meta device, got memory for {real}")
    else:
        head = case.head().to("meta")
    head.to_empty(device=case.device)
    with torch.no_grad():
        for tensor in (*head.parameters(), *head.buffers()):
            # What `to_empty` leaves is arbitrary; these values show when one of them is kept.
            tensor.fill_(torch.nan if tensor.is_floating_point() else 0)
    head.reset_parameters()
    for name, tensor in (*head.named_parameters(), *head.named_buffers()):
        if tensor.is_floating_point():
            expect(not bool(tensor.isnan().any()), f"`reset_parameters()` leaves `{name}` unset")
    found = log_prob(head.float(), case.hidden())
    total = found.exp().sum(-1)
    close(total, torch.ones_like(total), 1e-5, "sum of probabilities of a head made on the meta device")


@check("meta_context", after=())
def meta_context(case: Case) -> None:
    """Made inside `with torch.device("meta")`, as model loaders do, a head has no memory behind its parameters."""
    with torch.device("meta"):
        head = case.fresh()
    real = [name for name, parameter in head.named_parameters() if not parameter.is_meta]
    expect(not real, f"expected everything on the meta device, got memory for {real}")


@check("from_linear", after=("law", "nll"))
def from_linear(case: Case) -> None:
    """`from_linear(nn.Linear)` starts at the linear layer's losses within 1e-5 nats, unless its class says it cannot.

    A class whose start is a best fit says so with `from_linear_exact = False`.
    """
    case.has("from_linear")
    if not getattr(case.given, "from_linear_exact", True):
        raise NotApplicableError("the class says that its start is a best fit (`from_linear_exact = False`)")
    taken = list(inspect.signature(case.kind.from_linear).parameters.values())
    if any(one.default is one.empty and one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY) for one in taken[1:]):
        raise NotApplicableError("`from_linear` needs more than the linear layer")
    hidden = case.hidden()
    case.flat(hidden, case.tokens(case.head(), hidden))
    for bias in (False, True):
        linear = nn.Linear(case.given.in_features, case.classes, bias=bias, device=case.device)
        try:
            head = case.kind.from_linear(linear).eval()
        except ValueError as refusal:
            if bias:  # A head may have no room for one, and say so.
                continue
            raise refusal
        with torch.no_grad():
            want = torch.log_softmax(linear.double()(hidden.double()), -1)
            close(log_prob(head, hidden), want, 1e-5, f"log_prob of the warm start, bias={bias}")
