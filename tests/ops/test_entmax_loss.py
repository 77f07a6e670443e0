"""Fenchel-Young losses: definition, derivatives, streams over tokens, edges, and case L21."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed import ops
from unembed.ops import _entmax_find, _linear_entmax, _linear_work
from unembed.ops._entmax_loss import _reference

ALPHAS = [1.0, 1.2, 1.5, 2.0, 2.5]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that groups, pieces and lists of classes are used at the sizes of tests."""
    monkeypatch.setattr(_entmax_find, "_SMALL", 12)
    monkeypatch.setattr(_entmax_find, "_GROUP", 4)
    monkeypatch.setattr(_entmax_find, "_CACHED", 64)
    monkeypatch.setattr(_linear_work, "_CACHED", 64)
    monkeypatch.setattr(_linear_entmax, "_FEW", 0.9)


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _grads(loss, inputs):
    return torch.autograd.grad(loss, inputs)


@settings(max_examples=120, deadline=None)
@given(
    n=st.integers(1, 6),
    v=st.integers(1, 60),
    alpha=st.sampled_from([1.0, 1.01, 1.5, 1.8, 2.0, 2.5]),
    spread=st.sampled_from([0.01, 1.0, 8.0]),
    seed=st.integers(0, 5),
)
def test_loss_and_gradient_are_those_of_the_definition(*, n, v, alpha, spread, seed):
    x = (spread * _randn(n, v, seed=seed)).requires_grad_()
    targets = torch.arange(n) * 7 % v
    targets = torch.where(torch.arange(n) % 2 == 0, x.argmax(1), targets)
    upstream = _randn(n, seed=9)
    loss = ops.fenchel_young(x, targets, alpha, chunk=2)
    assert torch.allclose(loss, _reference(x.detach(), targets, alpha), rtol=1e-9, atol=1e-11)
    p = ops.entmax(x.detach(), alpha)
    right = upstream[:, None] * (p - torch.nn.functional.one_hot(targets, v))
    assert torch.allclose(_grads((loss * upstream).sum(), x)[0], right, atol=1e-11)


def test_worked_by_hand():
    # Two scores a apart under sparsemax, target the lower one: p = (1 + a) / 2, L = (1 + a)^2 / 4.
    loss = ops.fenchel_young(torch.tensor([[0.6, 0.0]]), torch.tensor([1]), 2.0)
    assert torch.allclose(loss, torch.tensor([1.6**2 / 4]))
    # Target the higher one: (1 - a)^2 / 4, and 0 from a = 1 on.
    assert torch.allclose(ops.fenchel_young(torch.tensor([[0.6, 0.0]]), torch.tensor([0]), 2.0), torch.tensor([0.04]))
    assert ops.fenchel_young(torch.tensor([[1.0, 0.0]]), torch.tensor([0]), 2.0).tolist() == [0.0]


def test_a_target_nearly_certain_keeps_its_digits():
    # p of the other is b = (1 - a) / 2; float32 rounds p_y = 1 - b to 1, the loss is b^2 (alpha = 2).
    gap = 1 - 2.0**-23
    x = torch.tensor([[gap, 0.0]], requires_grad=True)
    loss = ops.fenchel_young(x, torch.tensor([0]), 2.0)
    b = (1 - gap) / 2
    assert torch.allclose(loss, torch.tensor([b * b]), rtol=1e-4, atol=0)
    assert torch.allclose(_grads(loss.sum(), x)[0], torch.tensor([[-b, b]]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("alpha", [2.0, 1.5, 1.2])
def test_case_l21_a_column_of_minus_infinity(alpha):
    x = torch.randn(10, 5, generator=torch.Generator().manual_seed(0))
    x[:, 4] = -torch.inf
    x, targets = x.requires_grad_(), torch.arange(10) % 4
    four = x[:, :4].detach().requires_grad_()
    loss, right = ops.fenchel_young(x, targets, alpha), ops.fenchel_young(four, targets, alpha)
    assert torch.isfinite(loss).all()
    assert torch.allclose(loss, right, rtol=1e-6)
    slope = _grads(loss.sum(), x)[0]
    assert (slope[:, 4] == 0).all()
    assert torch.allclose(slope[:, :4], _grads(right.sum(), four)[0], atol=1e-6)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("wide", [False, True])
def test_infinite_scores_follow_the_policy(alpha, wide):
    classes = 30 if wide else 3
    x = torch.full((4, classes), -torch.inf)
    x[0, :2], x[2, 0], x[3, :3] = 0.0, 1.0, 1e8
    x = x.requires_grad_()
    loss = ops.fenchel_young(x, torch.tensor([2, 0, 0, -100]), alpha)
    assert loss[:2].tolist() == [torch.inf, torch.inf]  # the target itself, and a row without any score
    assert loss[2:].tolist() == [0.0, 0.0]
    slope = _grads(loss.sum(), x)[0]
    assert torch.allclose(slope[0, :3], torch.tensor([0.5, 0.5, -1.0]))  # p - e_y all the same
    assert (slope[1] == 0).all()
    assert not slope.isnan().any()


@pytest.mark.parametrize("classes", [30, 3000])
def test_a_row_that_is_no_number_has_such_a_gradient(classes):
    x = 8 * _randn(3, classes, dtype=torch.float32)
    x[1, 5], x[2, 7] = torch.nan, torch.inf
    x = x.requires_grad_()
    for alpha in (1.5, 2.0):
        loss = ops.fenchel_young(x, torch.tensor([0, 0, 0]), alpha)
        assert loss.isnan().tolist() == [False, True, True]
        assert _grads(loss.sum(), x)[0].isnan().any(1).tolist() == [False, True, True]


@pytest.mark.parametrize("alpha", ALPHAS)
def test_derivatives_of_first_and_second_order(alpha):
    x, targets = _randn(3, 13).requires_grad_(), torch.tensor([0, -100, 12])
    assert torch.autograd.gradcheck(lambda x: ops.fenchel_young(x, targets, alpha), (x,))
    assert torch.autograd.gradgradcheck(lambda x: ops.fenchel_young(x, targets, alpha), (x,), fast_mode=True)


def test_derivative_of_an_alpha_is_that_of_the_entropy():
    x, targets = _randn(4, 6).requires_grad_(), torch.tensor([0, 1, 2, 3])
    for shape in ((), (4, 1)):
        alpha = torch.full(shape, 1.4, dtype=torch.float64, requires_grad=True)
        assert torch.autograd.gradcheck(lambda x, alpha: ops.fenchel_young(x, targets, alpha), (x, alpha))


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 9),
    d=st.integers(1, 5),
    v=st.integers(1, 40),
    chunk=st.integers(1, 12),
    alpha=st.sampled_from(ALPHAS),
    biased=st.booleans(),
    softcap=st.sampled_from([None, 1.5]),
    spread=st.sampled_from([0.1, 5.0]),
)
def test_a_linear_head_streams_to_the_same(*, n, d, v, chunk, alpha, biased, softcap, spread):
    hidden, weight, bias = (
        one.requires_grad_() for one in (_randn(n, d), spread * _randn(v, d, seed=1), _randn(v, seed=2))
    )
    targets = torch.where(torch.arange(n) % 4 == 3, -100, torch.arange(n) % v)
    options = {"bias": bias if biased else None, "softcap": softcap, "scale": 0.7}
    upstream, inputs = _randn(n, seed=3), [hidden, weight, *([bias] if biased else [])]
    right = ops.fenchel_young(ops.linear_scores(hidden, weight, **options), targets, alpha)
    slopes = _grads((right * upstream).sum(), inputs)
    each = ops.linear_fenchel_young(hidden, weight, targets, alpha, chunk=chunk, **options)
    total = ops.linear_fenchel_young_loss(hidden, weight, targets, upstream, alpha, chunk=chunk, **options)
    assert torch.allclose(each, right, atol=1e-11)
    assert torch.allclose(total, (right * upstream).sum(), atol=1e-11)
    for loss in ((each * upstream).sum(), total):
        pairs = zip(_grads(loss, inputs), slopes, strict=True)
        assert all(torch.allclose(one, other, rtol=1e-9, atol=1e-10) for one, other in pairs)


@pytest.mark.parametrize("summed", [False, True])
def test_second_order_and_transforms_of_the_linear_form(summed):
    hidden, weight = _randn(4, 3).requires_grad_(), _randn(14, 3, seed=1).requires_grad_()
    targets, factors = torch.tensor([0, 2, -100, 13]), _randn(4, seed=2)

    def loss(hidden, weight):
        if summed:
            return ops.linear_fenchel_young_loss(hidden, weight, targets, factors, 1.5, chunk=2)
        return ops.linear_fenchel_young(hidden, weight, targets, 1.5, chunk=3)

    assert torch.autograd.gradcheck(loss, (hidden, weight))
    assert torch.autograd.gradgradcheck(loss, (hidden, weight))
    moved = torch.func.jvp(lambda h: loss(h, weight.detach()).sum(), (hidden.detach(),), (torch.ones_like(hidden),))[1]
    assert torch.allclose(moved, _grads(loss(hidden, weight).sum(), hidden)[0].sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_has_the_error_of_its_inputs(dtype):
    hidden, weight = _randn(40, 16, dtype=dtype).requires_grad_(), _randn(300, 16, seed=1, dtype=dtype).requires_grad_()
    targets = torch.arange(40) * 7
    loss = ops.linear_fenchel_young_loss(hidden, weight, targets, torch.full((40,), 1 / 40), 1.5)
    assert loss.dtype == torch.float32
    wide = [one.detach().double().requires_grad_() for one in (hidden, weight)]
    right = ops.fenchel_young(wide[0] @ wide[1].T, targets, 1.5).mean()
    eps = torch.finfo(dtype).eps
    assert (loss - right).detach().abs() < 2 * eps * right.detach() + 1e-6
    for found, true in zip(_grads(loss, (hidden, weight)), _grads(right, wide), strict=True):
        assert (found.double() - true).norm() < 4 * eps * true.norm()


def test_bad_input_is_one_line():
    x = torch.zeros(3, 4)
    with pytest.raises(ValueError, match=r"lie in \[0, 4\)"):
        ops.fenchel_young(x, torch.tensor([0, 4, 1]))
    assert ops.fenchel_young(torch.zeros(2, 0), torch.tensor([-100, -100])).tolist() == [0.0, 0.0]
    with pytest.raises(ValueError, match=r"`alpha` must lie in \[1, 2\.5\]"):
        ops.fenchel_young(x, torch.tensor([0, 1, 2]), 0.5)
    with pytest.raises(ValueError, match=r"`alpha` must lie in \[1, 2\.5\]"):
        ops.linear_fenchel_young(x, x, torch.tensor([0, 1, 2]), 0.5)


@pytest.mark.compile
def test_compiles_as_one_graph():
    hidden, weight = _randn(6, 3).requires_grad_(), _randn(20, 3, seed=1).requires_grad_()
    targets = torch.tensor([0, 2, -100, 13, 4, 5])

    def loss(hidden, weight):
        return ops.linear_fenchel_young(hidden, weight, targets, 1.5, chunk=4)

    found, right = torch.compile(loss, fullgraph=True, backend="aot_eager")(hidden, weight), loss(hidden, weight)
    assert torch.allclose(found, right, atol=1e-10)
    pairs = zip(_grads(found.sum(), (hidden, weight)), _grads(right.sum(), (hidden, weight)), strict=True)
    assert all(torch.allclose(one, other, atol=1e-9) for one, other in pairs)
