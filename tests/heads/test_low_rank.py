"""What LowRank alone promises; its definition is in test_definitions.py, all laws in test_laws.py."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from unembed import heads
from unembed.heads import LowRank


def test_worked_by_hand():
    head = LowRank(2, 3, rank=1, dtype=torch.float64)
    with torch.no_grad():
        head.projection.copy_(torch.tensor([[1.0, 2.0]]))
        head.weight.copy_(torch.tensor([[1.0], [0.0], [-1.0]]))
    hidden = torch.tensor([[1.0, 1.0]], dtype=torch.float64)  # h B^T = 3
    torch.testing.assert_close(head(hidden), torch.tensor([[3.0, 0.0, -3.0]], dtype=torch.float64))
    wanted = math.log(math.exp(3) + 1 + math.exp(-3)) - 3
    torch.testing.assert_close(head.nll(hidden, torch.tensor([0])).item(), wanted)


@pytest.mark.parametrize(("d", "v", "rank"), [(6, 20, 6), (6, 4, 4), (6, 20, 9), (1, 5, 1)])
def test_starts_as_the_linear_head_where_the_rank_allows(d, v, rank):
    torch.manual_seed(0)
    linear = heads.Linear(d, v, bias=True, scale=1.7)
    head = LowRank.from_linear(linear, rank=rank)
    hidden, targets = torch.randn(30, d), torch.randint(v, (30,))
    assert head.fit_error is not None
    assert head.fit_error < 1e-7
    torch.testing.assert_close(head.nll(hidden, targets), linear.nll(hidden, targets), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_best_fit_is_the_truncated_decomposition_and_its_error_is_told(rank):
    torch.manual_seed(0)
    linear = nn.Linear(7, 40, dtype=torch.float64)
    with pytest.warns(UserWarning, match=rf"LowRank starts \d.\de-01 .*: rank {rank} of 7; see `fit_error`") as told:
        head = LowRank.from_linear(linear, rank=rank)
    assert told[0].filename == __file__
    left, values, right = torch.linalg.svd(linear.weight.detach(), full_matrices=False)
    best = left[:, :rank] @ torch.diag(values[:rank]) @ right[:rank]
    product = (head.weight @ head.projection).detach()
    torch.testing.assert_close(product, best)
    error = (linear.weight - best).norm() / linear.weight.norm()
    assert head.fit_error == pytest.approx(error.item(), rel=1e-9)
    torch.testing.assert_close(head.weight.norm(dim=0), head.projection.norm(dim=1))  # the two share each value


def test_a_matrix_of_zeros_and_one_of_low_rank_are_kept_exactly():
    linear = nn.Linear(4, 6, bias=False)
    nn.init.zeros_(linear.weight)
    head = LowRank.from_linear(linear, rank=2)
    assert head.fit_error == 0
    assert torch.equal(head(torch.randn(2, 4)), torch.zeros(2, 6))
    assert all(parameter.isfinite().all() for parameter in head.parameters())
    with torch.no_grad():
        linear.weight.copy_(torch.outer(torch.arange(6.0), torch.tensor([1.0, -2.0, 0.5, 3.0])))
    head = LowRank.from_linear(linear, rank=1)
    torch.testing.assert_close(head.weight @ head.projection, linear.weight)


def test_rank_of_the_log_probabilities_keeps_the_bound():
    head = LowRank(12, 40, rank=3, bias=True, dtype=torch.float64)
    assert head.rank_bound == 5
    values = torch.linalg.svdvals(head.log_prob(torch.randn(60, 12, dtype=torch.float64)))
    assert int((values > 1e-10 * values[0]).sum()) == 5
    assert LowRank(4, 40, rank=9).rank_bound == 5
    assert LowRank(12, 4, rank=9).rank_bound == 4


def test_spec_and_wrong_options():
    head = heads.build("low_rank:rank=3,bias=True", 8, 20)
    assert isinstance(head, LowRank)
    assert (head.rank, head.bias is not None, head.flops()) == (3, True, 2 * 3 * 28)
    assert (LowRank(8, 20).rank, LowRank(3, 20).rank) == (2, 1)
    with pytest.raises(ValueError, match="`rank` must be at least 1, got 0"):
        LowRank(8, 20, rank=0)
    with pytest.raises(ValueError, match="soft-cap"):
        LowRank.from_linear(heads.Linear(3, 4, softcap=2.0))
