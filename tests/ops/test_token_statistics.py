"""Statistics of each token against torch.distributions, with derivatives and edges."""

import pytest
import torch
from torch.distributions import Categorical, kl_divergence

from unembed.ops import linear_nll, token_statistics


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("softcap", [None, 2.0])
def test_all_numbers_are_those_of_the_distributions(softcap):
    hidden, other, weight, other_weight = (
        _randn(3, 4, 5),
        _randn(3, 4, 2, seed=1),
        _randn(9, 5, seed=2),
        _randn(9, 2, seed=3),
    )
    bias, targets = _randn(9, seed=4), torch.arange(12).reshape(3, 4) % 9
    targets[0, 0] = -100
    found = token_statistics(
        hidden,
        weight,
        targets,
        bias=bias,
        softcap=softcap,
        reference_hidden=other,
        reference_weight=other_weight,
        chunk=5,
    )
    scores, reference = hidden @ weight.T + bias, other @ other_weight.T
    if softcap is not None:
        scores, reference = (softcap * torch.tanh(part / softcap) for part in (scores, reference))
    p, q = Categorical(logits=scores), Categorical(logits=reference)
    assert torch.allclose(found.entropy, p.entropy())
    assert torch.allclose(found.kl, kl_divergence(p, q))
    assert torch.equal(found.argmax, scores.argmax(-1))
    assert torch.allclose(found.lse, scores.logsumexp(-1))
    assert found.log_prob[0, 0] == 0
    assert torch.allclose(found.log_prob.flatten()[1:], p.log_prob(targets.clamp(min=0)).flatten()[1:])
    assert torch.allclose(found.log_prob, -linear_nll(hidden, weight, targets, bias=bias, softcap=softcap))
    assert token_statistics(hidden, weight, targets).kl is None


def test_first_and_second_derivatives():
    hidden, weight, other = _randn(5, 3), _randn(4, 3, seed=1), _randn(5, 3, seed=2)
    inputs = tuple(tensor.requires_grad_() for tensor in (hidden, weight, other))
    targets = torch.tensor([0, 1, 2, 3, -100])

    def numbers(hidden, weight, other):
        found = token_statistics(hidden, weight, targets, reference_hidden=other, chunk=2)
        return found.log_prob, found.entropy, found.kl, found.lse

    assert torch.autograd.gradcheck(numbers, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(numbers, inputs, fast_mode=True)


def test_a_class_taken_out_adds_nothing_and_is_seen_by_no_gradient():
    hidden, weight = _randn(3, 2).requires_grad_(), _randn(4, 2, seed=1).requires_grad_()
    bias = torch.tensor([0.0, -torch.inf, 0.0, 0.0], dtype=torch.float64)
    found = token_statistics(hidden, weight, torch.tensor([0, 2, 3]), bias=bias, reference_hidden=hidden.detach() + 1)
    keep = torch.tensor([0, 2, 3])
    small = token_statistics(hidden, weight[keep], torch.arange(3), reference_hidden=hidden.detach() + 1)
    for name in ("log_prob", "entropy", "kl", "lse"):
        assert torch.allclose(getattr(found, name), getattr(small, name))
    (of_weight,) = torch.autograd.grad(found.entropy.sum() + found.kl.sum(), weight)
    assert torch.equal(of_weight[1], torch.zeros(2, dtype=torch.float64))
    assert torch.isfinite(of_weight).all()


def test_a_certain_distribution_has_no_entropy_and_equal_ones_no_divergence():
    found = token_statistics(
        torch.ones(1, 1), torch.tensor([[500.0], [0.0]]), torch.tensor([1]), reference_hidden=torch.ones(1, 1)
    )
    assert (found.entropy.item(), found.kl.item(), found.log_prob.item(), found.argmax.item()) == (0, 0, -500, 0)


def test_bad_references_are_named():
    hidden, weight, targets = _randn(3, 2), _randn(4, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="`reference_weight` needs `reference_hidden`"):
        token_statistics(hidden, weight, targets, reference_weight=weight)


@pytest.mark.compile
def test_compiles_whole():
    hidden, weight, targets = _randn(5, 3), _randn(4, 3, seed=1), torch.arange(5) % 4
    compiled = torch.compile(token_statistics, fullgraph=True, backend="aot_eager")
    for one, other in zip(
        compiled(hidden, weight, targets, reference_hidden=hidden + 1),
        token_statistics(hidden, weight, targets, reference_hidden=hidden + 1),
        strict=True,
    ):
        assert torch.allclose(one.double(), other.double())
