"""Softmax and its logarithm: definition, derivatives, half precision, edges, the public failures of cases/losses.md."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.ops._softmax import _reference, log_softmax, softmax, softmax_jvp

INF = torch.inf


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _mask(*shape, seed=1, keep=0.7):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < keep


def _ulps(one, other):
    """How many representable numbers lie between two half-precision tensors, at most."""
    assert one.dtype == other.dtype
    assert torch.equal(one.isfinite(), other.isfinite())
    finite = one.isfinite()
    steps = [tensor[finite].abs().view(torch.int16).int() * tensor[finite].sign().int() for tensor in (one, other)]
    return int((steps[0] - steps[1]).abs().max())


_SHAPES = st.lists(st.integers(0, 5), min_size=1, max_size=4)


@settings(max_examples=120, deadline=None)
@given(
    shape=_SHAPES,
    dim=st.integers(-4, 3),
    kind=st.sampled_from(["one", "number", "zero", "inf", "rows"]),
    masked=st.booleans(),
    levels=st.sampled_from([1, 3, 100]),
    seed=st.integers(0, 1000),
)
def test_values_are_those_of_the_definition_at_every_shape(*, shape, dim, kind, masked, levels, seed):
    dim = max(-len(shape), min(dim, len(shape) - 1))
    x = (_randn(*shape, seed=seed) * levels).round() / 3  # with ties
    x = x.masked_fill(~_mask(*shape, seed=seed, keep=0.8), -INF)
    rows = list(shape)
    rows[dim] = 1
    spread = _randn(*rows, seed=seed).abs()
    spread[spread < 0.4], spread[spread > 1.5] = 0, INF
    temperature = {"one": 1.0, "number": 0.7, "zero": 0.0, "inf": math.inf, "rows": spread}[kind]
    mask = _mask(*shape[-1:], seed=seed + 1) if masked else None
    expected = _reference(x, dim, temperature=temperature, mask=mask)
    found = softmax(x, dim, temperature=temperature, mask=mask)
    assert found.shape == x.shape
    assert torch.allclose(found, expected, rtol=1e-12, atol=0)
    log = log_softmax(x, dim, temperature=temperature, mask=mask)
    assert torch.allclose(log, expected.log(), rtol=1e-12, atol=1e-12)


def test_values_worked_by_hand():
    x = torch.tensor([0.0, math.log(3.0)])
    assert softmax(x).tolist() == pytest.approx([0.25, 0.75])
    assert softmax(x, temperature=0.5).tolist() == pytest.approx([0.1, 0.9])
    assert log_softmax(x, temperature=torch.tensor(0.5)).tolist() == pytest.approx([math.log(0.1), math.log(0.9)])
    assert softmax(x, mask=torch.tensor([True, False])).tolist() == [1, 0]
    assert softmax(torch.tensor(5.0)).item() == 1
    assert softmax(torch.tensor(5.0), temperature=0.0, mask=torch.tensor(False)).item() == 0


@pytest.mark.parametrize("function", [softmax, log_softmax])
@pytest.mark.parametrize("masked", [False, True])
def test_first_and_second_derivatives_in_scores_and_temperature(function, masked):
    x, t = _randn(3, 2, 4).requires_grad_(), (_randn(3, 1, 4, seed=2).abs() + 0.3).requires_grad_()
    mask = _mask(3, 2, 4) if masked else None

    def of(x, t):
        found = function(x, 1, temperature=t, mask=mask)
        return torch.where(found == -INF, 0.0, found)  # finite differences know no infinity

    def plain(x):
        found = function(x, 1, mask=mask)
        return torch.where(found == -INF, 0.0, found)

    assert torch.autograd.gradcheck(of, (x, t), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(of, (x, t))
    assert torch.autograd.gradcheck(plain, x, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(plain, x)
    assert torch.autograd.gradcheck(lambda x: function(x, 1, temperature=0.6), x)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_rounded_once(dtype):
    x = (_randn(50, 333) * 4).to(dtype)
    mask = _mask(50, 333)
    for options in ({}, {"temperature": 0.7}, {"temperature": torch.tensor(0.7)}, {"mask": mask}):
        exact = _reference(x, **options)
        assert softmax(x, **options).dtype == dtype
        assert _ulps(softmax(x, **options), exact.to(dtype)) <= 1
        assert _ulps(log_softmax(x, **options), exact.log().to(dtype)) <= 1


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_gradients_are_in_the_dtypes_of_the_inputs(dtype):
    x, upstream = _randn(20, 33, dtype=dtype).requires_grad_(), _randn(20, 33, seed=3)
    t = torch.full((20, 1), 0.7, dtype=torch.float64, requires_grad=True)
    wide = x.detach().double().requires_grad_()
    found = torch.autograd.grad((softmax(x, temperature=t).double() * upstream).sum(), (x, t))
    right = torch.autograd.grad((softmax(wide, temperature=t) * upstream).sum(), (wide, t))
    assert [one.dtype for one in found] == [dtype, torch.float64]
    for one, other in zip(found, right, strict=True):
        assert (one - other).abs().max() <= 4 * torch.finfo(dtype).eps * other.abs().max()


def test_temperature_zero_is_the_first_of_the_largest_and_infinity_is_uniform():
    x = torch.tensor([[1.0, 3.0, 3.0, -INF], [2.0, 2.0, 2.0, 2.0]], requires_grad=True)
    t = torch.tensor([[0.0], [INF]], requires_grad=True)
    for zero in (0, 0.0, 1e-45, torch.tensor(0.0)):
        assert softmax(x, temperature=zero).tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]
        assert log_softmax(x, temperature=zero).tolist() == [[-INF, 0, -INF, -INF], [0, -INF, -INF, -INF]]
    third = 1 / 3
    for hot in (math.inf, torch.tensor(INF)):
        assert softmax(x, temperature=hot).tolist() == [pytest.approx([third, third, third, 0]), [0.25] * 4]
    assert softmax(x, temperature=t).tolist() == [[0, 1, 0, 0], [0.25] * 4]
    upstream = torch.tensor([[1.0, 2.0, -3.0, 5.0]])
    for function in (softmax, log_softmax):
        for temperature in (t, 0.0, math.inf):
            found = function(x, temperature=temperature)
            for gradient in torch.autograd.grad(
                (torch.where(found == -INF, 0.0, found) * upstream).sum(), (x, t), materialize_grads=True
            ):
                assert torch.equal(gradient, torch.zeros_like(gradient))


@pytest.mark.parametrize("t", [1e-37, 1e-30, 1e-20, 1e-8, 1e8, 1e30, 3e38])
def test_gradients_of_any_temperature_are_finite(t):
    x = torch.tensor([1.0, 1.5, -20.0, -INF, 3e38, -3e38], requires_grad=True)
    mask = torch.tensor([True, True, True, True, False, True])
    temperature = torch.tensor([t], requires_grad=True)
    for part in (x, x[:4]):
        p = softmax(part, temperature=temperature, mask=mask[: len(part)])
        right = _reference(part.detach(), temperature=t, mask=mask[: len(part)])
        assert p.tolist() == pytest.approx(right.tolist(), rel=1e-5)
        for gradient in torch.autograd.grad(p[1], (x, temperature)):
            assert gradient.isfinite().all()
    wide = temperature.detach().double().requires_grad_()
    (found,) = torch.autograd.grad(softmax(x[:3], temperature=temperature)[1], temperature)
    (right,) = torch.autograd.grad(softmax(x[:3].double(), temperature=wide)[1], wide)
    assert found.item() == pytest.approx(right.item(), rel=1e-5, abs=1e-44)


def test_differences_that_overflow_make_no_nan():
    x = torch.tensor([3e38, -3e38], requires_grad=True)
    t = torch.tensor(2.0, requires_grad=True)
    for temperature in (1.0, 0.5, math.inf, t):
        p = softmax(x, temperature=temperature)
        assert p.tolist() == ([0.5, 0.5] if temperature is math.inf else [1, 0])
        for gradient in torch.autograd.grad(p[0] * 2 + p[1], (x, t), materialize_grads=True):
            assert torch.equal(gradient, torch.zeros_like(gradient))


def test_a_learnable_parameter_of_one_is_not_taken_for_the_number_one():
    t = torch.nn.Parameter(torch.ones(()))
    softmax(torch.tensor([0.0, 1.0]), temperature=t)[1].backward()
    assert t.grad.item() == pytest.approx(-0.196612, rel=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5, torch.tensor(0.5)])
@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_l3_a_row_of_only_minus_infinity_leaves_the_others_exact(function, temperature):
    rows = _randn(3, 5)
    x = rows.clone()
    x[1] = -INF
    x.requires_grad_()
    found = function(x, temperature=temperature)
    assert found[1].tolist() == [0 if function is softmax else -INF] * 5
    expected = function(rows[[0, 2]].requires_grad_(), temperature=temperature)
    assert torch.allclose(found[[0, 2]], expected)
    upstream = _randn(3, 5, seed=4)
    (gradient,) = torch.autograd.grad((found * upstream).sum(), x, create_graph=True)
    assert torch.equal(gradient[1], torch.zeros(5, dtype=torch.float64))
    other = rows.clone().requires_grad_()
    (right,) = torch.autograd.grad((function(other, temperature=temperature) * upstream).sum(), other)
    assert torch.allclose(gradient[[0, 2]], right[[0, 2]])
    (second,) = torch.autograd.grad(gradient.square().sum(), x)
    assert second.isfinite().all()
    assert torch.equal(second[1], torch.zeros(5, dtype=torch.float64))


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_what_takes_no_part_is_as_if_it_were_not_there_and_has_no_gradient(function, masked):
    small = _randn(2, 3).requires_grad_()
    gone = torch.tensor([False, True, False, True, False])
    x = torch.full((2, 5), torch.nan if masked else -INF, dtype=torch.float64)
    x[:, ~gone] = small.detach()
    x.requires_grad_()
    found = function(x, mask=~gone if masked else None)
    expected = function(small)
    assert torch.allclose(found[:, ~gone], expected)
    assert found[:, gone].unique().tolist() == [0 if function is softmax else -INF]
    upstream = _randn(2, 5, seed=2)
    (gradient,) = torch.autograd.grad((found * upstream).sum(), x)  # upstream is not 0 where nothing takes part
    (right,) = torch.autograd.grad((expected * upstream[:, ~gone]).sum(), small)
    assert torch.allclose(gradient[:, ~gone], right)
    assert torch.equal(gradient[:, gone], torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.parametrize("temperature", [1.0, 0.0, 2.0, math.inf, torch.tensor(0.0), torch.tensor(2.0)])
@pytest.mark.parametrize("bad", [torch.nan, INF])
def test_nan_stays_in_its_row(bad, temperature):
    x = torch.tensor([[1.0, bad, 2.0, -INF], [1.0, 0.0, 2.0, -INF]])
    for function in (softmax, log_softmax):
        found = function(x, temperature=temperature)
        assert found[0, :3].isnan().all()
        assert not found[0, 3].isnan()
        assert torch.equal(found[1], function(x[1], temperature=temperature))
    assert _reference(x, temperature=temperature)[0, :3].isnan().all()


def test_l1_a_huge_offset_changes_nothing():
    for scores, target, loss in (
        ([1e8, 1e8], 1, 0.693147),
        ([1e8] * 3, 0, 1.098612),
        ([2 + 1e6, -1 + 1e6], 0, 0.048587),
    ):
        assert -log_softmax(torch.tensor(scores))[target].item() == pytest.approx(loss, abs=1e-6)
        assert softmax(torch.tensor(scores))[target].item() == pytest.approx(math.exp(-loss), abs=1e-6)
    x = torch.tensor([[0.0, 8.0, -16.0, 24.0]])  # what float32 can tell apart at 1e8
    for t in (1.0, 3.0, torch.tensor([[3.0]], requires_grad=True)):
        for function in (softmax, log_softmax):
            assert torch.equal(function(x, temperature=t), function(x + 1e8, temperature=t))
            assert torch.equal(function(x, temperature=t), function(x - 1e8, temperature=t))
    here, there = (torch.autograd.grad(softmax(x + c, temperature=t)[0, 1], t)[0] for c in (0.0, 1e8))
    assert torch.equal(here, there)


def test_l4_l5_minus_infinity_in_a_loss():
    x = torch.tensor([-INF, 1.0, 1.0], requires_grad=True)
    loss = -log_softmax(x)[1]
    assert loss.item() == pytest.approx(0.693147, abs=1e-6)
    assert torch.autograd.grad(loss, x)[0].tolist() == pytest.approx([0, -0.5, 0.5])
    nothing = torch.tensor([-INF, -INF], requires_grad=True)
    found = log_softmax(nothing)
    assert found.tolist() == [-INF, -INF]
    assert torch.autograd.grad(found.sum(), nothing)[0].tolist() == [0, 0]


def test_strided_input_is_read_in_place_and_not_written():
    x = _randn(7, 5, 3)
    views = (x.transpose(0, 2), x[::2, :, 1:], x[:1].expand(4, 5, 3))
    before = x.clone()
    for view in views:
        for dim in range(3):
            for options in ({}, {"temperature": torch.tensor(0.7)}):
                assert torch.allclose(softmax(view, dim, **options), _reference(view, dim, **options))
    assert torch.equal(x, before)


@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 3), (2, 0, 3)])
def test_sizes_of_zero(shape):
    for dim in range(len(shape)):
        x = torch.zeros(shape, requires_grad=True)
        for temperature in (1.0, 0.0, 2.0, torch.tensor(0.0), torch.tensor(2.0)):
            for function in (softmax, log_softmax):
                found = function(x, dim, temperature=temperature, mask=torch.ones(shape, dtype=torch.bool))
                assert found.shape == shape
                found.sum().backward()
    assert softmax_jvp(torch.zeros(shape), torch.zeros(shape)).shape == shape


def test_bad_arguments_are_named():
    x = torch.zeros(3, 4)
    for temperature in (-1.0, math.nan, torch.tensor(-1.0), torch.tensor([[1.0], [torch.nan], [0.0]])):
        with pytest.raises(ValueError, match="`temperature` must be at least 0"):
            softmax(x, temperature=temperature)
    with pytest.raises(ValueError, match=r"`temperature` must be a number, .* size 1 along dimension -1, got \(1, 4\)"):
        softmax(x, temperature=torch.ones(4))
    with pytest.raises(ValueError, match=r"`temperature` of shape \(2, 1\) does not broadcast"):
        softmax(x, temperature=torch.ones(2, 1))
    with pytest.raises(ValueError, match="`temperature` must be a number, or broadcast"):
        softmax(x, temperature=torch.ones(1, 3, 1))
    with pytest.raises(ValueError, match=r"`mask` of shape \(3, 5\) does not broadcast"):
        softmax(x, mask=torch.ones(3, 5, dtype=torch.bool))


@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_what_the_annotations_forbid_is_refused_without_them_too(function):
    function = getattr(function, "__wrapped__", function)  # past the run-time type checks of the tests
    with pytest.raises(ValueError, match=r"`mask` must be boolean.*got torch.float32"):
        function(torch.zeros(3), mask=torch.zeros(3))
    with pytest.raises(ValueError, match=r"`x` must be floating point, got torch.int64"):
        function(torch.zeros(3, dtype=torch.int64))


def test_the_jacobian_times_a_vector():
    x, t = _randn(3, 4, 2), _randn(3, 4, 2, seed=5)
    _, right = torch.func.jvp(lambda x: torch.softmax(x, 1), (x,), (t,))
    assert torch.allclose(softmax_jvp(softmax(x, 1), t, 1), right)
    assert softmax_jvp(softmax(x.bfloat16(), 1), t.float(), 1).dtype == torch.float32
    assert torch.equal(softmax_jvp(torch.zeros(2, 3), torch.ones(2, 3)), torch.zeros(2, 3))
    assert torch.autograd.gradcheck(
        lambda x, t: softmax_jvp(softmax(x, 1), t, 1), (x.requires_grad_(), t.requires_grad_())
    )


def test_the_jacobian_of_a_row_that_is_nearly_one_hot_is_not_lost():
    p = softmax(torch.tensor([0.0, -30.0, -31.0]))
    t = torch.tensor([1.0, 0.25, 0.5])
    small = torch.tensor([-30.0, -31.0], dtype=torch.float64).exp()
    right = [0.75 * small[0] + 0.5 * small[1], -0.75 * small[0], -0.5 * small[1]]
    assert softmax_jvp(p, t).tolist() == pytest.approx([float(one) for one in right], rel=1e-6)


def test_torch_func():
    x, t, mask = _randn(4, 3, 5), _randn(4, 3, 1, seed=1).abs() + 0.5, _mask(4, 3, 5)
    mask[0, 0] = False
    for function in (softmax, log_softmax):

        def of(x, t, m, function=function):
            found = function(x, temperature=t, mask=m)
            return torch.where(found == -INF, 0.0, found)

        assert torch.allclose(torch.func.vmap(of)(x, t, mask), of(x, t, mask))
        assert torch.allclose(torch.func.vmap(function)(x), function(x))
        leaves = x.clone().requires_grad_(), t.clone().requires_grad_()
        right = torch.autograd.grad(of(*leaves, mask).square().sum(), leaves)
        found = torch.func.vmap(torch.func.grad(lambda x, t, m, of=of: of(x, t, m).square().sum(), (0, 1)))(x, t, mask)
        assert all(torch.allclose(one, other) for one, other in zip(found, right, strict=True))
        one = torch.func.jacrev(of, 1)(x, t, mask)
        assert torch.allclose(one, torch.func.jacfwd(of, 1)(x, t, mask))
        hessian = torch.func.hessian(lambda t, of=of: of(x[1], t, mask[1]).square().sum())(t[1])
        other = torch.autograd.functional.hessian(lambda t, of=of: of(x[1], t, mask[1]).square().sum(), t[1])
        assert torch.allclose(hessian, other)
    with pytest.raises(ValueError, match="`temperature`"):
        torch.func.grad(lambda x: softmax(x, temperature=torch.tensor(-1.0)).sum())(x)
    hidden = torch.func.vmap(lambda x, t: softmax(x, temperature=t))(x[0], torch.tensor([-1.0, 0.0, 1.0]).double())
    assert hidden[0].isnan().all()  # nothing can be looked at under vmap, so it is NaN and no number
    assert torch.allclose(hidden[1:], torch.stack([softmax(x[0, 1], temperature=0.0), softmax(x[0, 2])]))


def test_fake_tensors_have_no_values_to_look_at():
    with torch._subclasses.fake_tensor.FakeTensorMode():
        assert softmax(torch.empty(3, 4)).shape == (3, 4)
        assert log_softmax(torch.empty(3, 4), temperature=torch.ones(())).shape == (3, 4)
    assert softmax(torch.empty(3, 4, device="meta"), temperature=torch.ones((), device="meta")).is_meta


@pytest.mark.compile
@pytest.mark.parametrize("function", [softmax, log_softmax])
def test_compiles_whole_with_the_same_values_and_gradients(function):
    x, t, mask = _randn(4, 9).requires_grad_(), (_randn(4, 1, seed=1).abs() + 0.5).requires_grad_(), _mask(4, 9)
    mask[1] = False
    upstream = _randn(4, 9, seed=3)

    def all_ways(x, t):
        ways = (
            function(x),
            function(x, temperature=t, mask=mask),
            function((x * 0.5).round(), 0, temperature=0.0),
        )
        return torch.stack([torch.where(way == -INF, 0.0, way) for way in ways])

    compiled = torch.compile(all_ways, fullgraph=True)
    assert torch.allclose(compiled(x, t), all_ways(x, t))
    for one, other in zip(
        torch.autograd.grad((compiled(x, t) * upstream).sum(), (x, t)),
        torch.autograd.grad((all_ways(x, t) * upstream).sum(), (x, t)),
        strict=True,
    ):
        assert torch.allclose(one, other)
    with pytest.raises(RuntimeError, match="`temperature` must be at least 0"):
        compiled(x, -t)
