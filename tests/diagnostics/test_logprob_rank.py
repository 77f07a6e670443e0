"""UNE102: every singular value of the log-probability matrix, against the matrix written out in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.diagnostics import LinearHead, LogprobRank, effective_ranks


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _matrix(head, hidden):
    bias = None if head.bias is None else head.bias.double()
    scores = head.scale * torch.nn.functional.linear(hidden.double(), head.weight.double(), bias)
    if head.softcap is not None:
        scores = head.softcap * torch.tanh(scores / head.softcap)
    return torch.log_softmax(scores, -1)


def _measured(head, hidden, **options):
    rank = LogprobRank(head, **options)
    for block in hidden.split(7):
        rank.update(block, torch.zeros(len(block), dtype=torch.int64))
    return rank.result()


def _values(result, column="singular_value"):
    return torch.tensor(result.table("logprob_rank_values").columns[column], dtype=torch.float64)


@settings(max_examples=50, deadline=None)
@given(
    n=st.integers(1, 20),
    v=st.integers(1, 15),
    d=st.integers(1, 6),
    biased=st.booleans(),
    scale=st.sampled_from([1.0, 0.25, 3.0]),
    offset=st.sampled_from([0.0, 1.0]),
    hidden_rank=st.integers(1, 6),
    double=st.booleans(),
)
def test_singular_values_are_those_of_the_written_out_matrix(*, n, v, d, biased, scale, offset, hidden_rank, double):
    dtype = torch.float64 if double else torch.float32
    head = LinearHead(
        (_randn(v, d) + offset).to(dtype), bias=_randn(v, seed=1).to(dtype) if biased else None, scale=scale
    )
    hidden = (_randn(n, hidden_rank, seed=2) @ _randn(hidden_rank, d, seed=3)).to(dtype)
    exact = _matrix(head, hidden)
    values = torch.linalg.svdvals(exact)
    # The log-sum-exp is rounded to the dtype at the size of the products that make up a score: one error a token, times
    # sqrt(V) in the matrix.
    terms = scale * (hidden.abs() @ head.weight.abs().T).max()
    size = max(float(exact.abs().max()), float(terms), 1.0)
    allowed = (1e-13 if double else 3e-7) * size * math.sqrt(n * v)
    result = _measured(head, hidden)
    found = _values(result)
    torch.testing.assert_close(
        found,
        torch.nn.functional.pad(values, (0, max(0, len(found) - len(values))))[: len(found)],
        rtol=0,
        atol=allowed,
    )
    centred = torch.linalg.svdvals(exact - exact.mean(1, keepdim=True))
    torch.testing.assert_close(
        _values(result, "row_centred"),
        torch.nn.functional.pad(centred, (0, len(found)))[: len(found)],
        rtol=0,
        atol=allowed,
    )
    assert float(values[len(found) :].sum()) <= 20 * allowed  # what the table leaves out is nothing


@pytest.mark.parametrize("scale", [1.0, 0.125])
@pytest.mark.parametrize("offset", [0.0, 5.0])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_bound_is_attained_width_plus_one_and_one_more_for_a_bias(dtype, biased, offset, scale):
    v, d, n = 80, 6, 50
    head = LinearHead(
        (_randn(v, d) + offset).to(dtype), bias=_randn(v, seed=1).to(dtype) if biased else None, scale=scale
    )
    result = _measured(head, _randn(n, d, seed=2).to(dtype))
    assert result.values["bound"] == d + 1 + biased
    assert result.values["rank"] == d + 1 + biased
    assert result.values["rank_is"] == "exact"
    assert result.values["limit"] == n
    assert result.values["centred"]["rank"] == d + biased
    assert result.values["smallest_above_tolerance"] > 100 * result.values["tolerance"]


@pytest.mark.parametrize(
    ("n", "v", "d", "expected"),
    [(3, 40, 6, 3), (40, 5, 6, 5), (6, 40, 6, 6), (7, 40, 6, 7), (1, 9, 2, 1), (9, 2, 2, 2)],
)
def test_fewer_contexts_or_tokens_than_the_bound_limit_the_rank(n, v, d, expected):
    result = _measured(LinearHead(_randn(v, d)), _randn(n, d, seed=1))
    assert result.values["rank"] == expected
    assert result.values["limit"] == min(n, v)
    assert len(result.table("logprob_rank_values")) == min(n, v, d + 2)


def test_hidden_states_in_a_plane_give_rank_three():
    hidden = _randn(30, 2, seed=1) @ _randn(2, 8, seed=2)
    assert _measured(LinearHead(_randn(50, 8)), hidden).values["rank"] == 3
    assert _measured(LinearHead(_randn(50, 8), bias=_randn(50, seed=3)), hidden).values["rank"] == 4


def test_a_factorised_head_has_the_rank_of_its_factors_and_one():
    weight = _randn(50, 3) @ _randn(3, 8, seed=1)
    assert _measured(LinearHead(weight), _randn(30, 8, seed=2)).values["rank"] == 4


def test_a_bias_inside_the_column_space_adds_no_rank():
    weight = _randn(50, 4)
    inside = weight @ _randn(4, seed=1) + 2.0
    assert _measured(LinearHead(weight, bias=inside), _randn(30, 4, seed=2)).values["rank"] == 5
    constant = torch.full((50,), 3.0, dtype=torch.float64)
    assert _measured(LinearHead(weight, bias=constant), _randn(30, 4, seed=2)).values["rank"] == 5


def test_the_bias_takes_part_in_float64():
    # Its mean and outer part go through a float64 factor: no float32 constant on the way.
    head = LinearHead(_randn(40, 3), bias=_randn(40, seed=1) * 1e3 + 1e3)
    hidden = _randn(25, 3, seed=2)
    values = torch.linalg.svdvals(_matrix(head, hidden))
    found = _values(_measured(head, hidden))
    torch.testing.assert_close(found, values[: len(found)], rtol=0, atol=1e-12 * float(values[0]))


@pytest.mark.parametrize(("dtype", "floor"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("offset", [0.0, 3.0])
def test_the_scores_of_a_linear_head_lie_in_its_span(dtype, floor, biased, offset):
    head = LinearHead(
        (_randn(300, 16) + offset).to(dtype), bias=10 * _randn(300, seed=1).to(dtype) if biased else None, scale=0.5
    )
    residual = _measured(head, _randn(40, 16, seed=2).to(dtype)).values["residual"]
    assert residual < floor
    if dtype == torch.float32:
        assert residual > 1e-9  # it is measured on the scores, not zero by construction


def test_scores_bent_by_a_soft_cap_leave_the_span_by_what_the_written_out_matrix_says():
    head = LinearHead(_randn(200, 8).float(), bias=_randn(200, seed=1).float(), softcap=3.0)
    hidden = _randn(30, 8, seed=2).float()
    weight, bias = head.weight.double(), head.bias.double()
    scores = 3 * torch.tanh((hidden.double() @ weight.T + bias) / 3)
    span = torch.cat([weight, bias[:, None], torch.ones(200, 1, dtype=torch.float64)], dim=1)
    basis = torch.linalg.qr(span).Q
    centred = scores - scores.mean(1, keepdim=True)
    expected = float((centred - centred @ basis @ basis.T).norm() / centred.norm())
    result = _measured(head, hidden)
    assert expected > 0.05
    assert result.values["residual"] == pytest.approx(expected, rel=1e-5)
    assert result.values["residual_tokens"] == 30
    # Sampled: the same on the rows that are taken, whose index counts from 0 in each block of seven.
    taken = [i for i in range(30) if (i % 7) % 3 == 0]
    rest = (centred - centred @ basis @ basis.T)[taken]
    sampled = _measured(head, hidden, every=3).values
    assert sampled["residual_tokens"] == len(taken)
    assert sampled["residual"] == pytest.approx(float(rest.norm() / centred[taken].norm()), rel=1e-5)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 30), v=st.integers(2, 60), d=st.integers(1, 5), seed=st.integers(0, 5), double=st.booleans())
def test_a_sketch_never_claims_more_rank_than_there_is(n, v, d, seed, double):
    # Few distinct contexts: the true rank is known and below what the sketch could hold.
    dtype = torch.float64 if double else torch.float32
    head = LinearHead(_randn(v, d, seed=seed).to(dtype), softcap=1.5)
    distinct = _randn(max(1, n // 3), d, seed=seed + 1).to(dtype)
    hidden = distinct[torch.arange(n) % len(distinct)]
    result = _measured(head, hidden, seed=seed)
    truth = int(torch.linalg.matrix_rank(_matrix(head, hidden), rtol=1e-13))
    assert result.values["rank"] <= truth <= len(distinct)
    assert result.values["bound"] is None
    assert result.values["rank_is"] == "lower bound from a random sketch"
    assert result.values["rank"] <= result.values["limit"] <= min(n, v, 2 * (d + 2))
    assert result.values["centred"] is None


@pytest.mark.parametrize(("n", "v"), [(600, 5000), (40, 5000)])
def test_float32_rounding_is_no_rank_in_the_sketch(n, v):
    distinct = _randn(5, 8, seed=1).float()
    head = LinearHead(_randn(v, 8).float(), softcap=4.0)
    result = _measured(head, distinct[torch.arange(n) % 5])
    assert result.values["rank"] == 5


def test_a_soft_cap_lifts_the_rank_above_the_linear_bound():
    head = LinearHead(_randn(300, 4), softcap=1.0)
    result = _measured(head, _randn(200, 4, seed=1))
    assert result.values["rank"] == result.values["limit"] == 12  # the sketch's width, above D + 1 = 5
    assert _measured(LinearHead(_randn(300, 4)), _randn(200, 4, seed=1)).values["rank"] == 5


def test_ranks_at_levels_and_effective_ranks_are_of_the_same_spectrum():
    head = LinearHead(_randn(60, 5), bias=_randn(60, seed=1))
    hidden = _randn(40, 5, seed=2) * torch.logspace(0, -5, 5, dtype=torch.float64)
    result = _measured(head, hidden)
    values = torch.linalg.svdvals(_matrix(head, hidden))
    for power in range(1, 9):
        expected = int((values > 10.0**-power * values[0]).sum())
        assert result.values["rank_at"][f"1e-0{power}"] == expected, power
    for name, expected in effective_ranks(values.numpy()).items():
        assert result.values[name] == pytest.approx(expected, rel=1e-6), name
    assert result.values["largest"] == pytest.approx(float(values[0]), rel=1e-12)
    relative = result.table("logprob_rank_values").columns["relative"]
    np.testing.assert_allclose(relative, (values / values[0])[: len(relative)], rtol=1e-6, atol=1e-13)


def test_the_tolerance_follows_the_precision_of_the_hidden_states():
    head = LinearHead(_randn(100, 12))
    hidden = _randn(60, 2, seed=1) @ _randn(2, 12, seed=2)
    coarse = hidden.to(torch.bfloat16).double()  # rounding fills the rank
    assert _measured(head, coarse).values["rank"] == 13
    assert _measured(head, coarse, hidden_eps=2**-7).values["rank"] == 3


def test_what_our_own_arithmetic_rounds_off_is_no_rank():
    hidden = _randn(900, 2, seed=1) @ _randn(2, 120, seed=2)
    result = _measured(LinearHead(_randn(1000, 120)), hidden, hidden_eps=2**-52)
    assert result.values["rank"] == 3


def test_masked_ids_have_no_log_probability_matrix():
    bias = torch.zeros(20, dtype=torch.float64)
    bias[3] = -math.inf
    for softcap in (None, 5.0):
        result = _measured(LinearHead(_randn(20, 3), bias=bias, softcap=softcap), _randn(9, 3, seed=1))
        assert result.values is None
        assert "-inf" in result.reason


def test_every_below_one_is_an_error():
    with pytest.raises(ValueError, match="`every` must be at least 1, got 0"):
        LogprobRank(LinearHead(torch.eye(2)), every=0)


@pytest.mark.parametrize("tokens", [200, 4000])
def test_rounded_hidden_states_of_low_rank_keep_their_rank_at_any_number_of_tokens(tokens):
    # The rounding of H has the shape of H: its singular values do not fall with V.
    head = LinearHead(_randn(1500, 48).float())
    hidden = (_randn(tokens, 4, seed=1) @ _randn(4, 48, seed=2)).bfloat16().float()
    result = _measured(head, hidden, hidden_eps=2**-7)
    assert result.values["centred"]["rank"] == 4
    assert result.values["rank"] == 5
    # Taken as exact float32 numbers, the rounded states have full rank.
    assert _measured(head, hidden).values["rank"] == 49


def test_a_factorised_head_in_half_precision_gives_the_rank_of_its_factors():
    weight = (_randn(1500, 5) @ _randn(5, 40, seed=1)).bfloat16()
    head = LinearHead(weight.float(), noise_eps=2**-7)
    assert _measured(head, _randn(300, 40, seed=2).float()).values["rank"] == 6


def test_repeated_contexts_are_counted_once_and_said() -> None:
    head = LinearHead(_randn(30, 8))
    openings = _randn(5, 8, seed=1)
    hidden = openings[torch.arange(40) % 5] * (1 + 1e-7 * _randn(40, 1, seed=2))
    result = _measured(head, hidden)
    assert result.values["distinct_contexts"] == result.values["limit"] == 5
    assert result.values["tokens"] == 40
    assert result.findings[0].title.startswith("5 distinct contexts are too few for the bound")
    assert "40 contexts (5 of them distinct)" in result.findings[0].evidence


def test_states_that_differ_in_length_alone_are_distinct_contexts() -> None:
    head = LinearHead(_randn(30, 1))
    assert _measured(head, torch.tensor([[1.0], [2.0], [0.0], [2.0], [0.0]])).values["distinct_contexts"] == 3


def test_distinct_contexts_are_counted_up_to_the_bound_and_merge() -> None:
    head = LinearHead(_randn(30, 4), bias=_randn(30, seed=1))
    hidden = _randn(40, 4, seed=2)
    assert _measured(head, hidden).values["distinct_contexts"] is None
    enough, few = _measured(head, hidden[:6]), _measured(head, hidden[:5])  # the bound is 4 + 1 + 1
    assert enough.values["distinct_contexts"] == 6
    assert enough.findings[0].title.startswith("Log-probabilities use 6 of 6")
    assert few.findings[0].title.startswith("5 distinct contexts are too few for the bound: 5 of 6")
    one, other = LogprobRank(head), LogprobRank(head)
    one.update(hidden[:3], torch.zeros(3, dtype=torch.int64))
    other.update(hidden[2:5], torch.zeros(3, dtype=torch.int64))
    one.merge(other)
    assert one.result().values["distinct_contexts"] == 5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("shared", [1.0, 10.0, 1e6])
def test_states_round_a_shared_direction_are_never_fewer_than_their_rank(dtype, shared):
    hidden = (_randn(41, 40) + shared * _randn(1, 40, seed=1)).to(dtype).float()
    values = _measured(LinearHead(_randn(90, 40)), hidden, hidden_eps=torch.finfo(dtype).eps).values
    assert values["rank"] <= values["limit"]
    if shared < 1e6:
        assert values["distinct_contexts"] == 41


def test_distinct_contexts_do_not_depend_on_chunks():
    hidden = _randn(1, 6) + 2e-6 * torch.arange(40)[:, None]  # a chain: each near the next, far from the last
    head = LinearHead(_randn(30, 6))
    whole = LogprobRank(head)
    whole.update(hidden, torch.zeros(40, dtype=torch.int64))
    assert whole.result().values["distinct_contexts"] == _measured(head, hidden).values["distinct_contexts"]


def test_under_a_softcap_the_finding_says_what_limits_the_rank():
    head = LinearHead(_randn(300, 8), softcap=2.0)
    hidden = _randn(5, 8, seed=1)[torch.arange(60) % 5]
    means = _measured(head, hidden).findings[0].means
    assert means == "At most 5 could have shown, with 60 contexts (5 of them distinct) and a sketch of 20 columns."
