"""Hidden states in one dtype, parameters in another: every head of the package computes in the wider one."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from unembed import heads, losses

KINDS = list(dict.fromkeys(heads.HEADS.values()))
MIXED = [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16), (torch.float32, torch.float64)]


def _examples() -> list[Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [
            pytest.param(head, id=f"{kind.__name__}-{place}")
            for kind in KINDS
            for place, head in enumerate(kind.examples(8, 13))
        ]


def _inputs(head: heads.Head, narrow: torch.dtype) -> tuple[Tensor, Tensor]:
    """Hidden states that the narrow dtype holds exactly."""
    torch.manual_seed(0)
    hidden = head.example_hidden((2, 3)).to(narrow)
    return hidden, torch.randint(13, head.tokens_shape(hidden))


def _gradients(head: heads.Head, hidden: Tensor, targets: Tensor, smoothing: float) -> list[Tensor | None]:
    loss = losses.cross_entropy(head, hidden, targets, label_smoothing=smoothing)
    return [loss.detach(), *torch.autograd.grad(loss, [hidden, *head.parameters()], allow_unused=True)]


@pytest.mark.parametrize(("of_hidden", "of_head"), MIXED)
@pytest.mark.parametrize("given", _examples())
def test_every_head_computes_in_the_wider_dtype(given: Any, of_hidden: torch.dtype, of_head: torch.dtype) -> None:
    """Values are those of the same numbers held in the wider dtype; gradients come in the dtype of their tensor."""
    wide = torch.promote_types(of_hidden, of_head)
    head, same = copy.deepcopy(given).to(of_head), copy.deepcopy(given).to(of_head).to(wide)
    hidden, targets = _inputs(head, of_hidden)
    for name in ("__call__", "log_prob"):
        torch.testing.assert_close(getattr(head, name)(hidden), getattr(same, name)(hidden.to(wide)))
    torch.testing.assert_close(head.nll(hidden, targets), same.nll(hidden.to(wide), targets))
    found, want = head.topk(hidden, 3), same.topk(hidden.to(wide), 3)
    torch.testing.assert_close(found[0], want[0])
    drawn = [
        one.sample(states, generator=torch.Generator().manual_seed(0))
        for one, states in ((head, hidden), (same, hidden.to(wide)))
    ]
    assert torch.equal(*drawn)
    for smoothing in (0.0,) if head.sparse else (0.0, 0.1):
        found = _gradients(head, hidden.clone().requires_grad_(), targets, smoothing)
        want = _gradients(same, hidden.to(wide).requires_grad_(), targets, smoothing)
        of = [found[0], hidden, *head.parameters()]
        for place, (one, right, like) in enumerate(zip(found, want, of, strict=True)):
            if one is not None and right is not None:
                assert one.dtype == like.dtype, place
                near = {"rtol": 2e-2, "atol": 2e-3} if one.dtype == torch.bfloat16 else {"rtol": 1e-4, "atol": 1e-6}
                torch.testing.assert_close(one, right.to(one.dtype), **near)


@pytest.mark.parametrize("given", _examples())
def test_under_autocast_a_wider_head_is_as_before(given: Any) -> None:
    head = copy.deepcopy(given).to(torch.float32)
    hidden, targets = _inputs(head, torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = [losses.cross_entropy(head, states, targets) for states in (hidden, hidden.float())]
    torch.testing.assert_close(found[0], found[1], rtol=2e-2, atol=1e-2)
    torch.testing.assert_close(found[0], losses.cross_entropy(head, hidden, targets), rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_all_offsets_of_multi_token_prediction(mode: str) -> None:
    torch.manual_seed(0)
    head = heads.MultiTokenPrediction(8, 13, n=3, mode=mode)
    hidden, targets = torch.randn(2, 5, 8, dtype=torch.bfloat16), torch.randint(13, (2, 5, 3))
    torch.testing.assert_close(head.nll(hidden, targets), head.nll(hidden.float(), targets))
    torch.testing.assert_close(head.joint_loss(hidden, targets), head.joint_loss(hidden.float(), targets))


def test_per_example_gradients_by_vmap() -> None:
    head = heads.build("mos:k=2", 4, 7)
    hidden, targets = torch.randn(3, 4, dtype=torch.bfloat16), torch.arange(3)
    parameters = dict(head.named_parameters())

    def loss(parameters: dict[str, Tensor], state: Tensor, target: Tensor) -> Tensor:
        scores = torch.func.functional_call(head, parameters, (state,))
        return torch.nn.functional.nll_loss(scores[None], target[None])

    found = torch.func.vmap(torch.func.grad(loss), (None, 0, 0))(parameters, hidden, targets)
    head.nll(hidden.float(), targets).sum().backward()
    for name, parameter in parameters.items():
        torch.testing.assert_close(found[name].sum(0), parameter.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.compile
@pytest.mark.parametrize("spec", ["mos:k=2", "low_rank", "adaptive", "mtp"])
def test_compiles_whole(spec: str) -> None:
    head, hidden, targets = heads.build(spec, 8, 40), torch.randn(5, 8, dtype=torch.bfloat16), torch.arange(5)
    compiled = torch.compile(lambda h: losses.cross_entropy(head, h, targets), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(hidden), losses.cross_entropy(head, hidden, targets))
