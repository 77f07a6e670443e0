"""UNE105: hidden states and predictions, against explicit float64 sums."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.diagnostics import LinearHead, Saturation, effective_ranks


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _measured(head, hidden, targets=None, documents=None):
    saturation = Saturation(head)
    targets = torch.zeros(len(hidden), dtype=torch.int64) if targets is None else torch.as_tensor(targets)
    saturation.update(hidden, targets, documents=documents)
    return saturation.result()


@settings(max_examples=30, deadline=None)
@given(n=st.integers(2, 9), d=st.integers(1, 5), offset=st.sampled_from([0.0, 3.0, 1e4]), seed=st.integers(0, 99))
def test_anisotropy_is_the_mean_cosine_of_all_pairs(n, d, offset, seed):
    hidden = _randn(n, d, seed=seed) + offset
    cosines = [
        float(torch.nn.functional.cosine_similarity(hidden[i], hidden[j], dim=0, eps=0))
        for i in range(n)
        for j in range(n)
        if i != j
    ]
    values = _measured(LinearHead(_randn(4, d)), hidden).values
    assert values["anisotropy"] == pytest.approx(sum(cosines) / len(cosines), abs=1e-11)


def test_anisotropy_of_directions_known_by_hand():
    head = LinearHead(torch.ones(2, 2))
    assert _measured(head, torch.tensor([[1.0, 0], [0, 5.0]])).values["anisotropy"] == pytest.approx(0)
    assert _measured(head, torch.tensor([[1.0, 1.0], [7.0, 7.0]])).values["anisotropy"] == pytest.approx(1)
    assert _measured(head, torch.tensor([[1.0, 0], [-2.0, 0]])).values["anisotropy"] == pytest.approx(-1)
    assert _measured(head, torch.tensor([[1.0, 0]])).values["anisotropy"] is None


def test_hidden_states_of_zero_have_no_direction_and_count_as_cosine_zero():
    head = LinearHead(torch.ones(2, 2))
    values = _measured(head, torch.tensor([[1.0, 0], [1.0, 0], [0.0, 0.0]])).values
    assert values["anisotropy"] == pytest.approx(1 / 3)
    assert _measured(head, torch.zeros(3, 2)).values["anisotropy"] == pytest.approx(0)


def test_even_directions_stay_within_a_few_standard_deviations_of_the_null():
    values = _measured(LinearHead(torch.ones(2, 30)), _randn(400, 30)).values
    assert values["anisotropy_null"] == 0
    assert abs(values["anisotropy"]) < 4 * values["anisotropy_null_sd"]
    assert values["anisotropy_null_sd"] == pytest.approx(math.sqrt(2 / (400 * 399 * 30)))
    spread = [_measured(LinearHead(torch.ones(2, 6)), _randn(12, 6, seed=s)).values["anisotropy"] for s in range(300)]
    assert np.std(spread) == pytest.approx(math.sqrt(2 / (12 * 11 * 6)), rel=0.2)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("softcap", [None, 3.0])
def test_loss_entropy_top_probability_and_accuracy(dtype, softcap):
    head = LinearHead(_randn(40, 6, dtype=dtype), bias=_randn(40, seed=1, dtype=dtype), softcap=softcap, scale=0.5)
    hidden, targets = 3 * _randn(30, 6, seed=2, dtype=dtype), torch.arange(30)
    scores = 0.5 * torch.nn.functional.linear(hidden.double(), head.weight.double(), head.bias.double())
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    log_p = torch.log_softmax(scores, -1)
    values = _measured(head, hidden, targets).values
    close = {"rel": 1e-10 if dtype == torch.float64 else 1e-5}
    assert values["loss"]["mean"] == pytest.approx(float(torch.nn.functional.cross_entropy(scores, targets)), **close)
    assert values["entropy"]["mean"] == pytest.approx(float(-(log_p.exp() * log_p).sum(-1).mean()), **close)
    assert values["top_probability"]["mean"] == pytest.approx(float(log_p.exp().amax(-1).mean()), **close)
    assert values["accuracy"]["mean"] == float((scores.argmax(-1) == targets).double().mean())
    assert values["entropy_uniform"] == math.log(40)
    assert values["padding_probability"] is None
    norms = hidden.double().norm(dim=1)
    assert values["hidden_norm"]["mean"] == pytest.approx(float(norms.mean()), rel=1e-12)
    assert values["hidden_norm"]["sd"] == pytest.approx(float(norms.std(correction=0)), rel=1e-9)


def test_ranks_of_hidden_states_are_those_of_their_singular_values():
    hidden = _randn(50, 6) * torch.tensor([5.0, 4, 3, 2, 1, 0.5]).double() + 7
    values = _measured(LinearHead(_randn(4, 6)), hidden).values
    for name, matrix in (("hidden_ranks", hidden), ("hidden_ranks_centred", hidden - hidden.mean(0))):
        for key, expected in effective_ranks(torch.linalg.svdvals(matrix).numpy()).items():
            assert values[name][key] == pytest.approx(expected, rel=1e-6), (name, key)


def test_masked_ids_count_nothing_in_entropy_and_loss():
    bias = torch.tensor([0.0, -math.inf, 0.0, -math.inf])
    values = _measured(LinearHead(torch.zeros(4, 2), bias=bias), torch.ones(3, 2), [0, 2, 2]).values
    assert values["entropy"]["mean"] == pytest.approx(math.log(2), rel=1e-6)
    assert values["loss"]["mean"] == pytest.approx(math.log(2), rel=1e-6)
    assert values["top_probability"]["mean"] == pytest.approx(0.5)


def test_a_masked_target_makes_the_loss_infinite_and_nothing_else():
    head = LinearHead(torch.eye(3), bias=torch.tensor([0.0, -math.inf, 0.0]))
    result = _measured(head, _randn(12, 3, dtype=torch.float32), torch.arange(12) % 3, torch.arange(12))
    assert result.values["loss"] == {"mean": math.inf, "ci95": None}
    for name in ("entropy", "top_probability", "accuracy"):
        assert math.isfinite(result.values[name]["mean"])
        assert all(math.isfinite(end) for end in result.values[name]["ci95"])


def test_nearly_certain_predictions_have_a_small_positive_entropy():
    gap = 12.0
    values = _measured(LinearHead(torch.eye(2)), torch.tensor([[gap, 0.0]])).values
    p = 1 / (1 + math.exp(-gap))
    exact = -(p * math.log(p) + (1 - p) * math.log(1 - p))
    assert values["entropy"]["mean"] == pytest.approx(exact, rel=1e-2)
    certain = _measured(LinearHead(torch.eye(2)), torch.tensor([[500.0, 0.0]])).values
    assert certain["entropy"]["mean"] == 0


def test_histograms_hold_every_prediction_once_and_in_its_bin():
    v = 32
    head = LinearHead(torch.eye(v))
    hidden = torch.zeros(5, v)
    hidden[1, 3] = 1e4  # certain
    hidden[2, :16] = 50.0  # sixteen equal: log 16 of log 32
    hidden[3, 0] = 1e-9  # norm below the table's range
    hidden[4, 0] = 1e9  # and above
    result = _measured(head, hidden)
    entropy = result.table("saturation_entropy").columns
    assert entropy["tokens"].sum() == 5
    assert entropy["from"][0] == 0
    assert entropy["to"][-1] == math.log(v)
    assert entropy["tokens"][-1] == 2  # uniform
    assert entropy["tokens"][0] == 2  # certain
    (middle,) = np.flatnonzero((entropy["from"] <= math.log(16)) & (math.log(16) <= entropy["to"] + 1e-6))[:1]
    assert entropy["tokens"][middle - 1 : middle + 2].sum() == 1
    norms = result.table("saturation_norms").columns
    assert norms["tokens"].sum() == 5
    assert norms["tokens"][0] == 2  # 0 and 1e-9
    assert norms["tokens"][-1] == 1
    np.testing.assert_allclose(norms["to"][:-1], norms["from"][1:])
    (place,) = np.flatnonzero((norms["from"] <= 200) & (norms["to"] > 200))  # norm of sixteen fifties
    assert norms["tokens"][place] == 1


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_padding_probability_is_that_of_the_full_softmax(dtype):
    weight, bias = _randn(20, 4, dtype=dtype), _randn(20, seed=1, dtype=dtype)
    head = LinearHead(weight[:17], bias=bias[:17], softcap=5.0, scale=0.5, extra_rows=weight[17:], extra_bias=bias[17:])
    hidden, targets = _randn(9, 4, seed=2, dtype=dtype), torch.arange(9)
    scores = 5 * torch.tanh(0.5 * torch.nn.functional.linear(hidden.double(), weight.double(), bias.double()) / 5)
    expected = float(torch.softmax(scores, -1)[:, 17:].sum(-1).mean())
    result = _measured(head, hidden, targets)
    assert result.values["padding_probability"] == pytest.approx(expected, rel=1e-5)
    assert [finding.title for finding in result.findings if finding.severity == "warning"] == [
        "Padding rows draw probability"
    ]
    # The loss is over the real rows only.
    real = float(torch.nn.functional.cross_entropy(scores[:, :17], targets))
    assert result.values["loss"]["mean"] == pytest.approx(real, rel=1e-5)


def test_zero_padding_rows_that_would_win_are_left_out_of_the_argmax():  # mirage#751
    weight = torch.tensor([[-1.0, 0], [-2, 0], [-3, 0], [-4, 0], [-5, 0]])
    head = LinearHead(weight, extra_rows=torch.zeros(3, 2))
    values = _measured(head, torch.tensor([[10.0, 0.0]]), [0]).values
    assert values["accuracy"]["mean"] == 1
    assert values["loss"]["mean"] == pytest.approx(math.log1p(math.exp(-10) + math.exp(-20)), rel=1e-4)
    assert values["padding_probability"] == pytest.approx(1, rel=1e-4)  # three scores of 0 against one of -10


def test_ties_are_right_for_the_lowest_id_only():
    head = LinearHead(torch.zeros(3, 2))
    assert _measured(head, torch.ones(3, 2), [0, 1, 2]).values["accuracy"]["mean"] == pytest.approx(1 / 3)


def test_bits_per_byte():
    head = LinearHead(torch.zeros(8, 2))
    saturation, other = Saturation(head), Saturation(head)
    for part in (saturation, other):
        part.update(torch.ones(5, 2), torch.arange(5))
    assert saturation.result().values["bits_per_byte"] is None
    saturation.add_bytes(12)
    other.add_bytes(8)
    saturation.merge(other)
    assert saturation.result().values["bits_per_byte"] == pytest.approx(10 * 3 / 20, rel=1e-6)  # 3 bits a token


def test_intervals_are_over_documents():
    head = LinearHead(_randn(9, 3))
    hidden, targets = _randn(60, 3, seed=1), torch.arange(60) % 9
    few = _measured(head, hidden, targets, torch.arange(60) % 4).values
    assert few["loss"]["ci95"] is None
    many = _measured(head, hidden, targets, torch.arange(60) % 20).values
    for name in ("loss", "entropy", "top_probability"):
        low, high = many[name]["ci95"]
        assert low < many[name]["mean"] < high
