"""UNE101: spectrum of the unembedding matrix."""

import math

import numpy as np
import pytest
import torch

from unembed.diagnostics import LinearHead, Spectrum, effective_ranks


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _measured(weight, **options):
    return Spectrum(LinearHead(weight, **options)).result()


def test_values_worked_by_hand():
    # Rows (3, 0), (0, 2), (-3, 0), (0, -2): mean 0, singular values sqrt 18 and sqrt 8.
    result = _measured(torch.tensor([[3.0, 0], [0, 2], [-3, 0], [0, -2]]))
    values = result.values
    for part in (values, values["centred"]):
        assert part["rank"] == 2
        assert part["largest"] == pytest.approx(math.sqrt(18))
        assert part["smallest"] == pytest.approx(math.sqrt(8))
        assert part["condition"] == pytest.approx(1.5)
        assert part["frobenius"] == pytest.approx(math.sqrt(26))
        assert part["stable_rank"] == pytest.approx(26 / 18)
        assert part["participation_ratio"] == pytest.approx(26**2 / (18**2 + 8**2))
    assert values["mean_row_share"] == pytest.approx(0, abs=1e-12)
    assert values["rows"] == 4
    assert values["all_rows"] is None
    assert values["norm"] == pytest.approx({"min": 2, "q05": 2, "median": 2.5, "q95": 3, "max": 3})
    columns = result.table("spectrum_values").columns
    np.testing.assert_allclose(columns["raw"], [math.sqrt(18), math.sqrt(8)])
    np.testing.assert_allclose(columns["raw_energy_left"], [8 / 26, 0], atol=1e-12)


def test_a_common_offset_shows_in_the_raw_spectrum_and_the_mean_share_only():
    weight, offset = _randn(50, 4), torch.tensor([10.0, 0, 0, 0]).double()
    plain, shifted = _measured(weight).values, _measured(weight - weight.mean(0) + offset).values
    for name, value in plain["centred"].items():
        assert shifted["centred"][name] == pytest.approx(value, rel=1e-9), name
    total = float((weight - weight.mean(0)).square().sum()) + 50 * 100
    assert shifted["mean_row_share"] == pytest.approx(5000 / total, rel=1e-12)
    assert shifted["largest"] > 60


def test_effective_ranks_are_of_the_values_in_the_table():
    result = _measured(_randn(30, 5) * torch.tensor([8.0, 4, 2, 1, 0.5]).double())
    columns = result.table("spectrum_values").columns
    for part, name in ((result.values, "raw"), (result.values["centred"], "centred")):
        for key, expected in effective_ranks(columns[name]).items():
            assert part[key] == pytest.approx(expected), key
        energy = columns[name] ** 2
        np.testing.assert_allclose(columns[f"{name}_energy_left"], 1 - np.cumsum(energy) / energy.sum(), atol=1e-12)
    assert columns["index"].tolist() == [1, 2, 3, 4, 5]


def test_a_zero_matrix_one_row_and_equal_rows():
    zero = _measured(torch.zeros(5, 3)).values
    assert (zero["rank"], zero["centred"]["rank"], zero["condition"]) == (0, 0, None)
    assert zero["stable_rank"] == zero["entropy_rank"] == zero["mean_row_share"] == 0
    one = _measured(torch.tensor([[3.0, 4.0]]))
    assert (one.values["rank"], one.values["centred"]["rank"]) == (1, 0)
    assert one.values["largest"] == pytest.approx(5)
    assert one.values["mean_row_share"] == pytest.approx(1)
    assert len(one.table("spectrum_extremes")) == 0
    equal = _measured(torch.full((7, 2), 0.1)).values
    assert (equal["rank"], equal["centred"]["rank"], equal["centred"]["condition"]) == (1, 0, None)
    assert equal["mean_row_share"] == pytest.approx(1)
    assert equal["norm"]["min"] == equal["norm"]["max"] == pytest.approx(0.1 * math.sqrt(2), rel=1e-6)


@pytest.mark.parametrize("weight", [torch.zeros(5, 3), torch.ones(1, 2), torch.full((9, 2), 1e-30), _randn(40, 3)])
def test_the_histogram_of_norms_holds_every_row_once(weight):
    columns = _measured(weight).table("spectrum_norms").columns
    assert columns["tokens"].sum() == len(weight)
    assert (columns["from"] < columns["to"]).all()
    norms = weight.double().norm(dim=1).numpy()
    for low, high, count in zip(columns["from"], columns["to"], columns["tokens"], strict=True):
        assert abs(int(((norms >= low) & (norms < high)).sum()) - count) <= 1


def test_extremes_are_the_rows_of_smallest_and_largest_norm_with_their_tokens():
    weight = torch.zeros(50, 2)
    weight[:, 0] = torch.randperm(50, generator=torch.Generator().manual_seed(0)) + 1.0
    tokens = [f"t{i}" for i in range(50)]
    tokens[int(weight[:, 0].argmax())] = "<script>\u202e"
    columns = _measured(weight, tokens=tokens).table("spectrum_extremes").columns
    assert columns["norm"].tolist() == pytest.approx([*range(1, 21), *range(31, 51)])
    np.testing.assert_allclose(columns["over_median"], columns["norm"] / 25.5)
    for i, token in zip(columns["id"], columns["token"], strict=True):
        assert token == ('"<script>\\u202e"' if tokens[i].startswith("<") else f'"{tokens[i]}"')
    few = _measured(weight[:5]).table("spectrum_extremes").columns
    assert len(set(few["id"].tolist())) == 4  # no row is both
    assert few["token"].tolist() == [""] * 4  # no tokenizer


def test_padding_rows_are_left_out_and_shown_apart():  # mirage#751, mlx-vlm#1917
    real, extra = _randn(20, 3), 100 * _randn(4, 3, seed=1)
    values = _measured(real, extra_rows=extra).values
    alone = _measured(real).values
    whole = _measured(torch.cat([real, extra])).values
    assert values["rows"] == 20
    assert values["all_rows"]["rows"] == 24
    assert values["largest"] == alone["largest"]
    assert values["norm"] == alone["norm"]
    for name in ("rank", "largest", "smallest", "condition", "frobenius", "stable_rank", "directions_90"):
        assert values["all_rows"][name] == pytest.approx(whole[name], rel=1e-12), name
        assert values["all_rows"]["centred"][name] == pytest.approx(whole["centred"][name], rel=1e-12), name
    assert values["all_rows"]["largest"] > 10 * values["largest"]
    zeros = _measured(torch.cat([real]), extra_rows=torch.zeros(3, 3, dtype=torch.float64)).values
    assert zeros["norm"]["min"] > 0
    assert zeros["all_rows"]["frobenius"] == pytest.approx(alone["frobenius"], rel=1e-12)


def test_more_than_fifty_thousand_rows_are_measured_like_any_other():  # WeightWatcher skips them
    weight = _randn(60_011, 4).float()
    result = _measured(weight)
    exact = torch.linalg.svdvals(weight.double())
    np.testing.assert_allclose(result.table("spectrum_values").columns["raw"], exact, rtol=1e-9)
    centred = torch.linalg.svdvals(weight.double() - weight.double().mean(0))
    np.testing.assert_allclose(result.table("spectrum_values").columns["centred"], centred, rtol=1e-9)
    assert result.values["rank"] == 4
    assert result.table("spectrum_norms").columns["tokens"].sum() == 60_011


def test_a_factorised_head_in_bfloat16_is_found_out():  # mergekit#304: and read at all
    weight = (_randn(400, 3) @ _randn(3, 24, seed=1)).to(torch.bfloat16)
    result = _measured(weight)
    assert result.values["rank"] == result.values["centred"]["rank"] == 3
    assert result.findings[0].severity == "warning"
    assert result.findings[0].title == "21 of 24 directions are empty"
    assert _measured(weight.float(), noise_eps=2**-7).values["rank"] == 3
    full = _measured(_randn(400, 24).to(torch.bfloat16))
    assert full.values["rank"] == 24
    assert full.findings[0].severity == "info"


def test_an_offset_of_ten_thousand_in_float32_hides_what_it_rounds_away():
    weight = _randn(200, 3)
    small = (1e4 + 1e-5 * weight).float()  # spacing at 1e4 is 1e-3: nothing is left of the matrix
    assert _measured(small).values["centred"]["rank"] == 0
    assert _measured(1e4 + weight.float()).values["centred"]["rank"] == 3


def test_the_spectrum_needs_no_text():
    assert not Spectrum.needs_text
