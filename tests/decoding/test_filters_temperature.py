"""Temperature at both ends, and what a float cannot hold."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.decoding import Temperature
from unembed.decoding.filters import _temperature

INF = math.inf


@settings(deadline=None)
@given(
    values=st.lists(st.floats(-50, 50) | st.just(-INF), min_size=1, max_size=20),
    temperature=st.floats(1e-3, 1e3) | st.sampled_from([0, 0.0, 1, 2, INF]),
)
def test_is_its_definition(values, temperature):
    scores = torch.tensor(values, dtype=torch.float64)
    torch.testing.assert_close(Temperature(temperature)(scores), _temperature._reference(scores, temperature))


def test_d7_half_precision_and_temperatures_that_no_float_divides_by():
    scores = torch.tensor([2.9, 11.06], dtype=torch.float16)
    for temperature in (1e-5, 1e-12, 1e-38, 1e-50, 5e-324):
        found = Temperature(temperature)(scores)
        assert found.dtype == torch.float32
        assert bool(found.isfinite().all())
        assert found.softmax(-1).tolist() == [0.0, 1.0], temperature
    steps = torch.tensor([10.0, 20.0, 30.0])
    assert Temperature(1e-38)(steps).softmax(-1).tolist() == [0.0, 0.0, 1.0]
    hot = Temperature(INF)(torch.tensor([3.0, -INF, 1.0, -7.0]))
    assert hot.softmax(-1).tolist() == pytest.approx([1 / 3, 0.0, 1 / 3, 1 / 3])
    assert Temperature(2)(steps).tolist() == [5.0, 10.0, 15.0]


@pytest.mark.parametrize("scores", [[-30.0, -20.0, -10.0], [1e30, 3e38, 2e38], [0.0, -1e38, 0.0]])
@pytest.mark.parametrize("temperature", [1e-45, 1e-38, 1e-3, 1.0])
def test_no_quotient_overflows(scores, temperature):
    scores = torch.tensor(scores)
    found = Temperature(temperature)(scores)
    assert bool(found.isfinite().all())
    best = scores == scores.max()
    wanted = best / best.sum() if temperature < 1e-30 else scores.double().div(temperature).softmax(-1)
    torch.testing.assert_close(found.double().softmax(-1), wanted.double())


def test_0_keeps_the_first_of_the_largest():
    scores = torch.tensor([[1.0, 3.0, 3.0], [-INF, -INF, -5.0], [-INF, -INF, -INF]])
    assert Temperature(0)(scores).tolist() == [[-INF, 0.0, -INF], [-INF, -INF, 0.0], [-INF, -INF, -INF]]


def test_one_number_a_row():
    scores = torch.tensor([[1.0, 2.0, -INF]]).repeat(5, 1)
    values = [0.0, 0.5, 1.0, INF, 1e-42]
    found = Temperature(torch.tensor(values, dtype=torch.float64))(scores)
    for row, temperature in enumerate(values):
        assert torch.equal(found[row], Temperature(temperature)(scores[row])), temperature


def test_gradients_pass_at_every_temperature():
    for temperature in (0.0, 1e-38, 0.5, 1.0, INF):
        scores = torch.tensor([1.0, -INF, 2.0], dtype=torch.float64, requires_grad=True)
        found = Temperature(temperature)(scores)
        (slope,) = torch.autograd.grad(found[found > -INF].sum(), scores)
        wanted = {0.0: [0, 0, 1], 0.5: [2, 0, 2], 1.0: [1, 0, 1], INF: [0, 0, 0]}
        if temperature in wanted:
            assert slope.tolist() == wanted[temperature], temperature
        assert bool(slope.isfinite().all()), temperature


@pytest.mark.parametrize("wrong", [-1, -1e-9, math.nan, torch.tensor([1.0, -1.0])])
def test_negative_and_nan_are_refused(wrong):
    with pytest.raises(ValueError, match="`temperature` must be at least 0, got"):
        Temperature(wrong)
