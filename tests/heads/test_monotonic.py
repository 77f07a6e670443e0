"""What MonotonicSoftmax alone promises; its definition is in test_definitions.py, all laws in test_laws.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from unembed import heads, losses
from unembed.heads import MonotonicSoftmax


def _raw(slope: float) -> float:
    """The parameter whose segment has this slope."""
    return math.log(math.expm1(slope)) - math.log(math.expm1(1.0))


def test_worked_by_hand():
    """Knots -2, 0, 2 with slopes 1/2 and 3: linear on, beyond the ends."""
    head = MonotonicSoftmax(1, 5, knots=3, limit=2.0, dtype=torch.float64)
    with torch.no_grad():
        head.slopes.copy_(torch.tensor([_raw(0.5), _raw(3.0)]))
        head.weight.copy_(torch.tensor([[-5.0], [-1.0], [0.0], [1.0], [4.0]]))
    one = torch.ones(1, 1, dtype=torch.float64)
    torch.testing.assert_close(head(one), torch.tensor([[-2.5, -0.5, 0.0, 3.0, 12.0]], dtype=torch.float64))
    wanted = math.log(sum(math.exp(z) for z in (-2.5, -0.5, 0.0, 3.0, 12.0))) - 3
    torch.testing.assert_close(head.nll(one, torch.tensor([3])).item(), wanted)


@pytest.mark.parametrize("knots", [2, 3, 4, 7, 32])
def test_the_function_increases_is_continuous_and_zero_at_zero(knots):
    torch.manual_seed(0)
    head = MonotonicSoftmax(1, 1, knots=knots, limit=3.0, dtype=torch.float64)
    with torch.no_grad():
        head.slopes.normal_(std=2.0)
    x = torch.linspace(-8, 8, 100_001, dtype=torch.float64)
    found = head.function(x).detach()
    steepest = nn.functional.softplus(head.slopes.detach() + 0.5413248546).max()
    steps = found.diff()
    assert (steps > 0).all()
    assert steps.max() <= steepest * 16 / 100_000 * (1 + 1e-9)  # no jump
    assert head.function(torch.zeros(1, dtype=torch.float64)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("bias", [False, True])
def test_starts_as_the_linear_head(bias, dtype):
    torch.manual_seed(0)
    linear = heads.Linear(16, 300, bias=bias, scale=1.3, dtype=dtype)
    with torch.no_grad():
        linear.weight.mul_(8)  # scores beyond the ends too
    head = MonotonicSoftmax.from_linear(linear, limit=5.0)
    hidden, targets = torch.randn(100, 16, dtype=dtype), torch.randint(300, (100,))
    assert head(hidden).abs().max() > 10
    torch.testing.assert_close(head.nll(hidden, targets), linear.nll(hidden, targets), rtol=1e-6, atol=1e-5)


def test_a_bfloat16_head_starts_with_its_products():
    torch.manual_seed(0)
    linear = nn.Linear(16, 30, bias=False, dtype=torch.bfloat16)
    hidden = torch.randn(20, 16, dtype=torch.bfloat16) * 9
    torch.testing.assert_close(MonotonicSoftmax.from_linear(linear)(hidden), linear(hidden).float(), rtol=1e-6, atol=0)


def test_scores_that_are_not_finite_stay_what_they_are():
    head = MonotonicSoftmax(1, 1)
    found = head.function(torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30]))
    torch.testing.assert_close(found, torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e30]), equal_nan=True)


def test_slopes_learn():
    torch.manual_seed(0)
    head = MonotonicSoftmax(4, 12, knots=9, limit=4.0)
    optimiser = torch.optim.Adam([head.slopes], lr=0.1)
    hidden, targets = torch.randn(50, 4) * 3, torch.randint(12, (50,))
    start = losses.cross_entropy(head, hidden, targets).item()
    for _ in range(40):
        optimiser.zero_grad()
        loss = losses.cross_entropy(head, hidden, targets)
        loss.backward()
        optimiser.step()
    assert loss.item() < start - 0.01


def test_rank_is_not_bounded_by_the_width():
    torch.manual_seed(0)
    head = MonotonicSoftmax.examples(2, 30)[1].double()
    with torch.no_grad():
        head.weight.normal_()
    values = torch.linalg.svdvals(head.log_prob(torch.randn(60, 2, dtype=torch.float64)))
    assert head.rank_bound is None
    assert int((values > 1e-10 * values[0]).sum()) > 4


def test_spec_and_wrong_options():
    head = heads.build("monotonic:knots=5,limit=8.0,bias=True", 8, 20)
    assert isinstance(head, MonotonicSoftmax)
    assert head.options() == {"knots": 5, "limit": 8.0, "bias": True}
    assert head.flops() == 2 * 8 * 20 + 5 * 20
    for options in ({"knots": 1}, {"limit": 0.0}, {"limit": math.inf}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}` must be"):
            MonotonicSoftmax(8, 20, **options)
    with pytest.raises(ValueError, match="soft-cap"):
        MonotonicSoftmax.from_linear(heads.Linear(3, 4, softcap=2.0))
