"""Statistics of each token against torch.distributions, with derivatives and edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Categorical, kl_divergence

from unembed.ops import _linear_work, linear_nll, statistics_of, token_statistics
from unembed.ops._linear_work import LinearOptions


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that a chunk of a small test is more than one piece."""
    monkeypatch.setattr(_linear_work, "_CACHED", 16)


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


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 9),
    d=st.integers(1, 5),
    v=st.integers(1, 17),
    chunk=st.integers(1, 12),
    biased=st.booleans(),
    softcap=st.sampled_from([None, 1.5]),
    reference=st.sampled_from(["none", "hidden", "both"]),
)
def test_values_and_gradients_are_those_of_the_definition(*, n, d, v, chunk, biased, softcap, reference):
    hidden, weight, other, other_weight, bias = (
        _randn(*shape, seed=seed).requires_grad_() for seed, shape in enumerate([(n, d), (v, d), (n, d), (v, d), (v,)])
    )
    targets = torch.arange(n) % v
    if n > 2:
        targets[2] = -100
    given = (
        [hidden, weight] + [bias] * biased + [other] * (reference != "none") + [other_weight] * (reference == "both")
    )
    shared = {"bias": bias if biased else None, "softcap": softcap, "scale": 0.7}
    against = {"reference_hidden": None if reference == "none" else other}
    if reference == "both":
        against["reference_weight"] = other_weight
    found = token_statistics(hidden, weight, targets, chunk=chunk, **shared, **against)
    options = LinearOptions(softcap=softcap, scale=0.7)
    scores = options.scores(hidden, weight, shared["bias"])
    rows = None
    if reference == "hidden":
        rows = options.scores(other, weight, shared["bias"])
    elif reference == "both":
        rows = options.scores(other, other_weight, None)
    right = statistics_of(scores, targets, rows, ignore_index=-100)
    mine = (found.log_prob, found.entropy, found.argmax, found.lse, *([] if rows is None else [found.kl]))
    for one, other_one in zip(mine, right, strict=True):
        torch.testing.assert_close(one, other_one)
    ups = [_randn(n, seed=9 + place) for place in range(len(mine))]
    loss, wanted = (
        sum((part * up).sum() for part, up in zip(parts, ups, strict=True) if part.is_floating_point())
        for parts in (mine, right)
    )
    for one, other_one in zip(torch.autograd.grad(loss, given), torch.autograd.grad(wanted, given), strict=True):
        torch.testing.assert_close(one, other_one)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_errs_no_more_than_the_materialised_form(dtype):
    hidden, weight, other = (_randn(40, 16), _randn(300, 16, seed=1), _randn(40, 16, seed=2))
    targets, up = torch.arange(40), 1e-4 * torch.rand(4, 40, generator=torch.Generator().manual_seed(3)).double()

    def numbers(found):
        log_prob, entropy, _, lse, kl = found
        return (torch.stack([log_prob, entropy, lse, kl]).double() * up).sum()

    def gradients(given, make):
        given = [tensor.clone().requires_grad_() for tensor in given]
        loss = numbers(make(*given))
        return [part.double() for part in (loss.detach(), *torch.autograd.grad(loss, given))]

    def ours(h, w, o):
        found = token_statistics(h, w, targets, reference_hidden=o, chunk=17)
        return found.log_prob, found.entropy, found.argmax, found.lse, found.kl

    def theirs(h, w, o):
        return statistics_of(h @ w.T, targets, o @ w.T, ignore_index=-100)

    narrow = [tensor.to(dtype) for tensor in (hidden, weight, other)]
    right = gradients([tensor.double() for tensor in narrow], theirs)
    for mine, their, exact in zip(gradients(narrow, ours), gradients(narrow, theirs), right, strict=True):
        assert (mine - exact).norm() <= 1.1 * (their - exact).norm() + 1e-6 * exact.norm()


@pytest.mark.parametrize(("own", "other"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float64)])
def test_the_reference_may_have_another_dtype(own, other):
    hidden, weight = _randn(6, 4).to(own).requires_grad_(), _randn(9, 4, seed=1).to(own).requires_grad_()
    reference, matrix, targets = _randn(6, 3, seed=2).to(other), _randn(9, 3, seed=3).to(other), torch.arange(6)
    found = token_statistics(hidden, weight, targets, reference_hidden=reference, reference_weight=matrix, chunk=4)
    exact = statistics_of(
        hidden.double() @ weight.double().T, targets, reference.double() @ matrix.double().T, ignore_index=-100
    )
    torch.testing.assert_close(found.kl.double(), exact[4], rtol=0.02, atol=0.02)
    (of_hidden,) = torch.autograd.grad(found.kl.sum(), hidden)
    assert of_hidden.dtype == own


def test_a_huge_offset_changes_nothing():
    bias = torch.full((50,), 1e8, requires_grad=True)
    hidden, weight = torch.ones(2, 3), torch.zeros(50, 3)
    found = token_statistics(hidden, weight, torch.tensor([0, 1]), bias=bias, reference_hidden=hidden + 1)
    assert found.entropy.tolist() == pytest.approx([math.log(50)] * 2, rel=1e-6)
    assert found.log_prob.tolist() == pytest.approx([-math.log(50)] * 2, rel=1e-6)
    assert found.kl.tolist() == [0, 0]
    found.log_prob.sum().backward()
    expected = torch.full((50,), -2 / 50)
    expected[:2] += 1
    torch.testing.assert_close(bias.grad, expected)


def test_an_almost_certain_distribution_keeps_the_digits_of_its_entropy_and_gradient():
    """With `p = 1 - e`, H is `e (1 - log e)` to first order; `1 - p` in float32 would be 0."""
    bias = torch.tensor([0.0, -20.0], requires_grad=True)
    found = token_statistics(torch.zeros(1, 1), torch.zeros(2, 1), torch.tensor([0]), bias=bias)
    rare = math.exp(-20)
    assert found.entropy.item() == pytest.approx(rare * 21, rel=1e-5)
    (of_entropy,) = torch.autograd.grad(found.entropy.sum(), bias, retain_graph=True)
    assert of_entropy.tolist() == pytest.approx([-20 * rare, 20 * rare], rel=1e-4)
    found.log_prob.sum().backward()
    assert bias.grad.tolist() == pytest.approx([rare, -rare], rel=1e-5)


@pytest.mark.parametrize(("own", "other"), [(20.0, 18.0), (27.0, 17.0), (18.0, 20.0)])
def test_the_divergence_of_two_almost_certain_distributions_keeps_its_digits(own, other):
    """With rests r and s it is `r log(r / s) + s - r`, far below what float32 can tell from 1."""
    weight, bias = torch.zeros(2, 1), torch.tensor([0.0, -own])
    other_bias = torch.tensor([0.0, -other])
    found = token_statistics(
        torch.zeros(1, 1),
        weight,
        torch.tensor([0]),
        bias=bias,
        reference_hidden=torch.zeros(1, 1),
        reference_weight=weight,
        reference_bias=other_bias,
    )
    r, s = math.exp(-own), math.exp(-other)
    assert found.kl.item() == pytest.approx(r * (other - own) + s - r, rel=1e-4)


def test_a_class_that_only_the_reference_excludes_is_infinitely_far_and_has_no_gradient():
    hidden, weight = _randn(3, 2).requires_grad_(), _randn(4, 2, seed=1).requires_grad_()
    other_bias = torch.tensor([0.0, -torch.inf, 0.0, 0.0], dtype=torch.float64)
    with torch.no_grad():
        hidden[0] = -1e4 * weight[1]  # gives class 1 nothing
    options = {"reference_hidden": hidden.detach(), "reference_weight": weight.detach(), "reference_bias": other_bias}
    found = token_statistics(hidden, weight, torch.tensor([0, 2, 3]), **options)
    assert found.kl[1:].tolist() == [torch.inf] * 2
    assert torch.isfinite(found.kl[0])
    of_hidden, of_weight = torch.autograd.grad(found.kl.sum(), (hidden, weight))
    assert torch.isfinite(of_weight).all()
    assert torch.equal(of_hidden[1:], torch.zeros(2, 2, dtype=torch.float64))


def test_a_row_without_classes_is_minus_infinity_without_a_gradient():
    bias = torch.full((3,), -torch.inf)
    weight = torch.zeros(3, 1, requires_grad=True)
    found = token_statistics(torch.zeros(2, 1), weight, torch.tensor([0, 1]), bias=bias)
    assert found.lse.tolist() == [-torch.inf] * 2
    assert found.entropy.tolist() == [0, 0]
    (of_weight,) = torch.autograd.grad(found.entropy.sum(), weight)
    assert torch.equal(of_weight, torch.zeros(3, 1))


def test_never_more_than_a_chunk_of_scores_alive(monkeypatch):
    made = []
    new = _linear_work._scores_memory
    monkeypatch.setattr(_linear_work, "_scores_memory", lambda shape, *rest: made.append(shape) or new(shape, *rest))
    hidden, weight = _randn(9, 2).requires_grad_(), _randn(5, 2, seed=1).requires_grad_()
    found = token_statistics(hidden, weight, torch.arange(9) % 5, reference_hidden=hidden.detach() + 1, chunk=2)
    (found.kl.sum() + found.entropy.sum()).backward()
    assert made == [(2, 5)] * 4  # of both heads, forward and backward


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
