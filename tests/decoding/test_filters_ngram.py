"""No-repeat n-grams and DRY, each against its definition by brute force."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.decoding import DRY, History, NoRepeatNgram
from unembed.decoding.filters import _ngram

INF = math.inf
V = 5
texts = st.lists(st.integers(0, V - 1), max_size=25)


@settings(deadline=None)
@given(prompt=texts, output=texts, other=texts, n=st.integers(1, 5), scope=st.sampled_from(["all", "written"]))
def test_no_repeat_ngram_is_its_definition(prompt, output, other, n, scope):
    found = NoRepeatNgram(n, scope=scope)(torch.zeros(2, V), History.of([prompt, other], [output, []]))
    seen = output if scope == "written" else prompt + output
    banned = _ngram._reference(seen, n)
    banned = set() if len(banned) == V else banned  # where all would go, none does
    assert {v for v in range(V) if found[0, v] == -INF} == banned
    if scope == "written":
        assert bool((found[1] == 0).all())


def test_no_repeat_ngram_worked_by_hand():
    history = History.of([[0, 1, 2, 0, 1]], [[]])
    scores = torch.zeros(1, V)
    assert (NoRepeatNgram(3)(scores, history) == -INF).nonzero().tolist() == [[0, 2]]  # 0 1 2 occurred
    assert (NoRepeatNgram(2)(scores, history) == -INF).nonzero().tolist() == [[0, 2]]  # 1 2
    assert (NoRepeatNgram(1)(scores, history) == -INF).nonzero().tolist() == [[0, 0], [0, 1], [0, 2]]
    assert torch.equal(NoRepeatNgram(4)(scores, history), scores)


def test_no_repeat_ngram_leaves_a_row_that_would_lose_all():
    scores = torch.tensor([[0.0, -INF, 1.0]])
    assert torch.equal(NoRepeatNgram(1)(scores, torch.tensor([[0, 2]])), scores)


@settings(deadline=None)
@given(
    text=texts,
    other=texts,
    allowed=st.integers(1, 4),
    breakers=st.sets(st.integers(0, V - 1), max_size=2),
    window=st.none() | st.integers(1, 20),
)
def test_dry_is_its_definition(text, other, allowed, breakers, window):
    given_filter = DRY(0.8, base=1.5, allowed_length=allowed, breakers=tuple(breakers), window=window)
    found = given_filter(torch.zeros(2, V, dtype=torch.float64), History.of([text, other], [[], []]))
    for row, whole in enumerate([text, other]):
        seen = whole if window is None else whole[-window:]
        lengths = _ngram._dry_reference(seen, allowed, tuple(breakers))
        wanted = [-0.8 * 1.5 ** (lengths[v] - allowed) if v in lengths else 0.0 for v in range(V)]
        torch.testing.assert_close(found[row], torch.tensor(wanted, dtype=torch.float64))


def test_dry_worked_by_hand():
    # The example in llama.cpp's source, a b c c b c y a b c: c would prolong a repeat of 3, y one of 2, b one of 1.
    a, b, c, y = range(4)
    text = [[a, b, c, c, b, c, y, a, b, c]]
    found = DRY(2.0, base=3.0, allowed_length=1)(torch.zeros(1, 4), History.of(text, [[]]))
    assert found.tolist() == [[0.0, -2.0, -18.0, -6.0]]
    found = DRY(2.0, base=3.0, allowed_length=2)(torch.zeros(1, 4), History.of(text, [[]]))
    assert found.tolist() == [[0.0, 0.0, -6.0, -2.0]]
    found = DRY(2.0, base=3.0, allowed_length=2, breakers=(b,))(torch.zeros(1, 4), History.of(text, [[]]))
    assert found.tolist() == [[0.0, 0.0, 0.0, 0.0]]  # no run goes across b


def test_dry_stays_finite_on_a_long_repeat():
    found = DRY(1e30, base=2.0)(torch.zeros(1, 3), torch.zeros(1, 4000, dtype=torch.int64))
    assert bool(found.isfinite().all())
    assert found.argmin() == 0


def test_dry_of_a_base_of_1_is_flat_and_of_a_large_one_saturates():
    text = History.of([[0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2]], [[]])
    assert DRY(0.5, base=1.0)(torch.zeros(1, V), text).tolist() == [[0.0, 0.0, 0.0, -0.5, 0.0]]
    found = DRY(0.5, base=1e30)(torch.zeros(1, V, dtype=torch.float64), text)
    assert found[0, 3].item() == pytest.approx(-1e30)


def test_breakers_may_be_any_sequence_of_ids():
    scores, text = torch.zeros(1, V), torch.tensor([[1, 2, 3, 1, 2]])
    for breakers in ([2], torch.tensor([2]), np.array([2])):
        assert DRY(1.0, breakers=breakers) == DRY(1.0, breakers=(2,))
        assert torch.equal(DRY(1.0, breakers=breakers)(scores, text), scores)
    assert DRY(1.0)(scores, text)[0, 3] == -1.0


def test_padding_is_no_token():
    for given_filter in (NoRepeatNgram(2), DRY(1.0, allowed_length=1)):
        alone = given_filter(torch.zeros(1, V), History.of([[1, 2, 1]], [[]]))
        padded = given_filter(torch.zeros(1, V), torch.tensor([[-1, -1, 1, 2, 1]]))
        assert torch.equal(alone, padded)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: NoRepeatNgram(0), "`n` must be at least 1, got 0."),
        (lambda: NoRepeatNgram(2, scope="prompt"), "`scope` must be all or written, got 'prompt'."),
        (lambda: DRY(1.0, base=0.5), "`base` must be at least 1, got 0.5."),
        (lambda: DRY(1.0, allowed_length=0), "`allowed_length` must be at least 1, got 0."),
        (lambda: DRY(1.0, allowed_length=None), "`allowed_length` must be whole, got None."),
        (lambda: DRY(1.0, window=1.5), "`window` must be whole, got 1.5."),
        (lambda: DRY(1.0, breakers=("\n", '"')), "`breakers` must be whole, got '\\n'."),
        (lambda: DRY(1.0, breakers=(1.5,)), "`breakers` must be whole, got 1.5."),
        (lambda: DRY(1.0, breakers="ab"), "`breakers` must be ids, whole numbers from 0 on, got 'ab'."),
        (lambda: DRY(1.0, breakers=1), "`breakers` must be ids, whole numbers from 0 on, got 1."),
        (lambda: DRY(torch.ones(2)), "`multiplier` must be one number for all rows, got a tensor of shape (2,)."),
        (lambda: DRY(1.0, base=torch.ones(2)), "`base` must be one number for all rows, got a tensor of shape (2,)."),
        (
            lambda: DRY(1.0, window=torch.tensor([2])),
            "`window` must be one number for all rows, got a tensor of shape (1,).",
        ),
        (
            lambda: NoRepeatNgram(torch.tensor([1, 2])),
            "`n` must be one number for all rows, got a tensor of shape (2,).",
        ),
        (
            lambda: DRY(1.0)(torch.zeros(1, 3), torch.tensor([[7, 8, 7, 8, 7, 8]])),
            "`history` holds id 7, but scores have 3 classes.",
        ),
        (
            lambda: NoRepeatNgram(1)(torch.zeros(1, 3), torch.tensor([[7]])),
            "`history` holds id 7, but scores have 3 classes.",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(make, message):
    with pytest.raises(ValueError) as told:  # noqa: PT011
        make()
    assert str(told.value) == message
