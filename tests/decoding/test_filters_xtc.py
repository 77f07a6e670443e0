"""XTC against its definition, and its coin."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.decoding import XTC, History
from unembed.decoding.filters import _xtc

INF = math.inf


def coins(*values: float) -> History:
    return History(torch.zeros(len(values), 0, dtype=torch.int64), coin=torch.tensor(values, dtype=torch.float64))


@settings(deadline=None)
@given(
    values=st.lists(st.integers(0, 12) | st.just(-INF), min_size=1, max_size=12),
    threshold=st.floats(0, 1),
    least=st.integers(1, 4),
)
def test_is_its_definition_where_the_coin_says_so(values, threshold, least):
    scores = torch.tensor([values, values], dtype=torch.float64) / 4
    found = XTC(threshold, 0.5, min_keep=least)(scores, coins(0.49, 0.5))
    wanted = _xtc._reference(scores[0], threshold, least) & (scores[0] > -INF)
    assert torch.equal(found[0] > -INF, wanted)
    assert torch.equal(found[1], scores[1])


def test_worked_by_hand():
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]], dtype=torch.float64).log()
    always = coins(0.0)
    assert (XTC(0.15, 1.0)(scores, always) > -INF).tolist() == [[False, False, True, True]]
    assert (XTC(0.25, 1.0)(scores, always) > -INF).tolist() == [[False, True, True, True]]
    assert (XTC(0.35, 1.0)(scores, always) > -INF).all()  # one top choice alone stays
    assert (XTC(0.15, 1.0, min_keep=3)(scores, always) > -INF).all()
    ties = torch.zeros(1, 3)
    assert (XTC(0.2, 1.0)(ties, always) > -INF).tolist() == [[False, False, True]]  # of equal ones the last stays


def test_the_coin_is_tossed_as_often_as_asked_by_the_history_or_by_torch():
    scores = torch.zeros(20_000, 2)
    torch.manual_seed(0)
    tossed = (XTC(0.1, 0.3)(scores)[:, 0] == -INF).double().mean().item()
    assert abs(tossed - 0.3) < 4 * math.sqrt(0.3 * 0.7 / 20_000)
    place = coins(*((torch.arange(1000) + 0.5) / 1000).tolist())
    assert int((XTC(0.1, 0.3)(scores[:1000], place)[:, 0] == -INF).sum()) == 300


def test_one_number_a_row():
    scores = torch.zeros(3, 4)
    found = XTC(torch.tensor([0.1, 0.3, 0.1]), torch.tensor([1.0, 1.0, 0.0]))(scores, coins(0.5, 0.5, 0.5))
    assert (found > -INF).sum(-1).tolist() == [1, 4, 4]


@pytest.mark.parametrize(("threshold", "probability"), [(1.5, 0.5), (0.1, 2.0), (-0.1, 0.5), (0.1, math.nan)])
def test_probabilities_beyond_1_are_refused(threshold, probability):
    with pytest.raises(ValueError, match="must be at least 0 and at most 1, got"):
        XTC(threshold, probability)
