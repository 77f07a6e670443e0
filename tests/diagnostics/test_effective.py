"""Effective ranks, worked by hand."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unembed.diagnostics import effective_ranks


def test_four_equal_values_have_rank_four_by_every_formula():
    ranks = effective_ranks(np.full(4, 0.3))
    for name in ("stable_rank", "entropy_rank", "entropy_rank_energy", "participation_ratio"):
        assert ranks[name] == pytest.approx(4, rel=1e-12), name
    assert [ranks[f"directions_{level}"] for level in ("90", "99", "999")] == [4, 4, 4]


def test_two_values_three_to_one():
    # s = (3, 1): energies 9 and 1 of 10.
    ranks = effective_ranks(np.array([3.0, 1.0]))
    assert ranks["stable_rank"] == pytest.approx(10 / 9)
    assert ranks["participation_ratio"] == pytest.approx(100 / 82)
    assert ranks["entropy_rank"] == pytest.approx(0.75**-0.75 * 0.25**-0.25)
    assert ranks["entropy_rank_energy"] == pytest.approx(0.9**-0.9 * 0.1**-0.1)
    assert [ranks[f"directions_{level}"] for level in ("90", "99", "999")] == [1, 2, 2]  # 90 % exactly counts


def test_a_thousand_and_one_directions():
    # One of energy 900, a hundred of energy 1: 90 % with one, 99 % with 91, 99.9 % with 100.
    ranks = effective_ranks(np.array([30.0, *[1.0] * 100]))
    assert ranks["directions_90"] == 1
    assert ranks["directions_99"] == 91
    assert ranks["directions_999"] == 100
    assert ranks["stable_rank"] == pytest.approx(1000 / 900)


@pytest.mark.parametrize("count", range(10, 400, 10))
def test_nine_tenths_of_equal_directions_hold_ninety_per_cent(count):
    assert effective_ranks(np.full(count, 0.7))["directions_90"] == count * 9 // 10  # however the sum is rounded


def test_zeros_and_one_direction():
    assert set(effective_ranks(np.zeros(3)).values()) == {0}
    assert set(effective_ranks(np.zeros(0)).values()) == {0}
    assert {float(value) for value in effective_ranks(np.array([5.0, 0.0, 0.0])).values()} == {1.0}


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=12),
    st.floats(1e-60, 1e60),
)
def test_every_rank_lies_between_one_and_the_count_and_ignores_scale(values, factor):
    values = np.sort(np.array(values))[::-1]
    ranks, scaled = effective_ranks(values), effective_ranks(factor * values)
    for name, rank in ranks.items():
        assert 1 - 1e-9 <= rank <= len(values) + 1e-9, name
        assert scaled[name] == pytest.approx(rank, rel=1e-9), name
    # Renyi entropies of p = s^2 / sum s^2 fall with their order: 1, 2, infinity.
    assert ranks["entropy_rank_energy"] >= ranks["participation_ratio"] * (1 - 1e-9)
    assert ranks["participation_ratio"] >= ranks["stable_rank"] * (1 - 1e-9)
    assert math.isfinite(ranks["entropy_rank"])
