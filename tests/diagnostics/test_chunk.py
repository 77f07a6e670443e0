"""Chunks of predictions: probabilities to full relative precision, and what may go into one."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.diagnostics import Chunk, LinearHead, chunks, full_precision


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _whole(head, hidden, targets):
    (chunk,) = chunks(head, hidden, torch.as_tensor(targets))
    return chunk


def _scored(scores, targets):
    """A chunk with these scores, exactly: identity weight."""
    scores = torch.as_tensor(scores)
    return _whole(LinearHead(torch.eye(scores.shape[1], dtype=scores.dtype)), scores, targets)


def _softmax64(head, hidden):
    bias = None if head.bias is None else head.bias.double()
    scores = torch.nn.functional.linear(hidden.double(), head.weight.double(), bias) * head.scale
    if head.softcap is not None:
        scores = head.softcap * torch.tanh(scores / head.softcap)
    return torch.softmax(scores, -1), torch.log_softmax(scores, -1)


@settings(max_examples=40, deadline=None)
@given(
    n=st.integers(1, 6),
    d=st.integers(1, 5),
    v=st.integers(1, 11),
    biased=st.booleans(),
    softcap=st.sampled_from([None, 2.0]),
    scale=st.sampled_from([1.0, 0.25, 8.0]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
)
def test_probabilities_and_loss_are_those_of_a_float64_softmax(*, n, d, v, biased, softcap, scale, dtype):
    head = LinearHead(
        _randn(v, d, dtype=dtype), bias=_randn(v, seed=1, dtype=dtype) if biased else None, softcap=softcap, scale=scale
    )
    hidden, targets = _randn(n, d, seed=2, dtype=dtype), torch.arange(n) % v
    probability, log_probability = _softmax64(head, hidden)
    chunk = _whole(head, hidden, targets)
    assert chunk.scores.dtype == torch.promote_types(dtype, torch.float32)
    tight = {"rtol": 1e-11, "atol": 1e-12} if dtype == torch.float64 else {"rtol": 3e-5, "atol": 1e-6}
    own = probability.gather(1, targets[:, None]).squeeze(1)
    off = probability.scatter(1, targets[:, None], 0)
    torch.testing.assert_close(chunk.target_probability.double(), own, **tight)
    torch.testing.assert_close((chunk.unnormalised / chunk.total[:, None]).double(), off, **tight)
    torch.testing.assert_close(chunk.missing.double(), off.sum(-1), **tight)
    torch.testing.assert_close(chunk.nll.double(), -log_probability.gather(1, targets[:, None]).squeeze(1), **tight)


@pytest.mark.parametrize("gap", [10.0, 18.9, 30.0, 60.0, 85.0])
def test_a_nearly_certain_target_keeps_its_missing_mass_and_loss(gap):
    # 18.9 nats: 1 - p_y = 6e-9, where `p_y - 1` is 0 in float32.
    chunk = _scored([[gap, 0.0], [gap, -1.0]], [0, 0])
    exact = [math.exp(-gap) / (1 + math.exp(-gap)), math.exp(-gap - 1) / (1 + math.exp(-gap - 1))]
    assert chunk.missing.tolist() == pytest.approx(exact, rel=1e-5)
    assert chunk.nll.tolist() == pytest.approx([math.log1p(math.exp(-gap)), math.log1p(math.exp(-gap - 1))], rel=1e-5)
    assert chunk.nll.min() > 0


def test_a_hopeless_target_keeps_its_loss():
    chunk = _scored([[0.0, 200.0]], [0])
    assert chunk.nll.tolist() == [200.0]
    assert chunk.target_probability.tolist() == [0.0]
    assert chunk.missing.tolist() == [1.0]


def test_tied_scores_share_the_probability():
    chunk = _scored([[3.0, 3.0, 3.0, 3.0]], [2])
    assert chunk.missing.tolist() == [0.75]
    assert chunk.nll.tolist() == pytest.approx([math.log(4)], rel=1e-6)


@pytest.mark.parametrize("offset", [1e8, -1e8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_adding_a_hundred_million_to_every_score_changes_nothing(offset, dtype):
    # Scores that are whole multiples of 8 stay exact beside 1e8, also in float32.
    hidden = torch.tensor([[8.0, 0.0, 16.0], [0.0, 24.0, -8.0]], dtype=dtype)
    plain = LinearHead(torch.eye(3, dtype=dtype))
    shifted = LinearHead(torch.eye(3, dtype=dtype), bias=torch.full((3,), offset, dtype=dtype))
    one, other = _whole(plain, hidden, [1, 1]), _whole(shifted, hidden, [1, 1])
    for name in ("nll", "missing", "target_probability", "total", "unnormalised"):
        torch.testing.assert_close(getattr(other, name), getattr(one, name), rtol=0, atol=0)


def test_a_masked_id_has_probability_zero_and_disturbs_nothing():
    bias = torch.tensor([0.0, -math.inf, 0.5, 0.0])
    head = LinearHead(_randn(4, 3, dtype=torch.float32), bias=bias)
    hidden = _randn(5, 3, seed=1, dtype=torch.float32)
    keep = torch.tensor([0, 2, 3])
    small = LinearHead(head.weight[keep], bias=bias[keep])
    chunk, expected = _whole(head, hidden, [0, 2, 3, 0, 2]), _whole(small, hidden, [0, 1, 2, 0, 1])
    torch.testing.assert_close(chunk.nll, expected.nll)
    torch.testing.assert_close(chunk.missing, expected.missing)
    assert chunk.unnormalised[:, 1].tolist() == [0.0] * 5


def test_a_masked_target_has_infinite_loss_and_poisons_no_other_row():
    head = LinearHead(torch.eye(3), bias=torch.tensor([0.0, -math.inf, 0.0]))
    hidden = torch.tensor([[1.0, 0.0, 0.0], [0.0, 5.0, 2.0], [3.0, 0.0, 0.0]])
    chunk = _whole(head, hidden, [0, 1, 2])
    assert chunk.nll[1] == math.inf
    assert chunk.missing[1] == 1
    assert chunk.target_probability[1] == 0
    clean = _whole(head, hidden[[0, 2]], [0, 2])
    torch.testing.assert_close(chunk.nll[[0, 2]], clean.nll, rtol=0, atol=0)
    assert bool(torch.isfinite(chunk.unnormalised).all())


def test_ignored_targets_are_dropped_with_their_documents_and_index():
    head = LinearHead(torch.eye(2))
    hidden = torch.arange(10.0).reshape(5, 2)
    targets = torch.tensor([-100, 1, -100, 0, 1])
    chunk = next(chunks(head, hidden, targets, documents=torch.tensor([9, 8, 7, 6, 5]), index=torch.arange(20, 25)))
    assert chunk.targets.tolist() == [1, 0, 1]
    assert chunk.documents.tolist() == [8, 6, 5]
    assert chunk.index.tolist() == [21, 23, 24]
    assert chunk.hidden.tolist() == hidden[[1, 3, 4]].tolist()
    assert list(chunks(head, hidden, torch.full((5,), -100))) == []
    assert list(chunks(head, hidden[:0], targets[:0])) == []
    (other,) = chunks(head, hidden, torch.tensor([0, 1, 0, 0, 0]), ignore_index=0)
    assert other.index.tolist() == [1]


@pytest.mark.parametrize("wrong", [3, -1, -99])
def test_a_target_that_is_no_row_is_an_error_that_names_it(wrong):
    with pytest.raises(
        ValueError, match=rf"`targets` must be -100 or lie in \[0, 3\), got {wrong}: does the tokenizer"
    ):
        list(chunks(LinearHead(torch.eye(3)), torch.zeros(2, 3), torch.tensor([0, wrong])))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize(
    ("hidden", "targets"), [((2, 2, 3), (2,)), ((2, 4), (2,)), ((2, 3), (3,)), ((2, 3), (2, 1)), ((3,), (1,))]
)
def test_shapes_that_do_not_fit_are_an_error_that_shows_them(hidden, targets):
    with pytest.raises(ValueError, match=r"Expected `hidden` \[n, 3\] and `targets` \[n\], got \("):
        list(chunks(LinearHead(torch.eye(3)), torch.zeros(hidden), torch.zeros(targets, dtype=torch.int64)))


@pytest.mark.usefixtures("unchecked_shapes")
@pytest.mark.parametrize("name", ["documents", "index"])
def test_one_document_and_index_a_prediction(name):
    with pytest.raises(ValueError, match=rf"`{name}`"):
        list(chunks(LinearHead(torch.eye(3)), torch.zeros(2, 3), torch.tensor([0, 1]), **{name: torch.arange(3)}))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_hidden_states_that_are_no_numbers_are_an_error_that_counts_them(bad):
    hidden = torch.zeros(4, 3)
    hidden[1, 2] = hidden[3, 0] = bad
    with pytest.raises(ValueError, match=r"NaN or infinity in 2 of 4"):
        list(chunks(LinearHead(torch.eye(3)), hidden, torch.zeros(4, dtype=torch.int64)))
    hidden[3, 0] = 0  # where nothing is predicted, as behind padding, nothing is read
    (chunk,) = chunks(LinearHead(torch.eye(3)), hidden, torch.tensor([0, -100, 1, 2]))
    assert bool(torch.isfinite(chunk.nll).all())


@settings(max_examples=20, deadline=None)
@given(n=st.integers(1, 9), rows=st.integers(1, 10), seed=st.integers(0, 9))
def test_the_size_of_a_chunk_changes_no_value(n, rows, seed):
    head = LinearHead(_randn(7, 3, seed=seed), bias=_randn(7, seed=seed + 1))
    hidden, targets = _randn(n, 3, seed=seed + 2), torch.arange(n) % 7
    whole = _whole(head, hidden, targets)
    parts = list(chunks(head, hidden, targets, rows=rows))
    assert [len(part) for part in parts[:-1]] == [rows] * (len(parts) - 1)
    assert torch.cat([part.index for part in parts]).tolist() == list(range(n))
    for name in ("nll", "missing", "total"):
        torch.testing.assert_close(torch.cat([getattr(part, name) for part in parts]), getattr(whole, name))


def test_int32_targets_are_as_good_as_int64():
    head, hidden = LinearHead(_randn(5, 3)), _randn(2, 3, seed=1)
    narrow = _whole(head, hidden, torch.tensor([4, 0], dtype=torch.int32))
    torch.testing.assert_close(narrow.nll, _whole(head, hidden, [4, 0]).nll, rtol=0, atol=0)


def test_parameters_and_recorded_hidden_states_leave_no_graph():
    head = LinearHead(torch.nn.Parameter(_randn(5, 3)), bias=torch.nn.Parameter(_randn(5)))
    chunk = _whole(head, _randn(2, 3, seed=1).requires_grad_(), [4, 0])
    assert not chunk.nll.requires_grad
    assert not head.columns.centred.requires_grad


def test_soft_capped_scores_are_capped_once():  # Megatron-Bridge#4610: scores to 124, soft-cap 30
    head = LinearHead(torch.eye(2), softcap=30.0)
    chunk = _whole(head, torch.tensor([[124.0, 100.0]]), [1])
    capped = [30 * math.tanh(124 / 30), 30 * math.tanh(100 / 30)]
    assert chunk.scores[0].tolist() == pytest.approx(capped, abs=1e-5)
    assert chunk.uncapped.tolist() == [[124.0, 100.0]]
    assert float(chunk.nll) == pytest.approx(math.log1p(math.exp(capped[0] - capped[1])), rel=1e-5)
    assert float(chunk.nll) < 1  # 24 nats if the cap were dropped


def test_a_chunk_computes_its_scores_once():
    chunk = Chunk(LinearHead(torch.eye(2)), torch.ones(1, 2), *(torch.zeros(1, dtype=torch.int64),) * 3)
    assert chunk.scores is chunk.scores
    assert chunk.unnormalised is chunk.unnormalised


@pytest.mark.parametrize("allowed", ["old", "new"])
def test_reduced_precision_is_put_aside_and_back_however_it_was_allowed(allowed):
    backend = torch.backends.cuda.matmul
    before = backend.fp32_precision
    try:
        if allowed == "old":
            torch.set_float32_matmul_precision("high")
        else:
            backend.fp32_precision = "tf32"
        with full_precision():
            assert backend.fp32_precision == "ieee"
            assert torch.backends.mkldnn.matmul.fp32_precision == "ieee"
        assert backend.fp32_precision == "tf32"
    finally:
        torch.set_float32_matmul_precision("highest")
        backend.fp32_precision = before
