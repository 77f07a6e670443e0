"""Rules on ids and on the length."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.decoding import AllowedIds, BannedIds, History, MinLength, TopK
from unembed.decoding.filters import _ids

INF = math.inf


@settings(deadline=None)
@given(width=st.integers(1, 9), data=st.data())
def test_allowed_and_banned_ids_are_their_definition(width, data):
    ids = data.draw(st.lists(st.integers(0, width - 1), min_size=1, max_size=6))
    scores = torch.arange(width, dtype=torch.float64) - 2
    for given_ids in (ids, tuple(ids), torch.tensor(ids)):
        assert torch.equal(AllowedIds(given_ids)(scores), _ids._reference(scores, ids, True))
        assert torch.equal(BannedIds(given_ids)(scores), _ids._reference(scores, ids, False))


def test_d24_only_allowed_ids_are_left_whatever_follows():
    torch.manual_seed(0)
    scores = torch.randn(4, 20)
    found = (AllowedIds([3, 8, 15]) | TopK(2))(scores)
    assert bool((found > -INF)[:, [3, 8, 15]].sum(-1).eq(2).all())
    assert int((found > -INF).sum()) == 8


def test_a_constraint_that_cannot_be_met_leaves_nothing():
    scores = torch.tensor([[0.0, -INF, 1.0]])
    assert AllowedIds([1])(scores).tolist() == [[-INF] * 3]
    assert BannedIds([0, 2])(scores).tolist() == [[-INF] * 3]
    assert torch.equal(BannedIds([])(scores), scores)


def test_min_length_counts_what_was_written():
    scores = torch.zeros(3, 4)
    history = History.of([[1, 1, 1], [1], []], [[2], [2, 2], []])
    found = MinLength(2, eos_ids=[0, 3])(scores, history)
    assert (found > -INF).tolist() == [[False, True, True, False], [True] * 4, [False, True, True, False]]


def test_min_length_may_differ_by_row():
    history = History.of([[7], [7], [7]], [[5], [5], [5]])
    found = MinLength(torch.tensor([0, 1, 2]), [0])(torch.zeros(3, 8), history)
    assert (found[:, 0] == -INF).tolist() == [False, False, True]
    alone = [MinLength(n, [0])(torch.zeros(1, 8), History.of([[7]], [[5]])) for n in (0, 1, 2)]
    assert torch.equal(found, torch.cat(alone))


def test_min_length_leaves_a_row_where_only_the_end_is_possible():
    scores = torch.tensor([[0.0, -INF, -INF, 1.0]])
    assert torch.equal(MinLength(9, eos_ids=[0, 3])(scores, torch.tensor([[2]])), scores)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AllowedIds([]), "`ids` must name at least one id that is allowed."),
        (lambda: AllowedIds([1.5]), "`ids` must be whole, got 1.5."),
        (lambda: BannedIds([-1]), "`ids` must be at least 0, got -1."),
        (lambda: BannedIds(torch.tensor(3)), "`ids` must have one dimension, got ()."),
        (lambda: BannedIds([5])(torch.zeros(3)), "`ids` holds id 5, but scores have 3 classes."),
        (lambda: BannedIds(5), "`ids` must be ids, whole numbers from 0 on, got 5."),
        (lambda: MinLength(-1, [0]), "`tokens` must be at least 0, got -1."),
        (
            lambda: MinLength(torch.tensor([1, 2, 3]), [0])(torch.zeros(2, 3), torch.tensor([[0], [0]])),
            "`tokens` must be a number or have shape [2], got (3,).",
        ),
        (
            lambda: MinLength(1, [9])(torch.zeros(1, 3), torch.tensor([[0]])),
            "`eos_ids` holds id 9, but scores have 3 classes.",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(make, message):
    with pytest.raises(ValueError) as told:  # noqa: PT011
        make()
    assert str(told.value) == message
