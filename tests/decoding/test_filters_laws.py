"""Every filter of the package through `testing.check_filter`, and what they all refuse."""

from __future__ import annotations

import math

import pytest
import torch

from unembed.decoding import (
    DRY,
    XTC,
    AllowedIds,
    BannedIds,
    Chain,
    Epsilon,
    Eta,
    Filter,
    FrequencyPenalty,
    Joint,
    MinLength,
    MinP,
    NoRepeatNgram,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    Typical,
    filters,
)
from unembed.testing import check_filter

ROWS = 6
A_ROW = torch.tensor([0.1, 0.3, 0.5, 0.7, 0.9, 1.0], dtype=torch.float64)
EVERY: list[Filter] = [
    Temperature(0.7),
    Temperature(0),
    Temperature(torch.inf),
    Temperature(1e-40),
    Temperature(10 * A_ROW),
    TopK(3),
    TopK(99),
    TopK(torch.tensor([1, 2, 3, 40, 50, 6])),
    TopP(0.7),
    TopP(0.0),
    TopP(1.0),
    TopP(0.5, min_keep=7),
    TopP(A_ROW),
    MinP(0.05),
    MinP(A_ROW, min_keep=2),
    Typical(0.4),
    Typical(A_ROW),
    Epsilon(0.03),
    Epsilon(A_ROW / 20),
    Eta(0.03),
    Eta(A_ROW / 20, min_keep=3),
    TopNSigma(1.0),
    TopNSigma(A_ROW * 2),
    XTC(0.03, 0.5),
    XTC(A_ROW / 10, 1.0),
    RepetitionPenalty(1.3, of="log_probs"),
    RepetitionPenalty(1 + A_ROW, of="log_probs", scope="prompt"),
    PresencePenalty(0.7),
    PresencePenalty(-A_ROW, scope="all"),
    FrequencyPenalty(0.7, window=3),
    FrequencyPenalty(A_ROW),
    NoRepeatNgram(2),
    NoRepeatNgram(1, scope="written"),
    DRY(0.8, allowed_length=1),
    DRY(0.8, allowed_length=1, breakers=(2,), window=6),
    MinLength(3, eos_ids=[0, 7]),
    MinLength(torch.tensor([0, 1, 2, 3, 9, 4]), eos_ids=[0, 7]),
    Joint((TopK(5), TopP(0.6))),
    Joint((TopK(5), TopP(A_ROW)), min_keep=2),
    Chain(),
    FrequencyPenalty(0.2) | Temperature(0.8) | TopK(10) | TopP(A_ROW) | MinP(0.01) | XTC(0.1, 0.5),
]
RULES = [*EVERY, RepetitionPenalty(1.3), AllowedIds([3]), BannedIds([7])]


@pytest.mark.parametrize("given", EVERY, ids=lambda given: type(given).__name__)
def test_every_filter_obeys_the_laws(given):
    outcomes = check_filter(given)
    assert {one.status for one in outcomes} == {"passed"}, [str(one) for one in outcomes if one.status != "passed"]


@pytest.mark.parametrize("given", EVERY, ids=lambda given: type(given).__name__)
def test_every_filter_obeys_the_laws_on_wide_rows(given):
    check_filter(given, classes=3000)  # where top-k, top-p and typical sampling go without a sort


def test_the_classical_penalty_obeys_all_but_the_offset():
    outcomes = check_filter(RepetitionPenalty(1.3), raises=False)
    assert [one.name for one in outcomes if one.status != "passed"] == ["offset"]


@pytest.mark.parametrize("given", [AllowedIds([3, 8]), BannedIds([7])])
def test_a_constraint_obeys_all_but_one_kept(given):
    outcomes = check_filter(given, raises=False)
    assert [one.name for one in outcomes if one.status != "passed"] == ["one_kept"]


def test_no_filter_was_forgotten():
    tried = {type(one) for one in RULES}
    public = {getattr(filters, name) for name in filters.__all__} - {
        Filter,
        filters.Selection,
        filters.Distribution,
        filters.Number,
    }
    assert public <= tried


@pytest.mark.parametrize("given", RULES, ids=lambda given: type(given).__name__)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize(("bad", "shown"), [(math.nan, "nan"), (math.inf, "inf")])
def test_every_filter_refuses_nan_and_plus_infinity_by_the_row(given, dtype, bad, shown):
    scores = torch.randn(ROWS, 200, generator=torch.Generator().manual_seed(0)).to(dtype)
    scores[4, 150], scores[2] = bad, -torch.inf  # a row without any score may be
    history = torch.tensor([[1, 2, 1, 2, 1]]).expand(ROWS, -1)
    with pytest.raises(ValueError, match="Row") as told:
        given(scores, history)
    assert str(told.value) == f"Row 4 of `scores` holds {shown}: expected finite scores or -inf."


def test_stages_refuse_them_too_and_no_rows_are_no_error():
    with pytest.raises(ValueError, match="Row 0 of `scores` holds nan"):
        (TopK(3) | TopP(0.9)).stages(torch.tensor([1.0, math.nan]))
    assert (TopK(3) | TopP(0.9))(torch.zeros(0, 7)).shape == (0, 7)
