"""Spectra and column spaces of tall matrices, against `torch.linalg` in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed import ops
from unembed.ops import _linalg


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _conditioned(rows, width, condition, seed=0):
    """A matrix whose row-centred singular values fall from 1 to 1 / condition."""
    left = _randn(rows, width, seed=seed)
    left = torch.linalg.qr(left - left.mean(0)).Q
    right = torch.linalg.qr(_randn(width, width, seed=seed + 1)).Q
    return (left * torch.logspace(0, -math.log10(condition), width, dtype=torch.float64)) @ right.T


def _small_chunks(monkeypatch):
    monkeypatch.setattr(_linalg, "_CHUNK_ELEMENTS", 64)


def _check_spectra(weight):
    """Values, vectors and ranks of `tall_svd` and the spans of `column_space`, all against the written-out matrix."""
    wide = weight.double()
    centred = wide - wide.mean(0)
    width, rows = weight.shape[1], len(weight)
    svd = ops.tall_svd(weight)
    top = float(torch.linalg.matrix_norm(wide, 2))

    def padded(values):
        return torch.nn.functional.pad(values, (0, width - len(values)))

    assert svd.values.dtype == svd.values_raw.dtype == svd.right.dtype == torch.float64
    floor = max(top, 1e-300) * 1e-12 * math.sqrt(rows)
    torch.testing.assert_close(svd.values, padded(torch.linalg.svdvals(centred)), rtol=2e-6, atol=floor)
    torch.testing.assert_close(svd.values_raw, padded(torch.linalg.svdvals(wide)), rtol=2e-6, atol=floor)
    torch.testing.assert_close(svd.mean, wide.mean(0), rtol=1e-13, atol=1e-13 * top)
    torch.testing.assert_close(svd.right.T @ svd.right, torch.eye(width, dtype=torch.float64), rtol=0, atol=1e-12)

    space = ops.column_space(weight, svd)
    assert space.centred.shape == (rows, svd.rank)
    assert space.raw.shape[1] == svd.rank_raw
    basis = space.centred.double()
    smallest = float(svd.values[svd.rank - 1]) if svd.rank else top
    # Float64 ends where rounding of W over its smallest direction comes near float32.
    accuracy = 1e-8 if space.centred.dtype == torch.float64 and smallest >= 1e-11 * top else 3e-6
    torch.testing.assert_close(basis.T @ basis, torch.eye(svd.rank, dtype=torch.float64), rtol=0, atol=accuracy)
    along_ones = basis.sum(0) / math.sqrt(rows)
    rounding = 1e-15 * top / max(smallest, 1e-300)
    torch.testing.assert_close(along_ones, torch.zeros_like(along_ones), rtol=0, atol=1e-6 + rounding)
    lost = centred - basis @ (basis.T @ centred)
    assert float(torch.linalg.matrix_norm(lost, 2)) <= svd.noise * 1.01 + top * accuracy
    full = torch.cat([basis, torch.full((rows, 1), 1 / math.sqrt(rows), dtype=torch.float64)], dim=1) @ space.raw
    identity = torch.eye(svd.rank_raw, dtype=torch.float64)
    torch.testing.assert_close(full.T @ full, identity, rtol=0, atol=2 * accuracy)
    lost = wide - full @ (full.T @ wide)
    assert float(torch.linalg.matrix_norm(lost, 2)) <= 2.02 * svd.noise + top * accuracy
    return svd


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 40),
    width=st.integers(1, 9),
    rank=st.integers(1, 9),
    offset=st.sampled_from([0.0, 1.0, 1e4]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    seed=st.integers(0, 99),
)
def test_spectra_and_spans_for_every_shape_rank_and_common_offset(*, rows, width, rank, offset, dtype, seed):
    weight = _randn(rows, rank, seed=seed) @ _randn(rank, width, seed=seed + 100)
    if offset:
        weight = weight + offset * _randn(width, seed=seed + 200)  # the same for all rows
    svd = _check_spectra(weight.to(dtype))
    if dtype == torch.float64:
        assert svd.rank == min(rows - 1, width, rank)
        assert svd.rank_raw == min(rows, width, rank + (offset != 0))


@pytest.mark.parametrize("offset", [0.0, 0.1])
@pytest.mark.parametrize("condition", [1e2, 1e4, 3e4, 3e5, 1e7, 1e10, 1e12])
def test_small_singular_values_survive_a_bad_condition(condition, offset, monkeypatch):
    _small_chunks(monkeypatch)
    weight = _conditioned(101, 7, condition) + offset * _randn(7, seed=9)
    svd = _check_spectra(weight)
    assert svd.rank == svd.rank_raw == 7
    assert svd.method == ("gram" if condition < 1e5 else "qr")
    expected = torch.logspace(0, -math.log10(condition), 7, dtype=torch.float64)
    torch.testing.assert_close(svd.values, expected, rtol=1e-5, atol=3e-15)
    ours = ops.column_space(weight, svd).centred
    exact = torch.linalg.svd(weight - weight.mean(0), full_matrices=False).U
    assert float(torch.linalg.matrix_norm(ours - exact @ (exact.T @ ours), 2)) < 1e-14 * condition + 1e-9


@pytest.mark.parametrize("offset", [0.0, 3.0])
@pytest.mark.parametrize(("rows", "width"), [(50, 6), (6, 6), (7, 6), (3, 6)])
def test_gram_and_qr_agree_where_both_are_valid(rows, width, offset, monkeypatch):
    weight = _randn(rows, width) + offset
    gram = ops.tall_svd(weight)
    monkeypatch.setattr(_linalg, "_GRAM_CONDITION", 1e-9)
    _small_chunks(monkeypatch)
    qr = ops.tall_svd(weight)
    assert qr.method == "qr"
    assert gram.method == ("gram" if rows > width else "qr")
    torch.testing.assert_close(gram.values, qr.values, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(gram.values_raw, qr.values_raw, rtol=1e-9, atol=1e-12)
    assert (gram.rank, gram.rank_raw) == (qr.rank, qr.rank_raw)
    rank = gram.rank  # singular vectors are unique up to sign, here without repeated values
    overlap = (gram.right.T @ qr.right)[:rank, :rank].abs()
    torch.testing.assert_close(overlap, torch.eye(rank, dtype=torch.float64), atol=1e-8, rtol=0)


@pytest.mark.parametrize(("rows", "width", "rank"), [(300, 40, 5), (300, 40, 1), (64, 64, 32), (1000, 20, 19)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_stored_factorised_matrix_has_the_rank_of_its_factors(rows, width, rank, dtype):
    weight = ((_randn(rows, rank) @ _randn(rank, width, seed=1)) / math.sqrt(rank)).to(dtype)
    svd = ops.tall_svd(weight)
    assert svd.rank == svd.rank_raw == rank
    # The same numbers held wider, with the precision they were stored in.
    wide = ops.tall_svd(weight.double(), noise_eps=torch.finfo(dtype).eps)
    assert wide.rank == wide.rank_raw == rank
    assert ops.column_space(weight, svd).centred.dtype == torch.float32


def test_constant_rows_have_rank_one_raw_and_none_centred():
    weight = torch.full((9, 3), 0.1)
    svd = _check_spectra(weight)
    assert (svd.rank, svd.rank_raw) == (0, 1)
    assert float(svd.values_raw[0]) == pytest.approx(math.sqrt(27) * 0.1, rel=1e-6)


def test_zeros_have_no_rank():
    svd = _check_spectra(torch.zeros(5, 2))
    assert (svd.rank, svd.rank_raw) == (0, 0)


def test_one_row():
    svd = _check_spectra(torch.tensor([[3.0, 4.0]]))
    assert (svd.rank, svd.rank_raw) == (0, 1)
    assert svd.values_raw.tolist() == pytest.approx([5.0, 0.0])


def test_spectrum_worked_by_hand():
    # Columns 1..2: mean (1, 1); centred rows +-(1, -1): s = 2 once.
    svd = ops.tall_svd(torch.tensor([[2.0, 0.0], [0.0, 2.0]]))
    torch.testing.assert_close(svd.values, torch.tensor([2.0, 0.0], dtype=torch.float64), rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(svd.values_raw, torch.tensor([2.0, 2.0], dtype=torch.float64), rtol=1e-14, atol=0)
    # eps ||W||_F (1/sqrt 2 + 1/sqrt 2) / sqrt 3
    assert svd.noise == pytest.approx(2**-23 * math.sqrt(8) * math.sqrt(2) / math.sqrt(3), rel=1e-12)


def test_half_stored_and_strided_matrices_equal_their_copies(monkeypatch):
    _small_chunks(monkeypatch)
    weight = _randn(6, 50).to(torch.bfloat16).T[::2]
    assert not weight.is_contiguous()
    strided, copied = ops.tall_svd(weight), ops.tall_svd(weight.double(), noise_eps=2**-7)
    torch.testing.assert_close(strided.values, copied.values, rtol=1e-12, atol=0)
    assert strided.noise == copied.noise


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_matrix_with_a_number_that_is_none_is_refused(bad):
    weight = torch.ones(4, 3)
    weight[2, 1] = bad
    with pytest.raises(ValueError, match="NaN or infinity"):
        ops.tall_svd(weight)


def test_infinities_that_cancel_in_the_mean_are_refused():
    weight = torch.zeros(4, 1)
    weight[0], weight[1] = math.inf, -math.inf
    with pytest.raises(ValueError, match="NaN or infinity"):
        ops.tall_svd(weight)


@pytest.mark.parametrize("shape", [(0, 3), (3, 0)])
def test_an_empty_matrix_is_refused(shape):
    with pytest.raises(ValueError, match="must have rows and columns"):
        ops.tall_svd(torch.zeros(shape))


@settings(max_examples=30, deadline=None)
@given(cuts=st.lists(st.integers(1, 7), min_size=1, max_size=6), width=st.integers(1, 5), seed=st.integers(0, 99))
def test_thin_r_of_any_cutting_has_the_gram_matrix_of_the_whole(cuts, width, seed):
    whole = _randn(sum(cuts), width, seed=seed)
    factor = ops.thin_r(whole.split(cuts))
    assert len(factor) <= max(width, cuts[0])
    torch.testing.assert_close(factor.T @ factor, whole.T @ whole, rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(factor, factor.triu())


def test_thin_r_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="at least one chunk"):
        ops.thin_r([])


def test_tall_svd_does_not_write_to_its_input():
    weight = _randn(30, 4).float()
    before = weight.clone()
    ops.column_space(weight, ops.tall_svd(weight))
    assert torch.equal(weight, before)
