"""What Mixtape alone promises; its definition is in test_definitions.py, all laws in test_laws.py."""

from __future__ import annotations

import math

import pytest
import torch

from unembed import heads
from unembed.heads import Mixtape
from unembed.heads._mixtape import _shares


def test_worked_by_hand():
    """One frequent and one rare token, D = 1; tanh of the facets is 0.1, 0.2, 0.3, 0.4."""
    head = Mixtape(1, 2, gated=1, gate_features=1, dtype=torch.float64)
    with torch.no_grad():
        head.facets.copy_(torch.atanh(torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64))[:, None, None])
        head.weight.copy_(torch.tensor([[10.0], [20.0]]))
        head.gate_shared.copy_(torch.tensor([[0.0], [math.log(3)], [-math.log(3)]]))  # 1/2, 3/4, 1/4
        head.gate_hidden.copy_(torch.atanh(torch.tensor(0.5, dtype=torch.float64)).expand(3, 1, 1))
        head.gate_weight.fill_(2 * math.log(3))  # adds log 3 to each logit
        head.gate_bias.copy_(torch.tensor([[0.0, -math.log(3), math.log(3)]]))  # so 3/4, 3/4, 3/4
    rare = 20 * (0.375 * 0.1 + 0.125 * 0.2 + 0.125 * 0.3 + 0.375 * 0.4)
    frequent = 10 * (0.5625 * 0.1 + 0.1875 * 0.2 + 0.1875 * 0.3 + 0.0625 * 0.4)
    one = torch.ones(1, 1, dtype=torch.float64)
    torch.testing.assert_close(head(one), torch.tensor([[frequent, rare]], dtype=torch.float64))
    wanted = math.log1p(math.exp(rare - frequent))
    torch.testing.assert_close(head.nll(one, torch.tensor([0])).item(), wanted)


def test_gates_are_never_negative_and_sum_to_one():
    logits = torch.tensor([-1e4, -90.0, -3.0, 0.0, 5.0, 90.0, 1e4])
    shares = _shares(torch.cartesian_prod(logits, logits, logits))
    assert (shares >= 0).all()
    torch.testing.assert_close(shares.sum(-1), torch.ones(len(shares)))


@pytest.mark.parametrize("gated", [0, 7, 300])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_starts_as_the_linear_head_and_its_facets_part(gated, bias, dtype):
    torch.manual_seed(0)
    linear = heads.Linear(16, 300, bias=bias, scale=1.3, dtype=dtype)
    head = Mixtape.from_linear(linear, gated=gated)
    hidden, targets = torch.randn(100, 16, dtype=dtype), torch.randint(300, (100,))
    loss = head.nll(hidden, targets)
    torch.testing.assert_close(loss, linear.nll(hidden, targets), rtol=0, atol=1e-5)
    loss.sum().backward()
    assert head.facets.grad is not None
    assert (head.facets.grad[1:] - head.facets.grad[:1]).abs().amax((1, 2)).min() > 1e-3


def test_rank_is_not_bounded_by_the_width():
    torch.manual_seed(0)
    head = Mixtape(2, 30, gated=15, dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    values = torch.linalg.svdvals(head.log_prob(torch.randn(60, 2, dtype=torch.float64)))
    assert head.rank_bound is None
    assert int((values > 1e-10 * values[0]).sum()) > 4


def test_spec_and_wrong_options():
    head = heads.build("mixtape:gated=5,gate_features=3,bias=True", 8, 20)
    assert isinstance(head, Mixtape)
    assert head.options() == {"gated": 5, "gate_features": 3, "activation": "tanh", "bias": True}
    assert head.flops() == 2 * (8 * (20 + 3 * 5) + 4 * 64 + 3 * (3 * (8 + 5) + 8))
    assert (Mixtape(8, 100).gated, Mixtape(8, 3).gated) == (10, 1)
    for options in ({"gated": 21}, {"gated": -1}, {"gate_features": 0}, {"activation": "relu"}):
        with pytest.raises(ValueError, match=f"`{next(iter(options))}` must"):
            Mixtape(8, 20, **options)
    with pytest.raises(ValueError, match="soft-cap"):
        Mixtape.from_linear(heads.Linear(3, 4, softcap=2.0))
