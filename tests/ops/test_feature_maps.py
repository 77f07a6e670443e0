"""Feature maps against the kernels that they stand for."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.ops._feature_maps import Elu, Exp, Favor, Polynomial, Relu, Taylor, build_map

MAPS = [Elu(), Relu(), Exp(), Polynomial(), Polynomial(4, 0.5), Polynomial(2, 0.0), Taylor(), Favor(3, 7, seed=1)]


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(
    width=st.integers(1, 6),
    degree=st.sampled_from([2, 4, 6]),
    constant=st.sampled_from([0.0, 0.3, 1.0, 4.0]),
    scale=st.sampled_from([0.2, 1.0, 3.0]),
)
@settings(deadline=None, max_examples=40)
def test_polynomial_is_the_power(width, degree, constant, scale):
    query, key, kind = _randn(4, width), _randn(5, width, seed=1), Polynomial(degree, constant)
    queries, keys = kind(query, scale), kind(key, scale)
    torch.testing.assert_close(queries @ keys.T, (scale * query @ key.T + constant) ** degree)
    assert queries.shape[-1] == kind.size(width)


def test_polynomial_features_by_hand():
    """(q k + 1)^2 = q^2 k^2 + 2 q k + 1."""
    found = Polynomial()(torch.tensor([[3.0]]))
    assert found.flatten().tolist() == pytest.approx([9, 3 * math.sqrt(2), 1])
    assert Polynomial().size(64) == math.comb(66, 2) == 2145


@pytest.mark.parametrize("scale", [0.3, 1.0, 2.0])
def test_taylor_is_the_series_and_never_below_a_half(scale):
    query, key = 3 * _randn(50, 4), _randn(60, 4, seed=1)
    t = scale * query @ key.T
    found = Taylor()(query, scale) @ Taylor()(key, scale).T
    torch.testing.assert_close(found, 1 + t + t**2 / 2)
    assert found.min() >= 0.5 - 1e-9
    assert Taylor()(query).shape[-1] == Taylor().size(4) == 15


def test_elementwise_maps():
    x = torch.tensor([-2.0, -0.0, 0.0, 1.5], dtype=torch.float64)
    torch.testing.assert_close(Elu()(x), torch.nn.functional.elu(x) + 1)
    assert Relu()(x).tolist() == [0, 0, 0, 1.5]
    assert Exp()(x).tolist() == x.tolist()  # the logarithm


def test_elu_in_bfloat16_keeps_small_features():
    """L28: elu(x) + 1 at -8 and -6; rounded after the addition it is 0."""
    x = torch.tensor([-8.0, -6.0], dtype=torch.bfloat16)
    assert Elu()(x).tolist() == pytest.approx([3.355e-4, 2.479e-3], rel=1e-3)
    assert Elu()(x).bfloat16().tolist() == pytest.approx([3.355e-4, 2.479e-3], rel=4e-3)
    assert Elu()(torch.tensor([-80.0])).item() == pytest.approx(math.exp(-80), rel=1e-5)
    assert Elu()(torch.tensor([-torch.inf, 1e30])).tolist() == [0, pytest.approx(1e30)]


@pytest.mark.parametrize("kind", MAPS, ids=str)
def test_maps_have_derivatives_and_a_wide_dtype(kind):
    x = _randn(2, 4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: kind(x, 0.7), x)
    assert torch.autograd.gradgradcheck(lambda x: kind(x, 0.7), x)
    with torch.no_grad():
        for dtype, wide in [(torch.float16, torch.float32), (torch.float32, torch.float32)]:
            found = kind(x.to(dtype), 0.7)
            assert found.dtype == wide
            assert found.shape == (2, 4, kind.size(3))
            torch.testing.assert_close(found.double(), kind(x.to(dtype).double(), 0.7), rtol=1e-4, atol=1e-5)


def test_favor_is_unbiased_and_orthogonal_rows_have_less_variance():
    query, key, scale, draws = _randn(1, 8) / 2, _randn(1, 8, seed=1) / 2, 1.0, 600
    want = math.exp(scale * float(query @ key.T))
    spread = {}
    for orthogonal in (True, False):
        kinds = [Favor(8, 8, seed=seed, orthogonal=orthogonal) for seed in range(draws)]
        found = torch.stack([(kind(query, scale) + kind(key, scale)).exp().sum() for kind in kinds])
        assert float(found.mean()) == pytest.approx(want, abs=4 * float(found.std()) / math.sqrt(draws))
        spread[orthogonal] = float(found.std())
    assert spread[True] < spread[False]


@pytest.mark.parametrize("features", [3, 5, 12])
def test_favor_rows(features):
    kind = Favor(5, features, seed=3)
    assert kind.rows.shape == (features, 5)
    assert kind == Favor(5, features, seed=3)
    assert torch.equal(kind.rows, Favor(5, features, seed=3).rows)
    assert not torch.equal(kind.rows, Favor(5, features, seed=4).rows)
    for block in kind.rows.split(5):
        gram = block @ block.T
        torch.testing.assert_close(gram, gram.diagonal().diag(), rtol=0, atol=1e-12)
    many = Favor(4, 40_000, seed=0).rows
    squares = many.square().sum(1)  # chi-square of 4 degrees: mean 4, variance 8
    assert float(squares.mean()) == pytest.approx(4, abs=4 * math.sqrt(8 / 40_000))
    torch.testing.assert_close(many.T @ many / 40_000, torch.eye(4, dtype=torch.float64), rtol=0, atol=0.04)


def test_names_and_options():
    assert build_map("elu") == Elu()
    assert build_map("polynomial") == Polynomial(2, 1.0)
    kind = Favor(3, 4, seed=0)
    assert build_map(kind) is kind
    with pytest.raises(ValueError, match="must be one of elu, relu, exp, polynomial, taylor"):
        build_map("gelu")
    with pytest.raises(ValueError, match="needs width, features and seed"):
        build_map("favor")
    for degree in (0, 1, 3, -2):
        with pytest.raises(ValueError, match="`degree` must be even"):
            Polynomial(degree)
    with pytest.raises(ValueError, match="`constant`"):
        Polynomial(2, -1.0)
    with pytest.raises(ValueError, match="at least 1"):
        Favor(3, 0, seed=0)


def test_scales():
    assert Taylor().check(16, None) == 0.25
    assert Taylor().check(16, 0.7) == 0.7
    assert Elu().check(16, None) == 1.0
    with pytest.raises(ValueError, match="`scale` must be None for the elementwise map `elu`"):
        Elu().check(16, 0.25)
    with pytest.raises(ValueError, match="positive and finite, got -1"):
        Taylor().check(16, -1.0)
    with pytest.raises(ValueError, match="made for width 3, but queries and keys have 16"):
        Favor(3, 4, seed=0).check(16, None)
