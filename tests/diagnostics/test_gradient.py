"""UNE103: kept and destroyed share of the logit gradient."""

import math

import numpy as np
import pytest
import torch

from unembed.diagnostics import Gradient, LinearHead
from unembed.diagnostics._gradient_parts import ratio_with_error


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _measured(head, hidden, targets, documents=None):
    gradient = Gradient(head)
    gradient.update(hidden, targets, documents=documents)
    return gradient.result()


def _written_out(head, hidden, targets, *, centre):
    """`G` and `G Pi` of all predictions, in float64."""
    scores = head.scale * torch.nn.functional.linear(hidden.double(), head.weight.double(), head.bias)
    capped = scores if head.softcap is None else head.softcap * torch.tanh(scores / head.softcap)
    gradient = torch.softmax(capped, -1) - torch.nn.functional.one_hot(targets, head.vocab)
    if head.softcap is not None:
        gradient = gradient * (1 - torch.tanh(scores / head.softcap) ** 2)
    weight = head.weight.double()
    basis, values, _ = torch.linalg.svd(weight - weight.mean(0) if centre else weight, full_matrices=False)
    basis = basis[:, values > 1e-9 * values[0]]
    return gradient, gradient @ basis @ basis.T, basis.shape[1]


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("rank", [6, 2])
def test_kept_destroyed_null_and_ratio_are_those_of_the_written_out_matrices(softcap, rank):
    v, d, n = 30, 6, 25
    head = LinearHead(
        _randn(v, rank) @ _randn(rank, d, seed=1) + 0.5, bias=_randn(v, seed=2), softcap=softcap, scale=0.5
    )
    hidden, targets = _randn(n, d, seed=3), torch.arange(n)
    result = _measured(head, hidden, targets)
    for name, centre in (("raw", False), ("centred", True)):
        if centre and softcap is not None:
            assert result.values["centred"] is None
            continue
        full, kept, dimension = _written_out(head, hidden, targets, centre=centre)
        numbers = result.values[name]
        expected = float(kept.norm() / full.norm())
        null = math.sqrt(dimension / (v - 1 if centre else v))
        assert numbers["rank"] == dimension
        assert numbers["kept"] == pytest.approx(expected, rel=1e-9)
        assert numbers["destroyed"] == pytest.approx(float((full - kept).norm() / full.norm()), rel=1e-9)
        assert numbers["kept_null"] == pytest.approx(null, rel=1e-12)
        assert numbers["ratio"] == pytest.approx(expected / null, rel=1e-9)
        # Eq. 10 calls the cosine of G and its kept part `kept` too.
        cosine = float((full * kept).sum() / (full.norm() * kept.norm()))
        assert numbers["kept"] == pytest.approx(cosine, rel=1e-9)
    assert result.values["tokens"] == n
    assert result.values["mean_squared_norm"] == pytest.approx(float(full.square().sum()) / n, rel=1e-9)
    assert result.values["before_softcap"] == (softcap is not None)


def test_a_head_that_spans_everything_destroys_nothing():
    result = _measured(LinearHead(_randn(4, 7)), _randn(9, 7, seed=1), torch.arange(9) % 4)
    for name in ("raw", "centred"):
        assert result.values[name]["kept"] == pytest.approx(1, rel=1e-12)
        assert result.values[name]["destroyed"] < 1e-5
        assert result.values[name]["ratio"] == pytest.approx(1, rel=1e-12)
    assert result.values["centred"]["rank"] == 3


def test_constant_rows_pass_nothing_and_have_no_ratio():
    result = _measured(LinearHead(torch.ones(5, 3)), _randn(4, 3, dtype=torch.float32), torch.arange(4))
    centred = result.values["centred"]
    assert (centred["rank"], centred["kept"], centred["destroyed"], centred["kept_null"]) == (0, 0, 1, 0)
    assert centred["ratio"] is None
    assert result.values["raw"]["kept"] == pytest.approx(0, abs=1e-6)  # G sums to zero, so it is orthogonal to 1
    assert "None" not in result.findings[0].title + result.findings[0].evidence


def test_no_prediction_and_no_gradient_say_so():
    head = LinearHead(_randn(5, 3))
    assert Gradient(head).result().values is None
    assert Gradient(head).result().reason
    assert _measured(head, _randn(2, 3), torch.full((2,), -100)).values is None
    assert _measured(LinearHead(_randn(1, 3)), _randn(2, 3), torch.zeros(2, dtype=torch.int64)).values is None


def test_a_constant_added_to_the_scores_leaves_the_centred_numbers():  # TransformerLens#693
    weight, hidden, targets = _randn(40, 5), _randn(60, 5, seed=1), torch.arange(60) % 40
    documents = torch.arange(60) // 6
    plain = _measured(LinearHead(weight), hidden, targets, documents)
    shifted = _measured(LinearHead(weight + 2 * _randn(5, seed=2)), hidden, targets, documents)
    for key in ("rank", "kept", "destroyed", "kept_null", "ratio", "ratio_ci95"):
        assert shifted.values["centred"][key] == pytest.approx(plain.values["centred"][key], rel=1e-9), key
    for key in ("kept", "kept_low", "kept_high", "ratio", "kept_if_one_hot"):
        one, other = (result.table("gradient_bands").columns[key] for result in (plain, shifted))
        np.testing.assert_allclose(other, one, rtol=1e-8)
    assert abs(shifted.values["raw"]["kept"] / plain.values["raw"]["kept"] - 1) > 1e-3


def test_the_order_of_the_text_changes_nothing():
    head = LinearHead(_randn(20, 4))
    hidden, targets, documents = _randn(50, 4, seed=1), torch.arange(50) % 20, torch.arange(50) // 5
    order = torch.randperm(50, generator=torch.Generator().manual_seed(1))
    one = _measured(head, hidden, targets, documents)
    other = _measured(head, hidden[order], targets[order], documents[order])
    for name in ("raw", "centred"):
        for key, value in one.values[name].items():
            assert other.values[name][key] == pytest.approx(value, rel=1e-10), key


def test_the_interval_is_over_documents_and_needs_eight():
    head = LinearHead(_randn(20, 4))
    hidden, targets = _randn(48, 4, seed=1), torch.arange(48) % 20
    few = _measured(head, hidden, targets, torch.arange(48) % 7)
    assert few.values["raw"]["ratio_ci95"] is few.values["centred"]["ratio_ci95"] is None
    assert few.values["interval"] == "none: 7 documents, at least 8 are needed (a line of a .jsonl file is one)"
    assert "interval" not in few.findings[0].evidence
    many = _measured(head, hidden, targets, torch.arange(48) % 12)
    assert many.values["documents"] == 12
    for name in ("raw", "centred"):
        low, high = many.values[name]["ratio_ci95"]
        assert low < many.values[name]["ratio"] < high
    # Copies of one document are one document's worth of evidence: no width.
    copies = _measured(head, hidden[:6].repeat(8, 1), targets[:6].repeat(8), torch.arange(48) // 6)
    low, high = copies.values["centred"]["ratio_ci95"]
    assert high - low < 1e-12


def test_the_finding_warns_only_where_the_whole_interval_is_below_the_null():
    # Targets in rows of small norm have little leverage: the head keeps less than a random subspace.
    weight = _randn(60, 3)
    weight[:40] *= 0.01
    hidden = 0.01 * _randn(80, 3, seed=1)
    below = _measured(LinearHead(weight), hidden, torch.arange(80) % 40, torch.arange(80) // 8)
    assert below.values["centred"]["ratio_ci95"][1] < 1
    assert below.findings[0].severity == "warning"
    above = _measured(LinearHead(weight), hidden, 40 + torch.arange(80) % 20, torch.arange(80) // 8)
    assert above.values["centred"]["ratio"] > 1
    assert above.findings[0].severity == "info"


def test_bands_cover_every_token_once_and_hold_their_own_kept_share():
    v, d = 50, 4
    head = LinearHead(_randn(v, d))
    targets = torch.cat([torch.arange(5), torch.full((3,), 5), torch.full((12,), 6), torch.full((40,), 7)])
    hidden = _randn(len(targets), d, seed=1)
    result = _measured(head, hidden, targets)
    bands = result.table("gradient_bands").columns
    assert bands["occurrences_from"].tolist() == [1, 2, 10, 30]
    assert bands["occurrences_to"].tolist() == [1, 3, 29, 99]
    assert bands["types"].tolist() == [5, 1, 1, 1]
    assert bands["tokens"].tolist() == [5, 3, 12, 40]
    full, kept, _ = _written_out(head, hidden, targets, centre=True)
    members = [targets < 5, targets == 5, targets == 6, targets == 7]
    expected = [float(kept[m].norm() / full[m].norm()) for m in members]
    np.testing.assert_allclose(bands["kept"], expected, rtol=1e-9)
    np.testing.assert_allclose(bands["ratio"], np.array(expected) / math.sqrt(d / (v - 1)), rtol=1e-9)
    assert (bands["kept_low"] <= bands["kept"]).all()
    assert (bands["kept"] <= bands["kept_high"]).all()
    assert (bands["kept_high"] - bands["kept_low"] < 0.5).all()
    weight = head.weight - head.weight.mean(0)
    leverage = (weight @ torch.linalg.pinv(weight)).diagonal()
    by_band = [math.sqrt(float(leverage[targets[m]].mean())) for m in members]
    np.testing.assert_allclose(bands["kept_if_one_hot"], by_band, rtol=1e-9)


def test_the_last_band_has_no_upper_end():
    head = LinearHead(_randn(3, 2))
    bands = _measured(head, _randn(1500, 2, seed=1), torch.zeros(1500, dtype=torch.int64)).table("gradient_bands")
    assert bands.columns["occurrences_from"].tolist() == [1000]
    assert bands.columns["occurrences_to"].tolist() == [-1]


def test_a_uniform_error_has_the_kept_share_that_the_band_predicts_for_one_hot_errors():
    # At uniform predictions G is -e_y with its mean taken out: exactly the leverage of the target's row.
    head = LinearHead(_randn(40, 5))
    targets = torch.arange(10)
    bands = _measured(head, torch.zeros(10, 5, dtype=torch.float64), targets).table("gradient_bands").columns
    shrunk = bands["kept_if_one_hot"] / math.sqrt(1 - 1 / 40)
    np.testing.assert_allclose(bands["kept"], shrunk, rtol=1e-9)


def test_the_error_of_a_band_is_the_spread_over_repeated_texts():
    rng = np.random.default_rng(3)
    n, texts = 150, 1500
    full = rng.gamma(2, 1, size=(texts, n))
    kept = full * rng.beta(2, 6, size=(texts, n)) + 0.05 * rng.gamma(1, 1, size=(texts, n))
    sums = np.stack([np.full(texts, n), full.sum(1), kept.sum(1), kept.sum(1)], axis=1)
    squares = [(full**2).sum(1), (full * kept).sum(1), (full * kept).sum(1), (kept**2).sum(1), (kept**2).sum(1)]
    rows = torch.tensor(np.concatenate([sums, np.stack(squares, axis=1)], axis=1))
    for column in (2, 3):
        shares, errors = zip(*(ratio_with_error(row, column) for row in rows), strict=True)
        assert np.mean(errors) == pytest.approx(np.std(shares), rel=0.08)


def test_float32_and_float64_measure_the_same_shares():
    v, d, n = 5003, 64, 40
    scales = torch.logspace(0, -4, d, dtype=torch.float64)
    weight = ((_randn(v, d) * scales) @ torch.linalg.qr(_randn(d, d, seed=1)).Q + 0.1).float()
    hidden, targets = 8 * _randn(n, d, seed=2).float(), torch.arange(n) * 97
    narrow = _measured(LinearHead(weight), hidden, targets)
    wide = _measured(LinearHead(weight.double(), noise_eps=2**-23), hidden.double(), targets)
    for name in ("raw", "centred"):
        assert narrow.values[name]["rank"] == wide.values[name]["rank"] == d
        assert narrow.values[name]["kept"] == pytest.approx(wide.values[name]["kept"], rel=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_half_precision_head_measures_as_its_float64_copy(dtype):
    weight, hidden, targets = _randn(200, 16, dtype=dtype), _randn(20, 16, seed=1, dtype=dtype), torch.arange(20)
    narrow = _measured(LinearHead(weight), hidden, targets)
    wide = _measured(LinearHead(weight.double()), hidden.double(), targets)
    for name in ("raw", "centred"):
        assert narrow.values[name]["kept"] == pytest.approx(wide.values[name]["kept"], rel=1e-5)


def test_a_head_with_masked_ids_is_refused_rather_than_given_a_wrong_null():
    bias = torch.zeros(20)
    bias[5:] = -math.inf
    result = _measured(LinearHead(_randn(20, 4).float(), bias=bias), _randn(6, 4).float(), torch.arange(6) % 5)
    assert result.values is None
    assert "leave their rows out" in result.reason


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("concentrated", [False, True])
def test_the_spread_of_the_null_is_that_of_random_heads(centre, concentrated):
    """The same gradients through many random subspaces; the fewer directions they go in, the more the ratio spreads."""
    v, d, n = 60, 8, 50
    hidden = _randn(n, d, seed=3) * 0.1
    targets = torch.arange(n) % (2 if concentrated else n)
    name = "centred" if centre else "raw"
    result = _measured(LinearHead(_randn(v, d) * 0.01), hidden, targets)
    expected = result.values[name]["ratio_null_sd"]
    full = torch.softmax(hidden @ (_randn(v, d) * 0.01).T, -1) - torch.nn.functional.one_hot(targets, v)
    ratios = []
    for seed in range(600):
        columns = _randn(v, d, seed=100 + seed)
        basis = torch.linalg.qr(columns - columns.mean(0) if centre else columns).Q
        null = math.sqrt(d / (v - 1 if centre else v))
        ratios.append(float((full @ basis).norm() / full.norm()) / null)
    # The estimate comes from 32 directions: 496 products, heavy tailed where the gradients go in few directions.
    assert expected == pytest.approx(np.std(ratios), rel=0.35, abs=0.006)
    assert (expected > 0.1) == concentrated


def test_a_random_head_is_not_called_better_or_worse_than_random():
    """Ratios of untrained heads differ from 1 by more than their interval over documents; the title must not mind."""
    v, d, n = 400, 16, 600
    targets = (torch.rand(n, generator=torch.Generator().manual_seed(5)) ** 6 * v).long()
    documents = torch.arange(n) // 20
    alarms = outside = 0
    for seed in range(40):
        head = LinearHead(_randn(v, d, seed=seed) * 0.02)
        result = _measured(head, _randn(n, d, seed=1000 + seed) * 0.1, targets, documents)
        low, high = result.values["centred"]["ratio_ci95"]
        outside += not low <= 1 <= high
        alarms += "about what a random subspace" not in result.findings[0].title
    assert outside > 8, "the interval over documents alone would call many of them different"
    assert alarms <= 4
