"""Mixtures of softmaxes: against all log-probabilities written out in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.ops import _linear_work, mixture_loss, mixture_nll


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    monkeypatch.setattr(_linear_work, "_CACHED", 16)


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _inputs(n, k, d, v, dtype=torch.float64):
    prior = torch.log_softmax(_randn(n, k, seed=3), -1).to(dtype)
    tensors = [_randn(n, k, d, dtype=dtype), prior, _randn(v, d, seed=1, dtype=dtype), _randn(v, seed=2, dtype=dtype)]
    return [tensor.requires_grad_() for tensor in tensors], torch.arange(n) % v


def _of_nll(column):
    """Coefficients with that of the sum over classes 0."""
    return torch.stack([column, torch.zeros_like(column)], 1)


def _reference(hidden, log_prior, weight, bias, targets, *, sigsoftmax=False):
    """`-log sum_k pi_k softmax(W h_k + b)_t` with all log-probabilities at once."""
    scores = hidden.double() @ weight.double().T + bias.double()
    if sigsoftmax:
        scores = scores + torch.nn.functional.logsigmoid(scores)
    log_prob = torch.logsumexp(log_prior.double()[..., None] + torch.log_softmax(scores, -1), dim=-2)
    own = log_prob.gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    return torch.where(targets == -100, 0.0, -own)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(0, 8),
    k=st.integers(1, 4),
    d=st.integers(1, 4),
    v=st.integers(1, 11),
    chunk=st.integers(1, 9),
    sigsoftmax=st.booleans(),
)
def test_values_and_gradients_are_those_of_the_definition(*, n, k, d, v, chunk, sigsoftmax):
    inputs, targets = _inputs(n, k, d, v)
    hidden, prior, weight, bias = inputs
    targets = torch.where(torch.arange(n) % 5 == 4, -100, targets)
    upstream = _randn(n, seed=4)
    expected = _reference(*inputs, targets, sigsoftmax=sigsoftmax)
    right = torch.autograd.grad((expected * upstream).sum(), inputs)
    options = {"bias": bias, "sigsoftmax": sigsoftmax, "chunk": chunk}
    nll = mixture_nll(hidden, prior, weight, targets, **options)
    loss = mixture_loss(hidden, prior, weight, targets, _of_nll(upstream), **options)
    assert torch.allclose(nll, expected)
    assert torch.allclose(loss, (expected * upstream).sum())
    for one in ((nll * upstream).sum(), loss):
        for found, other in zip(torch.autograd.grad(one, inputs), right, strict=True):
            assert torch.allclose(found, other, rtol=1e-9, atol=1e-12)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 8),
    k=st.integers(1, 4),
    d=st.integers(1, 4),
    v=st.integers(1, 11),
    chunk=st.integers(1, 9),
    sigsoftmax=st.booleans(),
    excluded=st.booleans(),
)
def test_with_a_sum_over_classes_it_is_the_definition(*, n, k, d, v, chunk, sigsoftmax, excluded):
    inputs, targets = _inputs(n, k, d, v)
    hidden, prior, weight, bias = inputs
    targets = torch.where(torch.arange(n) % 5 == 4, -100, targets)
    spread = torch.rand(v, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    if excluded and v > 1:
        bias = bias.detach().index_fill(0, torch.tensor([v - 1]), -torch.inf).requires_grad_()
        inputs[3], spread[v - 1] = bias, 0
        targets = torch.where(targets == v - 1, 0, targets)
    coefficients = _randn(n, 2, seed=4).requires_grad_()
    options = {"bias": bias, "sigsoftmax": sigsoftmax, "chunk": chunk, "spread": spread}
    loss = mixture_loss(hidden, prior, weight, targets, coefficients, **options)
    real = bias.detach() != -torch.inf  # as if the others were not there; they are the last, so targets stay
    scores = hidden @ weight[real].T + bias[real]
    if sigsoftmax:
        scores = scores + torch.nn.functional.logsigmoid(scores)
    log_prob = torch.logsumexp(prior[..., None] + torch.log_softmax(scores, -1), dim=-2)
    nll = torch.where(targets == -100, 0.0, -log_prob.gather(1, targets.clamp(min=0)[:, None])[:, 0])
    expected = (coefficients * torch.stack([nll, log_prob @ spread[real]], 1)).sum()
    assert torch.allclose(loss, expected)
    leaves = [*inputs, coefficients]
    right = torch.autograd.grad(expected, leaves)
    for found, other in zip(torch.autograd.grad(loss, leaves), right, strict=True):
        assert torch.allclose(found, other, rtol=1e-9, atol=1e-12)


def test_derivatives_with_a_sum_over_classes():
    inputs, targets = _inputs(5, 2, 3, 4)
    spread = torch.tensor([0.1, 0.0, 0.3, 0.2], dtype=torch.float64)
    coefficients = _randn(5, 2, seed=4).requires_grad_()

    def loss(hidden, prior, weight, bias, coefficients):
        return mixture_loss(hidden, prior, weight, targets, coefficients, bias=bias, spread=spread, chunk=2)

    assert torch.autograd.gradcheck(loss, (*inputs, coefficients), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, (*inputs, coefficients), fast_mode=True)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_smoothing_in_half_precision_errs_no_more_than_the_materialised_form(dtype):
    (hidden, prior, weight, _), targets = _inputs(40, 3, 16, 300, dtype=dtype)
    spread, coefficients = torch.full((300,), 1 / 300), torch.full((40, 2), 1e-4)
    prior = prior.detach().float().requires_grad_()
    leaves = (hidden, prior, weight)

    def materialised(hidden, prior, weight):
        parts = torch.log_softmax((hidden @ weight.T).to(torch.promote_types(hidden.dtype, torch.float32)), -1)
        log_prob = torch.logsumexp(prior[..., None] + parts, dim=-2)
        nll = -log_prob.gather(1, targets[:, None])[:, 0]
        return 1e-4 * (nll + log_prob.mean(-1)).sum()

    wide = [leaf.detach().double().requires_grad_() for leaf in leaves]
    exact = torch.autograd.grad(materialised(*wide), wide)
    theirs = torch.autograd.grad(materialised(*leaves), leaves)
    loss = mixture_loss(hidden, prior, weight, targets, coefficients, spread=spread, chunk=32)
    for mine, their, right in zip(torch.autograd.grad(loss, leaves), theirs, exact, strict=True):
        budget = 1.1 * (their.double() - right).norm() + 1e-6 * right.norm()
        assert (mine.double() - right).norm() <= budget


def test_far_tails_keep_their_loss_and_gradient_with_a_sum_over_classes():
    """A class at e^-200 in every component: probabilities underflow, their logarithms do not."""
    hidden, prior = torch.tensor([[[200.0], [100.0]]]), torch.log(torch.tensor([[0.5, 0.5]]))
    weight = torch.tensor([[1.0], [-1.0]], requires_grad=True)
    loss = mixture_loss(
        hidden, prior, weight, torch.tensor([0]), torch.tensor([[0.0, -1.0]]), spread=torch.tensor([0.0, 1.0])
    )
    assert loss.item() == pytest.approx(200 + math.log(2), rel=1e-6)
    loss.backward()
    assert weight.grad[:, 0].tolist() == pytest.approx([100, -100], rel=1e-5)


def test_first_and_second_derivatives():
    inputs, targets = _inputs(4, 2, 3, 5)
    coefficients = torch.rand(4, dtype=torch.float64).requires_grad_()

    def loss(hidden, prior, weight, bias, coefficients):
        return mixture_loss(hidden, prior, weight, targets, _of_nll(coefficients), bias=bias, chunk=2)

    def nll(hidden, prior, weight, bias):
        return mixture_nll(hidden, prior, weight, targets, bias=bias, chunk=2)

    assert torch.autograd.gradcheck(loss, (*inputs, coefficients), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(loss, (*inputs, coefficients), fast_mode=True)
    assert torch.autograd.gradcheck(nll, tuple(inputs), check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(nll, tuple(inputs), fast_mode=True)


def test_l26_far_tails_have_their_loss_and_their_gradient():
    """Two components of equal weight with log p = -40 at the target: published code gives 18.42 and 2e-10."""
    bias = torch.zeros(2, requires_grad=True)
    hidden, weight = torch.tensor([[[1.0], [1.0]]]), torch.tensor([[-40.0], [0.0]], requires_grad=True)
    prior = torch.full((1, 2), 0.5).log()
    for loss in (
        mixture_nll(hidden, prior, weight, torch.tensor([0]), bias=bias).sum(),
        mixture_loss(hidden, prior, weight, torch.tensor([0]), torch.ones(1, 2), bias=bias),
    ):
        assert loss.item() == pytest.approx(40, abs=1e-5)
        assert torch.autograd.grad(loss, weight)[0].flatten().tolist() == pytest.approx([-1, 1], rel=1e-5)
    each = torch.tensor([[[1.0], [1.0]]], requires_grad=True)
    (of_components,) = torch.autograd.grad(mixture_nll(each, prior, weight, torch.tensor([0])).sum(), each)
    assert of_components.flatten().tolist() == pytest.approx([20, 20], rel=1e-5)  # 0.5 of (p - y) W = 40 for each


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_the_materialised_form(dtype):
    inputs, targets = _inputs(128, 3, 16, 61, dtype=dtype)
    hidden, prior, weight, bias = inputs
    upstream = torch.full((128,), 1 / 128)
    wide = [tensor.detach().double().requires_grad_() for tensor in inputs]
    plain = [tensor.detach().clone().requires_grad_() for tensor in inputs]
    expected = torch.autograd.grad((_reference(*wide, targets) * upstream).sum(), wide)
    parts = torch.log_softmax((plain[0] @ plain[2].T + plain[3]).float(), -1)
    log_prob = torch.logsumexp(plain[1].float()[..., None] + parts, dim=-2)
    theirs = torch.autograd.grad((-log_prob.gather(1, targets[:, None]).squeeze(1) * upstream).sum(), plain)
    loss = mixture_loss(hidden, prior, weight, targets, _of_nll(upstream), bias=bias, chunk=32)
    for mine, their, right in zip(torch.autograd.grad(loss, inputs), theirs, expected, strict=True):
        assert (mine - right).norm() <= 1.2 * (their - right).norm() + 1e-6 * right.norm()


def test_an_impossible_component_and_an_impossible_target():
    prior = torch.tensor([[0.0, -torch.inf]], requires_grad=True)
    hidden, weight = torch.ones(1, 2, 1, requires_grad=True), torch.tensor([[1.0], [2.0]], requires_grad=True)
    loss = mixture_loss(hidden, prior, weight, torch.tensor([1]), torch.ones(1, 2))
    assert loss.item() == pytest.approx(torch.log1p(torch.tensor(-1.0).exp()).item(), rel=1e-5)
    for gradient in torch.autograd.grad(loss, (hidden, prior, weight)):
        assert torch.isfinite(gradient).all()


@pytest.mark.compile
def test_compiles_whole():
    inputs, targets = _inputs(6, 2, 3, 5)

    def both(hidden, prior, weight, bias):
        nll = mixture_nll(hidden, prior, weight, targets, bias=bias, chunk=4)
        return nll.sum() + mixture_loss(hidden, prior, weight, targets, torch.ones(6, 2).double(), bias=bias, chunk=4)

    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    pairs = zip(torch.autograd.grad(compiled(*inputs), inputs), torch.autograd.grad(both(*inputs), inputs), strict=True)
    assert all(torch.allclose(one, other) for one, other in pairs)
