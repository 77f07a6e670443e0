"""The k largest against a stable sort."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.decoding import _largest

pytestmark = pytest.mark.usefixtures("way")
INF = math.inf


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(0, 4), st.integers(1, 3000)),
    part=st.floats(0, 1),
    values=st.integers(1, 400),
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_is_a_stable_sort_at_every_shape(shape, part, values, seed, dtype):
    width = shape[1]
    random = torch.Generator().manual_seed(seed)
    x = (torch.randint(-values, values, shape, generator=random) / 7).to(dtype)
    x[torch.rand(shape, generator=random) < 0.1] = -INF
    x[torch.rand(shape, generator=random) < 0.1] = -0.0
    for k in {1, max(1, int(part**4 * width)), max(1, int(part * width)), width}:
        found, wanted = _largest.largest(x, k), _largest._reference(x, k)
        assert torch.equal(found.indices, wanted.indices)
        assert torch.equal(found.values, wanted.values)


def test_blocks_are_used_where_they_should_be():
    assert _largest._size(50_257, 50) == 16
    assert _largest._size(262_144, 1) == 512
    assert _largest._size(1000, 500) == 1


@pytest.mark.parametrize("width", [40, 20_000])
def test_extremes_of_float32(width):
    x = torch.zeros(1, width)
    x[0, 5], x[0, 9], x[0, 20], x[0, 21] = INF, 3.4e38, math.nan, 1e-45
    found = _largest.largest(x, 6)
    assert found.indices.tolist() == [[20, 5, 9, 21, 0, 1]]
    assert found.values[0, 0].isnan()
    assert found.values[0, 1:].tolist() == [INF, pytest.approx(3.4e38), pytest.approx(1e-45), 0, 0]
