"""The propositions about the gradient bottleneck (MATH 6), as executable checks."""

import pytest
import torch


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _gradient(hidden, weight, targets):
    return torch.softmax(hidden @ weight.T, -1) - torch.nn.functional.one_hot(targets, len(weight))


@pytest.mark.parametrize(("n", "v"), [(5, 20), (20, 8), (9, 10), (10, 9), (12, 12)])
def test_rows_of_the_gradient_sum_to_zero_so_its_rank_is_at_most_the_smaller_of_n_and_v_less_one(n, v):
    gradient = _gradient(_randn(n, 4), _randn(v, 4, seed=1), torch.arange(n) % v)
    torch.testing.assert_close(gradient.sum(-1), torch.zeros(n, dtype=torch.float64), rtol=0, atol=1e-14)
    assert int(torch.linalg.matrix_rank(gradient, rtol=1e-10)) == min(n, v - 1)  # attained for generic scores


def test_one_gradient_step_changes_the_scores_by_a_matrix_of_rank_at_most_twice_the_width():
    n, v, d, rate = 30, 25, 3, 1e-4
    hidden, weight = _randn(n, d).requires_grad_(), _randn(v, d, seed=1).requires_grad_()
    targets = torch.arange(n) % v
    torch.nn.functional.cross_entropy(hidden @ weight.T, targets, reduction="sum").backward()
    hidden_step, weight_step = rate * hidden.grad, rate * weight.grad
    hidden, weight = hidden.detach(), weight.detach()
    change = (hidden - hidden_step) @ (weight - weight_step).T - hidden @ weight.T
    gradient = _gradient(hidden, weight, targets)
    first_order = -rate * (gradient @ weight @ weight.T + hidden @ hidden.T @ gradient)
    torch.testing.assert_close(change, first_order, rtol=0, atol=30 * rate * float(first_order.abs().max()))
    values = torch.linalg.svdvals(change)
    assert values[2 * d - 1] > 1e-9 * values[0]
    assert values[2 * d] < 1e-10 * values[0]
    # So the step misses at least the tail of the singular values of G (corollary 2.8), at whatever rate.
    best = change * float((change * gradient).sum() / change.square().sum())
    tail = torch.linalg.svdvals(gradient)[2 * d :].square().sum().sqrt()
    assert (gradient - best).norm() >= tail > 0


def test_what_reaches_the_body_does_not_see_the_part_outside_the_column_space():
    weight = _randn(20, 4)
    gradient = _gradient(_randn(6, 4, seed=1), weight, torch.arange(6))
    basis = torch.linalg.qr(weight).Q
    destroyed = gradient - gradient @ basis @ basis.T
    assert destroyed.norm() > 0.5 * gradient.norm()
    torch.testing.assert_close(destroyed @ weight, torch.zeros(6, 4, dtype=torch.float64), rtol=0, atol=1e-13)


@pytest.mark.parametrize("biased", [False, True])
def test_a_linear_head_has_log_probabilities_of_rank_at_most_width_plus_one_and_one_for_a_bias(biased):
    weight, bias = _randn(40, 5), _randn(40, seed=2) if biased else None
    log_probability = torch.log_softmax(torch.nn.functional.linear(_randn(30, 5, seed=1), weight, bias), -1)
    assert int(torch.linalg.matrix_rank(log_probability, rtol=1e-11)) == 6 + biased
    capped = torch.log_softmax(2 * torch.tanh(torch.nn.functional.linear(_randn(30, 5, seed=1), weight, bias) / 2), -1)
    assert int(torch.linalg.matrix_rank(capped, rtol=1e-11)) == 30
