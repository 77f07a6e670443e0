"""Scores of a linear head and norms of long rows, against their definitions."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed import ops


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


@settings(max_examples=30, deadline=None)
@given(
    n=st.integers(0, 5),
    d=st.integers(1, 5),
    v=st.integers(1, 7),
    biased=st.booleans(),
    softcap=st.sampled_from([None, 0.5, 30.0]),
    scale=st.sampled_from([1.0, 0.0625, 3.0]),
)
def test_scores_are_cap_of_scale_of_product_plus_bias(*, n, d, v, biased, softcap, scale):
    hidden, weight = _randn(n, d), _randn(v, d, seed=1)
    bias = _randn(v, seed=2) if biased else None
    scores = ops.linear_scores(hidden, weight, bias=bias, softcap=softcap, scale=scale)
    assert scores.shape == (n, v)
    for i in range(n):
        for j in range(v):
            z = scale * (sum(float(hidden[i, k] * weight[j, k]) for k in range(d)) + (float(bias[j]) if biased else 0))
            expected = z if softcap is None else softcap * math.tanh(z / softcap)
            assert float(scores[i, j]) == pytest.approx(expected, rel=1e-12, abs=1e-12)


def test_soft_cap_of_a_score_of_124_at_30():  # Gemma 2; MATH's order: the scale comes before the cap
    one = torch.ones(1, 1)
    assert float(ops.linear_scores(one * 124, one, softcap=30.0)) == pytest.approx(29.9846, abs=5e-5)
    assert float(ops.linear_scores(one * 248, one, softcap=30.0, scale=0.5)) == pytest.approx(29.9846, abs=5e-5)
    assert float(ops.linear_scores(one * 62, one, bias=one[0] * 62, softcap=30.0)) == pytest.approx(29.9846, abs=5e-5)
    assert float(ops.linear_scores(one * -124, one, softcap=30.0)) == pytest.approx(-29.9846, abs=5e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_is_computed_in_float32(dtype):
    hidden, weight = _randn(3, 64, dtype=dtype), _randn(5, 64, seed=1, dtype=dtype)
    bias = _randn(5, seed=2, dtype=dtype)
    scores = ops.linear_scores(hidden, weight, bias=bias, scale=0.3)
    exact = 0.3 * (hidden.double() @ weight.double().T + bias.double())
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)
    assert float((scores.to(dtype).double() - exact).abs().max()) > 1e-4  # what half precision would have lost


@pytest.mark.parametrize(
    ("hidden", "weight", "expected"),
    [
        (torch.float64, torch.float32, torch.float64),
        (torch.float32, torch.float64, torch.float64),
        (torch.bfloat16, torch.float16, torch.float32),
    ],
)
def test_the_wider_of_two_dtypes_wins(hidden, weight, expected):
    h, w = _randn(2, 3, dtype=hidden), _randn(4, 3, seed=1, dtype=weight)
    scores = ops.linear_scores(h, w)
    assert scores.dtype == expected
    torch.testing.assert_close(scores.double(), h.double() @ w.double().T, rtol=1e-5, atol=1e-5)


def test_strided_inputs_give_the_scores_of_their_copies():
    hidden, weight = _randn(8, 6)[::2, ::2], _randn(3, 10, seed=1).T[::2]
    assert not hidden.is_contiguous()
    assert not weight.is_contiguous()
    expected = ops.linear_scores(hidden.clone().contiguous(), weight.clone().contiguous())
    torch.testing.assert_close(ops.linear_scores(hidden, weight), expected, rtol=1e-14, atol=0)
    reversed_rows = ops.linear_scores(hidden.flip(0).expand(2, -1, -1), weight)
    torch.testing.assert_close(reversed_rows[1].flip(0), expected, rtol=1e-14, atol=0)


@pytest.mark.parametrize("softcap", [None, 1.5])
def test_first_and_second_derivatives(softcap):
    inputs = [_randn(2, 3).requires_grad_(), _randn(4, 3, seed=1).requires_grad_(), _randn(4, seed=2).requires_grad_()]

    def scores(hidden, weight, bias):
        return ops.linear_scores(hidden, weight, bias=bias, softcap=softcap, scale=0.7)

    assert torch.autograd.gradcheck(scores, inputs)
    assert torch.autograd.gradgradcheck(scores, inputs)


@pytest.mark.parametrize("softcap", [0.0, -30.0, math.nan, math.inf])
def test_a_soft_cap_that_is_no_positive_number_is_an_error(softcap):
    with pytest.raises(ValueError, match=r"`softcap` must be positive"):
        ops.linear_scores(torch.ones(1, 1), torch.ones(1, 1), softcap=softcap)


def test_the_squared_norm_of_twenty_million_elements_has_no_bias():
    x = torch.randn(20_000_000, generator=torch.Generator().manual_seed(0))
    exact = sum(float(part.double().square().sum()) for part in x.split(1 << 20))
    assert float(ops.squared_norms(x)) == pytest.approx(exact, rel=1e-6)
    # Why the function exists: the norm of torch on a CPU. If this fails, torch has mended it.
    assert abs(float(x.norm()) ** 2 / exact - 1) > 1e-5


@settings(max_examples=30, deadline=None)
@given(
    rows=st.integers(0, 4),
    length=st.integers(0, 40),
    piece=st.integers(1, 50),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16, torch.float16]),
)
def test_squared_norms_are_float64_sums_of_squares_of_the_stored_numbers(rows, length, piece, dtype):
    x = (300 * _randn(2 * rows, 2 * length)).to(dtype)[::2, ::2]  # squares beyond the range of float16
    norms = ops.squared_norms(x, piece=piece)
    assert norms.dtype == torch.float64
    torch.testing.assert_close(norms, x.double().square().sum(-1), rtol=1e-6, atol=0)


def test_squared_norms_keep_leading_dimensions():
    x = _randn(2, 3, 5)
    torch.testing.assert_close(ops.squared_norms(x), (x * x).sum(-1), rtol=1e-14, atol=0)
