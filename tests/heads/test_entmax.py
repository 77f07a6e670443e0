"""The Entmax head beside what `check_head` looks at: its definition, zeros, and where it starts."""

import pytest
import torch

from unembed import heads, losses
from unembed.heads._entmax import _reference


def _head(alpha, **options):
    torch.manual_seed(0)
    head = heads.Entmax(5, 30, alpha=alpha, dtype=torch.float64, **options)
    with torch.no_grad():
        head.weight.mul_(6)
    return head


@pytest.mark.parametrize("alpha", [1.0, 1.2, 1.5, 2.0, 2.5])
@pytest.mark.parametrize("bias", [False, True])
def test_log_probabilities_are_those_of_the_definition(alpha, bias):
    head, hidden = _head(alpha, bias=bias), torch.randn(4, 3, 5, dtype=torch.float64)
    found, right = head.log_prob(hidden), _reference(head, hidden)
    assert torch.equal(found == -torch.inf, right == -torch.inf)
    assert torch.allclose(found.exp(), right.exp(), atol=1e-12)
    assert torch.allclose(torch.log_softmax(head(hidden), -1), found, atol=1e-12)  # the head law


def test_zeros_are_exact_never_drawn_and_never_among_the_best():
    head, hidden = _head(2.0), torch.randn(6, 5, dtype=torch.float64)
    support = head.log_prob(hidden) > -torch.inf
    assert support.sum(-1).max() < 10
    generator = torch.Generator().manual_seed(0)
    for _ in range(50):
        assert support.gather(1, head.sample(hidden, generator=generator)[:, None]).all()
    values, _ = head.topk(hidden, 12)
    assert (values[:, -1] == -torch.inf).all()


def test_outside_the_support_the_loss_is_infinite_and_gradients_are_finite():
    head, hidden = _head(2.0), torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    targets = head.log_prob(hidden).argmin(-1)
    loss = head.nll(hidden, targets)
    assert loss.isinf().all()
    assert all(torch.isfinite(one).all() for one in torch.autograd.grad(loss.sum(), [hidden, head.weight]))


@pytest.mark.parametrize(("alpha", "score", "loss"), [(1.0, 120.0, 120.0), (1.01, 90.0, 230.2585)])
def test_the_loss_of_a_rare_token_has_no_floor(alpha, score, loss):
    head = heads.Entmax(1, 2, alpha=alpha)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[score], [0.0]]))
    assert torch.allclose(head.nll(torch.ones(1, 1), torch.tensor([1])), torch.tensor([loss]))


def test_alpha_one_is_not_sparse():
    head, hidden = _head(1.0), torch.randn(6, 5, dtype=torch.float64)
    linear = torch.nn.functional.cross_entropy(head.scores(hidden), torch.arange(6), label_smoothing=0.1)
    assert torch.allclose(losses.cross_entropy(head, hidden, torch.arange(6), label_smoothing=0.1), linear)


def test_label_smoothing_is_refused():
    head, hidden = _head(1.5), torch.randn(6, 5, dtype=torch.float64)
    with pytest.raises(ValueError, match="`label_smoothing` goes to classes"):
        losses.cross_entropy(head, hidden, head.sample(hidden), label_smoothing=0.1)


def test_it_starts_with_the_order_of_a_linear_head():
    linear = torch.nn.Linear(5, 30, dtype=torch.float64)
    hidden = torch.randn(7, 5, dtype=torch.float64)
    head = heads.Entmax.from_linear(linear, alpha=1.5)
    assert torch.allclose(head.scores(hidden), linear(hidden))
    assert torch.equal(head.log_prob(hidden).argmax(-1), linear(hidden).argmax(-1))
    same = heads.Entmax.from_linear(heads.Linear.from_linear(linear), alpha=1.0)
    assert torch.allclose(same.log_prob(hidden), torch.log_softmax(linear(hidden), -1))


def test_options_survive_the_disk_and_bad_ones_are_refused(tmp_path):
    heads.save(_head(1.3, bias=True), tmp_path / "head")
    back = heads.load(tmp_path / "head")
    assert isinstance(back, heads.Entmax)
    assert back.alpha == 1.3
    with pytest.raises(ValueError, match=r"`alpha` must lie in \[1, 2\.5\]"):
        heads.Entmax(5, 30, alpha=0.9)
    with pytest.raises(ValueError, match="`alpha` must be a number here"):
        heads.Entmax(5, 30, alpha=torch.tensor(1.5))
    with pytest.raises(ValueError, match="soft-cap"):
        heads.Entmax.from_linear(heads.Linear(5, 30, softcap=3.0))
