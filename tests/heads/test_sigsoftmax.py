"""What Sigsoftmax alone promises; its definition is in test_definitions.py, all laws in test_laws.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from unembed import heads
from unembed.heads import Sigsoftmax


def _gradients(value: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    found = torch.autograd.grad(value, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


@pytest.mark.parametrize(
    ("u", "wanted"), [([-200.0, -201.0, -202.0], [0.8668, 0.1173, 0.0159]), ([100.0, 99.0], [0.7311, 0.2689])]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_l27_far_from_zero_on_both_sides(u, wanted, dtype):
    head = Sigsoftmax(1, len(u), dtype=dtype)
    with torch.no_grad():
        head.weight.copy_(torch.tensor(u)[:, None])
    hidden = torch.ones(1, 1, dtype=dtype, requires_grad=True)
    for found in (head.log_prob(hidden)[0].exp(), torch.exp(-head.nll(hidden.expand(len(u), 1), torch.arange(len(u))))):
        torch.testing.assert_close(found, torch.tensor(wanted, dtype=dtype), rtol=0, atol=5e-5)
        gradients = _gradients(found[0], [hidden, head.weight])
        assert all(gradient.isfinite().all() for gradient in gradients)


def test_worked_by_hand():
    """exp(u) sigmoid(u) at 0 and log 2 is 1/2 and 4/3."""
    head = Sigsoftmax(1, 2, dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0], [math.log(2)]]))
    found = head.nll(torch.ones(2, 1, dtype=torch.float64), torch.tensor([0, 1]))
    torch.testing.assert_close(found.exp(), torch.tensor([11 / 3, 11 / 8], dtype=torch.float64))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("d", "size"), [(1, 1.0), (64, 1.0), (64, 4.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_starts_as_the_linear_head(bias, d, size, dtype):
    torch.manual_seed(0)
    linear = heads.Linear(d, 500, bias=bias, scale=0.9, dtype=dtype)
    with torch.no_grad():
        linear.weight.mul_(size)
    head = Sigsoftmax.from_linear(linear)
    hidden, targets = torch.randn(300, d, dtype=dtype), torch.randint(500, (300,))
    torch.testing.assert_close(head.nll(hidden, targets), linear.nll(hidden, targets), rtol=0, atol=1e-5)
    torch.testing.assert_close(head.log_prob(hidden), linear.log_prob(hidden), rtol=0, atol=1e-5)


def test_a_bfloat16_head_without_a_bias_starts_with_its_products():
    torch.manual_seed(0)
    linear = heads.Linear(64, 100, dtype=torch.bfloat16)
    hidden = torch.randn(20, 64, dtype=torch.bfloat16)
    found = Sigsoftmax.from_linear(linear).log_prob(hidden)
    torch.testing.assert_close(found, linear.log_prob(hidden), rtol=0, atol=1e-5)


def test_a_bias_that_its_dtype_rounds_away_is_told():
    torch.manual_seed(0)
    linear = heads.Linear(64, 100, bias=True, dtype=torch.bfloat16)
    with pytest.warns(UserWarning, match=r"starts up to \d.\de-01 nats .*bfloat16 rounds its bias"):
        head = Sigsoftmax.from_linear(linear)
    hidden = torch.randn(20, 64, dtype=torch.bfloat16)
    assert (head.log_prob(hidden) - linear.log_prob(hidden)).abs().max() > 1e-2
    meta = Sigsoftmax.from_linear(linear.to("meta"))
    assert meta.weight.is_meta


def test_norm_decides_how_far_down_the_start_is_exact():
    linear = nn.Linear(1, 2)
    with torch.no_grad():
        linear.weight.copy_(torch.tensor([[1.0], [-2.0]]))
        linear.bias.copy_(torch.tensor([0.5, -1.0]))
    bias = Sigsoftmax.from_linear(linear, norm=10.0).bias
    assert bias is not None
    torch.testing.assert_close(bias.detach(), torch.tensor([35.5, 34.0]))  # lowest score -21, so 14 + 21 on each
    with torch.no_grad():
        linear.bias[1] = -math.inf
    bias = Sigsoftmax.from_linear(linear, norm=10.0).bias
    torch.testing.assert_close(bias, nn.Parameter(torch.tensor([24.5, -math.inf])))  # lowest -9.5, rounded up


def test_rank_is_not_bounded_by_the_width():
    torch.manual_seed(0)
    head = Sigsoftmax(2, 30, dtype=torch.float64)
    with torch.no_grad():
        head.weight.normal_(std=2.0)
    values = torch.linalg.svdvals(head.log_prob(torch.randn(60, 2, dtype=torch.float64)))
    assert head.rank_bound is None
    assert int((values > 1e-10 * values[0]).sum()) > 3


def test_spec_and_wrong_options():
    head = heads.build("sigsoftmax:bias=True", 8, 20)
    assert isinstance(head, Sigsoftmax)
    assert head.bias is not None
    assert head.flops() == 2 * 8 * 20
    with pytest.raises(ValueError, match="soft-cap"):
        Sigsoftmax.from_linear(heads.Linear(3, 4, softcap=2.0))
    with pytest.raises(ValueError, match="soft"):
        heads.build("sigsoftmax:softcap=3", 8, 20)
