"""Filters that keep or exclude by probability, each against its definition at random shapes, ties and dtypes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unembed.decoding import Epsilon, Eta, MinP, TopK, TopNSigma, TopP, Typical
from unembed.decoding.filters import _epsilon, _eta, _min_p, _top_k, _top_n_sigma, _top_p, _typical

INF = math.inf
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def log(*probabilities: float) -> Tensor:
    """Scores whose softmax these are, in float64."""
    return torch.tensor(probabilities, dtype=torch.float64).log()


def kept(found: Tensor) -> list[int]:
    return (found > -INF).nonzero().squeeze(-1).tolist()


@st.composite
def rows(draw, widest: int = 90) -> Tensor:
    """Scores in steps of 1/8, so that they tie and are exact in every dtype, some excluded; float64 [B, V]."""
    shape = draw(st.integers(1, 4)), draw(st.integers(1, widest))
    random = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scores = torch.randint(0, draw(st.integers(1, 60)), shape, generator=random).double() / 8
    scores[torch.rand(shape, generator=random) < draw(st.sampled_from([0.0, 0.3]))] = -INF
    return scores


mass = st.floats(-0.1, 1.1) | st.sampled_from([0.0, 1e-8, 0.5, 0.9, 0.99, 1.0])
few = st.integers(1, 5)


def split(filtered: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
    """What is kept of the scores that take part, with kept scores as they came in."""
    taking = scores > -INF
    stays = filtered > -INF
    assert not (stays & ~taking).any()
    assert torch.equal(filtered[stays].double(), scores[stays].double())
    return stays, taking


@settings(deadline=None)
@given(scores=rows(), k=st.integers(1, 100), least=few)
@pytest.mark.parametrize("dtype", DTYPES)
def test_top_k_is_its_definition(dtype, scores, k, least):
    stays, taking = split(TopK(k, min_keep=least)(scores.to(dtype)), scores)
    for row, one in zip(scores, stays & taking, strict=True):
        assert torch.equal(one, _top_k._reference(row, k, least) & (row > -INF))


@settings(deadline=None)
@given(scores=rows(), p=mass, least=few)
def test_top_p_is_its_definition_in_float64(scores, p, least):
    stays, taking = split(TopP(p, min_keep=least)(scores), scores)
    for row, one in zip(scores, stays & taking, strict=True):
        assert torch.equal(one, _top_p._reference(row, p, least) & (row > -INF))


def is_shortest_prefix(key: Tensor, probability: Tensor, stays: Tensor, *, p: float, least: int, slack: float) -> None:
    """What is kept comes first by a key, has the mass, and would not have it without its last."""
    last = key[stays].max()
    assert bool((key[~stays] >= last - slack).all())
    for value in key.unique():
        assert bool((stays[key == value].int().diff() <= 0).all())  # equal ones by the lowest index
    assert probability[stays].sum() >= p - slack or bool(stays.all())
    if int(stays.sum()) > least:
        lightest = probability[stays & (key >= last - slack)].min()
        assert probability[stays].sum() - lightest < p + slack


@settings(deadline=None)
@given(scores=rows(300), p=mass, least=few, offset=st.sampled_from([0.0, 100.0]))
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_top_p_in_narrow_dtypes_is_the_shortest_prefix_of_these_scores(dtype, scores, p, least, offset):
    scores = (scores + offset).to(dtype)
    for row in scores[(scores > -INF).any(-1)]:
        taking = row > -INF
        stays = split(TopP(p, min_keep=least)(row), row)[0][taking]
        exact = row[taking].double()
        is_shortest_prefix(-exact, exact.softmax(-1), stays, p=min(p, 1), least=least, slack=1e-6)


@settings(deadline=None)
@given(scores=rows(300), p=mass, least=few, dtype=st.sampled_from(DTYPES))
def test_typical_is_the_shortest_prefix_by_distance_to_the_entropy(scores, p, least, dtype):
    scores = scores.to(dtype)
    for row in scores[(scores > -INF).any(-1)]:
        taking = row > -INF
        stays = split(Typical(p, min_keep=least)(row), row)[0][taking]
        log_p = row[taking].double().log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum()
        slack = 1e-12 if dtype == torch.float64 else 3e-6
        is_shortest_prefix((-log_p - entropy).abs(), log_p.exp(), stays, p=min(p, 1), least=least, slack=slack)


@settings(deadline=None)
@given(scores=rows(), p=st.floats(0.01, 0.99), least=few)
def test_typical_is_its_definition_where_no_distances_meet(scores, p, least):
    for row in scores:
        log_p = row[row > -INF].log_softmax(-1)
        entropy = -(log_p.exp() * log_p).sum()
        gaps = (-log_p.unique() - entropy).abs().sort().values.diff()
        if len(log_p) and bool((gaps > 1e-12).all()):
            found = Typical(p, min_keep=least)(row) > -INF
            assert torch.equal(found, _typical._reference(row, p, least) & (row > -INF))


def decided_alike(found: Tensor, wanted: Tensor, row: Tensor, margin: Tensor, slack: float) -> None:
    """Equal but for scores within a rounding of the border."""
    sure = (margin.abs() > slack) & (row > -INF)
    assert torch.equal(found[sure], wanted[sure])
    assert bool(found.any()) or not bool((row > -INF).any())


@settings(deadline=None)
@given(scores=rows(), m=st.floats(0, 1), least=few, dtype=st.sampled_from(DTYPES))
def test_min_p_is_its_definition(scores, m, least, dtype):
    stays, _ = split(MinP(m, min_keep=least)(scores.to(dtype)), scores)
    for row, one in zip(scores, stays, strict=True):
        below = row.max() - row
        margin = below + (math.log(m) if m > 0 else -INF)
        decided_alike(one, _min_p._reference(row, m, least), row, margin, 1e-5 if dtype != torch.float64 else 1e-12)


@settings(deadline=None)
@given(scores=rows(), e=st.floats(0, 1), least=few, dtype=st.sampled_from(DTYPES))
@pytest.mark.parametrize("kind", [Epsilon, Eta])
def test_epsilon_and_eta_are_their_definitions(kind, scores, e, least, dtype):
    stays, _ = split(kind(e, min_keep=least)(scores.to(dtype)), scores)
    reference = (_epsilon if kind is Epsilon else _eta)._reference
    for row, one in zip(scores, stays, strict=True):
        p = row.softmax(-1)
        floor = e if kind is Epsilon else min(e, e**0.5 * float((torch.xlogy(p, p).sum()).exp()))
        slack = (1e-5 if dtype != torch.float64 else 1e-12) * floor
        decided_alike(one, reference(row, e, least), row, p - floor, slack)


@settings(deadline=None)
@given(scores=rows(), n=st.floats(0, 5), least=few, dtype=st.sampled_from(DTYPES))
def test_top_n_sigma_is_its_definition(scores, n, least, dtype):
    stays, _ = split(TopNSigma(n, min_keep=least)(scores.to(dtype)), scores)
    for row, one in zip(scores, stays, strict=True):
        finite = row[row > -INF]
        width = n * finite.std(correction=0) if len(finite) else torch.tensor(0.0)
        slack = 1e-5 if dtype != torch.float64 else 1e-12
        decided_alike(one, _top_n_sigma._reference(row, n, least), row, row.max() - row - width, slack)


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (TopK, [1, 7, 40]),
        (TopP, [0.2, 0.9, 1.5]),
        (Typical, [0.2, 0.9, 1.0]),
        (MinP, [0.0, 0.1, 1.0]),
        (Epsilon, [0.0, 0.02, 1.0]),
        (Eta, [0.0, 0.05, 1.0]),
        (TopNSigma, [0.0, 1.0, INF]),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_number_a_row_is_each_row_by_itself(kind, values, dtype):
    torch.manual_seed(0)
    scores = 2 * torch.randn(3, 100, dtype=dtype)
    whole = kind(torch.tensor(values))(scores)
    for row, value in enumerate(values):
        assert torch.equal(whole[row], kind(value)(scores[row])), value
    with pytest.raises(ValueError, match=r"must be a number or have shape \[2\], got \(3,\)"):
        kind(torch.tensor(values))(scores[:2])


# Public cases, by the numbers of shared/cases/decoding.md.


@pytest.mark.parametrize(
    ("p", "dtype"), [(0.0, torch.float32), (1e-8, torch.float32), (1e-4, torch.float16), (1e-3, torch.bfloat16)]
)
def test_d1_a_mass_near_0_keeps_the_best_one(p, dtype):
    torch.manual_seed(0)
    scores = torch.randn(4, 1000).to(dtype)
    scores[1] = 0
    found = TopP(p)(scores) > -INF
    assert torch.equal(found.sum(-1), torch.ones(4, dtype=torch.int64))
    first = [int((row == row.max()).nonzero()[0]) for row in scores]
    assert found.int().argmax(-1).tolist() == first


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_d2_a_sum_that_is_the_mass_up_to_rounding_has_reached_it(dtype):
    scores = log(0.5, 0.3, 0.2).to(dtype)
    assert kept(TopP(0.8)(scores)) == [0, 1]
    assert kept(TopP(0.5)(scores)) == [0]
    assert kept(TopP(0.8001)(scores)) == [0, 1, 2]


def test_d3_no_running_sum_saturates():
    torch.manual_seed(0)
    scores = (2 * torch.randn(131_072)).bfloat16()
    found = TopP(0.99)(scores) > -INF
    exact = torch.zeros_like(found)
    order = scores.double().argsort(descending=True, stable=True)
    p = scores.double().softmax(-1)[order]
    exact[order] = p.cumsum(0) - p < 0.99 - 4 * torch.finfo(torch.float32).eps
    assert torch.equal(found, exact)
    assert torch.equal(TopP(0.99)(scores.double()) > -INF, _top_p._reference(scores.double(), 0.99))


def test_d6_k_beyond_the_vocabulary_keeps_all():
    scores = torch.arange(10.0)
    assert torch.equal(TopK(15)(scores), scores)
    assert torch.equal(TopK(torch.tensor([15, 3]))(scores.expand(2, -1))[0], scores)


def test_d8_exactly_k_of_equal_scores_the_lowest_ids():
    assert kept(TopK(50)(torch.zeros(1000))) == list(range(50))
    assert kept(TopP(0.05)(torch.zeros(1000))) == list(range(50))


def test_d25_exactly_k_of_two_and_of_flat_scores():
    torch.manual_seed(0)
    scores = torch.randn(2, 152_000)
    scores[1] = 0
    scores[0] += torch.nn.functional.one_hot(torch.tensor(7), 152_000) * 12.0  # about .45 for the best one
    assert (TopK(50)(scores) > -INF).sum(-1).tolist() == [50, 50]
    assert kept(TopP(0.9)(scores[1])) == list(range(136_800))


# Values worked by hand.


def test_values_worked_by_hand():
    scores = log(0.5, 0.25, 0.125, 0.125)
    assert kept(MinP(0.5)(scores)) == [0, 1]  # .25 = .5 * .5 counts
    assert kept(MinP(0.51)(scores)) == [0]
    assert kept(Epsilon(0.125)(scores)) == [0, 1, 2, 3]
    assert kept(Epsilon(0.2)(scores)) == [0, 1]
    assert kept(Epsilon(0.9)(scores)) == [0]  # at least one
    # H = 1.75 log 2; information is 1, 2, 3, 3 times log 2: id 1 is nearest (.25), then 0 (.75), then 2 and 3 (1.25).
    assert kept(Typical(0.2)(scores)) == [1]
    assert kept(Typical(0.7)(scores)) == [0, 1]
    assert kept(Typical(0.8)(scores)) == [0, 1, 2]
    # exp(-H) = 2^-1.75 = .297: e = .25 gives min(.25, .149), e = .5 gives min(.5, .210).
    assert kept(Eta(0.25)(scores)) == [0, 1]
    assert kept(Eta(0.5)(scores)) == [0, 1]
    assert kept(Eta(0.05)(scores)) == [0, 1, 2, 3]  # min(.05, .0665)
    # mean 2, variance (4 + 0 + 4 + 0) / 4 = 2: 4 - n sqrt(2) at n = 1 is 2.59, at n = 2 it is 1.17.
    assert kept(TopNSigma(1)(torch.tensor([4.0, 2.0, 0.0, 2.0]))) == [0]
    assert kept(TopNSigma(2)(torch.tensor([4.0, 2.0, 0.0, 2.0]))) == [0, 1, 3]
    assert kept(TopNSigma(2)(torch.tensor([4.0, 2.0, -INF, 0.0, 2.0]))) == [0, 1, 4]  # excluded scores have no part


@pytest.mark.parametrize("kind", [TopP, Typical, MinP, Epsilon, Eta])
@pytest.mark.parametrize("wrong", [math.nan, "0.9", None])
def test_no_number_is_refused_in_one_line(kind, wrong):
    with pytest.raises(ValueError, match=r"^`\w+` must be a(t least 0 and at most 1| number)") as told:
        kind(wrong)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: TopK(0), "`k` must be at least 1, got 0."),
        (lambda: TopK(2.5), "`k` must be whole, got 2.5."),
        (lambda: TopK(True), "`k` must be whole, got True."),
        (lambda: TopK(torch.tensor([3, 0])), "`k` must be at least 1, got [3, 0]."),
        (lambda: MinP(1.1), "`m` must be at least 0 and at most 1, got 1.1."),
        (lambda: TopNSigma(-1), "`n` must be at least 0, got -1."),
        (lambda: TopP(math.nan), "`p` must be a number, got nan."),
        (lambda: TopP(0.9, min_keep=0), "`min_keep` must be a whole number of at least 1, got 0."),
        (
            lambda: TopP(0.9)(torch.arange(3)),
            "`scores` must be floating point [*, V] with V >= 1, got torch.int64 (3,).",
        ),
        (
            lambda: TopP(0.9)(torch.zeros(2, 0)),
            "`scores` must be floating point [*, V] with V >= 1, got torch.float32 (2, 0).",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(make, message):
    with pytest.raises(ValueError) as told:  # noqa: PT011
        make()
    assert str(told.value) == message
