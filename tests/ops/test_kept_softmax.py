"""Softmax over a part of the classes: definition, exactly k with ties, thresholds, derivatives, edges."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.ops._kept_softmax import _reference, largest, threshold_softmax, topk_softmax
from unembed.ops._softmax import softmax

INF = torch.inf
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _tied(n, v, seed):
    """Scores with many ties and some `-inf`, one row of only those."""
    x = (_randn(n, v, seed=seed) * 1.5).round()
    x = x.masked_fill(_randn(n, v, seed=seed + 1) > 1.2, -INF)
    x[:1] = -INF
    return x


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(0, 4),
    v=st.integers(0, 17),
    k=st.integers(1, 20),
    dim=st.sampled_from([0, 1]),
    seed=st.integers(0, 99),
)
def test_topk_is_the_definition(*, n, v, k, dim, seed):
    x = _tied(n, v, seed)
    found = topk_softmax(x.movedim(1, dim), k, dim).movedim(dim, 1)
    assert torch.allclose(found, _reference(x, k=k), rtol=1e-12, atol=0)
    assert torch.equal((found > 0).sum(1), (x > -INF).sum(1).clamp(max=k))


@settings(max_examples=100, deadline=None)
@given(
    n=st.integers(0, 4),
    v=st.integers(0, 17),
    threshold=st.sampled_from([-INF, -1.0, 0.0, 1.5, INF]),
    dim=st.sampled_from([0, 1]),
    when_empty=st.sampled_from(["raise", "largest", "zero"]),
    seed=st.integers(0, 99),
)
def test_threshold_is_the_definition(*, n, v, threshold, dim, when_empty, seed):
    x = _tied(n, v, seed)
    turned = x.movedim(1, dim)
    try:
        expected = _reference(x, threshold=threshold, when_empty=when_empty)
    except ValueError:
        with pytest.raises(ValueError, match="`threshold` leaves a row without a score"):
            threshold_softmax(turned, threshold, dim, when_empty=when_empty)
        return
    found = threshold_softmax(turned, threshold, dim, when_empty=when_empty).movedim(dim, 1)
    assert torch.allclose(found, expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_exactly_k_whatever_the_ties(dtype):
    x = torch.zeros(3, 1000, dtype=dtype)
    x[1, 500:] = 1
    x[2, ::3] = -INF
    found = topk_softmax(x, 7)
    assert found.dtype == dtype
    assert [row.nonzero().flatten().tolist() for row in found] == [
        list(range(7)),
        list(range(500, 507)),
        [1, 2, 4, 5, 7, 8, 10],
    ]
    assert torch.equal(found[found > 0], torch.full((21,), 1 / 7, dtype=torch.float64).to(dtype))
    assert topk_softmax(x, 1).nonzero().tolist() == [[0, 0], [1, 500], [2, 1]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_offset_changes_nothing_and_half_precision_is_rounded_once(dtype):
    x = (_randn(40, 50) * 8).round().to(dtype)
    offset = 1e8 if dtype is torch.float64 else 64.0
    low = x if dtype is not torch.bfloat16 else x.clamp(-8, 8)  # or the sum itself would be rounded
    for of in (lambda x, c: topk_softmax(x, 5), lambda x, c: threshold_softmax(x, c, when_empty="largest")):
        assert torch.equal(of(low, 0.0), of(low + offset, offset))
        exact = of(x.double(), 0.0)
        assert torch.allclose(of(x, 0.0).double(), exact, rtol=1.01 * torch.finfo(dtype).eps, atol=1e-7)
    single = torch.tensor([0.0, 8.0, 16.0, -8.0])
    assert torch.equal(topk_softmax(single, 2), topk_softmax(single + 1e8, 2))


def test_a_mask_a_temperature_and_their_order():
    x = torch.tensor([[3.0, 1.0, 2.0, 0.0], [0.0, 1.0, 2.0, 3.0]])
    mask = torch.tensor([False, True, True, True])
    right = [[0, 1 / (1 + math.e), math.e / (1 + math.e), 0], [0, 0, 1 / (1 + math.e), math.e / (1 + math.e)]]
    found = topk_softmax(x, 2, mask=mask)
    for row, other in zip(found.tolist(), right, strict=True):
        assert row == pytest.approx(other)
    squared = math.e**2
    for t in (0.5, torch.tensor([[0.5], [0.5]])):
        assert topk_softmax(x, 2, mask=mask, temperature=t)[0, 2].item() == pytest.approx(squared / (1 + squared))
        one = threshold_softmax(x, 0.9, mask=mask, temperature=t)  # the threshold is of the scores as they are
        assert one[0].tolist() == pytest.approx([0, 1 / (1 + squared), squared / (1 + squared), 0])
    assert topk_softmax(x, 2, temperature=0.0).tolist() == [[1, 0, 0, 0], [0, 0, 0, 1]]
    assert topk_softmax(x, 2, temperature=math.inf).tolist() == [[0.5, 0, 0.5, 0], [0, 0, 0.5, 0.5]]
    none = torch.zeros(4, dtype=torch.bool)
    assert not topk_softmax(x, 2, mask=none).any()
    assert not threshold_softmax(x, 0.0, mask=none).any()


def test_thresholds_of_rows_and_of_classes():
    x = torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]])
    rows = threshold_softmax(x, torch.tensor([[0.5], [2.0]]))
    assert (rows > 0).tolist() == [[True, True, True], [False, False, True]]
    assert (threshold_softmax(x, torch.tensor([1.0, 1.0, 3.0])) > 0).tolist() == [[False, True, False]] * 2
    half = torch.tensor([0.1, 0.2], dtype=torch.bfloat16)  # 0.10009765625, which is above 0.1
    assert (threshold_softmax(half, 0.1) > 0).tolist() == [True, True]


def test_an_empty_row_is_an_error_or_what_was_said():
    x = torch.tensor([[1.0, 5.0, 5.0], [7.0, -INF, 8.0], [-INF, -INF, -INF]], requires_grad=True)
    with pytest.raises(ValueError, match="`threshold` leaves a row without a score"):
        threshold_softmax(x, 6.0)
    assert threshold_softmax(x[1:], 6.0)[1].tolist() == [0, 0, 0]
    assert threshold_softmax(x, 6.0, when_empty="largest")[0].tolist() == [0, 1, 0]
    assert threshold_softmax(x, 6.0, when_empty="zero")[0].tolist() == [0, 0, 0]
    for when_empty in ("largest", "zero"):
        upstream = torch.tensor([1.0, 2.0, 3.0])
        found = threshold_softmax(x, 6.0, when_empty=when_empty)
        (gradient,) = torch.autograd.grad((found * upstream).sum(), x)
        assert gradient[[0, 2]].tolist() == [[0, 0, 0]] * 2
        p = 1 / (1 + math.e)
        assert gradient[1].tolist() == pytest.approx([-2 * p * (1 - p), 0, 2 * p * (1 - p)])


def test_first_and_second_derivatives():
    x, t = _randn(3, 6).requires_grad_(), torch.tensor([[0.5], [1.0], [2.0]], dtype=torch.float64, requires_grad=True)
    for of in (
        lambda x, t: topk_softmax(x, 3, temperature=t),
        lambda x, t: threshold_softmax(x.T, 0.1, 0, temperature=t.T, when_empty="largest"),
    ):
        assert torch.autograd.gradcheck(of, (x, t), check_forward_ad=True)
        assert torch.autograd.gradgradcheck(of, (x, t))


def test_what_is_left_out_has_no_gradient():
    x = _randn(4, 9).requires_grad_()
    upstream = _randn(4, 9, seed=1)
    kept = largest(x.detach(), 4, -1)
    (gradient,) = torch.autograd.grad((topk_softmax(x, 4) * upstream).sum(), x)
    assert torch.equal(gradient == 0, ~kept)
    (right,) = torch.autograd.grad((softmax(x, mask=kept) * upstream).sum(), x)
    assert torch.equal(gradient, right)


@pytest.mark.parametrize("k", [1, 2, 3, 4])
def test_nan_stays_in_its_row(k):
    x = torch.tensor([[1.0, torch.nan, 2.0, -INF], [1.0, 0.0, 2.0, -INF]])
    for of in (
        lambda x: topk_softmax(x, k),
        lambda x: threshold_softmax(x, 0.5),
        lambda x: threshold_softmax(x, 0.5, 0),
    ):
        assert of(x)[0, 1].isnan()
    assert topk_softmax(x, k)[0, :3].isnan().all()
    assert threshold_softmax(x, 9.0, when_empty="zero")[0, :3].isnan().all()
    assert torch.equal(topk_softmax(x, k)[1], topk_softmax(x[1], k))
    hidden = x.isnan().logical_not()
    assert topk_softmax(x, k, mask=hidden).isfinite().all()
    assert threshold_softmax(x, 0.5, mask=hidden).isfinite().all()


def test_bad_arguments_are_named():
    x = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="`k` must be at least 1, got 0"):
        topk_softmax(x, 0)
    for threshold in (math.nan, torch.tensor([[0.0], [torch.nan]])):
        with pytest.raises(ValueError, match="`threshold` must not be NaN"):
            threshold_softmax(x, threshold)
    with pytest.raises(ValueError, match=r"`threshold` of shape \(4,\) does not broadcast to scores of shape \(2, 3\)"):
        threshold_softmax(x, torch.zeros(4))
    with pytest.raises(ValueError, match=r"`threshold` of shape \(2, 2, 3\) does not broadcast"):
        threshold_softmax(x, torch.zeros(2, 2, 3))
    with pytest.raises(ValueError, match="`when_empty` must be raise, largest or zero, got 'nan'"):
        getattr(threshold_softmax, "__wrapped__", threshold_softmax)(x, 0.0, when_empty="nan")
    with pytest.raises(ValueError, match="`temperature` must be at least 0"):
        topk_softmax(x, 1, temperature=-1.0)


def test_any_rank_and_strides():
    x = _randn(4, 5, 3)
    for dim in range(-3, 3):
        turned = x.movedim(dim, -1).reshape(-1, x.shape[dim])
        for of in (lambda x, dim: topk_softmax(x, 2, dim), lambda x, dim: threshold_softmax(x, -9.0, dim)):
            found = of(x.transpose(0, 1), dim if dim % 3 == 2 else [1, 0][dim % 3]).transpose(0, 1)
            assert torch.allclose(found.movedim(dim, -1).reshape(turned.shape), of(turned, -1), rtol=1e-14, atol=0)
    assert topk_softmax(torch.tensor(3.0), 1).item() == 1
    assert threshold_softmax(torch.tensor(3.0), 2.0).item() == 1
    for shape in ((0,), (3, 0), (0, 3)):
        assert topk_softmax(torch.zeros(shape), 2).shape == shape
        assert threshold_softmax(torch.zeros(shape), 2.0).shape == shape


def test_torch_func():
    x = _randn(4, 3, 5)
    for of in (lambda x: topk_softmax(x, 2), lambda x: threshold_softmax(x, 0.3, when_empty="largest")):
        assert torch.allclose(torch.func.vmap(of)(x), of(x))
        leaf = x.clone().requires_grad_()
        (right,) = torch.autograd.grad(of(leaf).square().sum(), leaf)
        found = torch.func.vmap(torch.func.grad(lambda x, of=of: of(x).square().sum()))(x)
        assert torch.allclose(found, right)
        assert torch.allclose(torch.func.jacfwd(of)(x[0]), torch.func.jacrev(of)(x[0]))
    assert not torch.func.vmap(lambda x: threshold_softmax(x, 99.0))(x).any()  # nothing can be looked at


@pytest.mark.compile
def test_compiles_whole_with_the_same_values_and_gradients():
    x = (_randn(4, 9) * 2).round().requires_grad_()

    def both(x, threshold):
        return topk_softmax(x, 3) + threshold_softmax(x, threshold, when_empty="largest") + threshold_softmax(x, -9.0)

    compiled = torch.compile(both, fullgraph=True)
    level = torch.full((4, 1), 0.5, dtype=torch.float64)
    assert torch.allclose(compiled(x, level), both(x, level))
    found, right = (torch.autograd.grad(of(x, level).square().sum(), x) for of in (compiled, both))
    assert torch.allclose(found[0], right[0])
    with pytest.raises(RuntimeError, match="`threshold` leaves a row"):
        compiled(x.detach() - 100, level)
