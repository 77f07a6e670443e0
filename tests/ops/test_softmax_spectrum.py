"""Eigenvalues of the Jacobian of softmax against dense ones, their relative accuracy, and the norms made from p."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.ops import _softmax_spectrum
from unembed.ops._softmax import _reference as softmax_reference
from unembed.ops._softmax_spectrum import softmax_saturation, softmax_spectrum

INF = torch.inf


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    """So that the rows and the roots of a small test come in more than one block."""
    monkeypatch.setattr(_softmax_spectrum, "_BLOCK", 100)


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _jacobian(p):
    return torch.diag_embed(p) - p[..., :, None] * p[..., None, :]


def _dense(p):
    return torch.linalg.eigvalsh(_jacobian(p)).flip(-1)


def _laplacian(p):
    """J of one row with diagonals that are sums of what lies beside, so that nothing of 1 - p is lost."""
    beside = p[:, None] * p[None, :]
    beside.fill_diagonal_(0)
    return torch.diag(beside.sum(1)) - beside


_SCORES = st.sampled_from(["spread", "flat", "ties", "gone", "peaked"])


def _scores(kind, n, v, seed):
    x = _randn(n, v, seed=seed)
    if kind == "spread":
        return x * 8
    if kind == "flat":
        return x * 1e-6
    if kind == "ties":
        return (x * 1.5).round()
    if kind == "gone":
        return x.masked_fill(_randn(n, v, seed=seed + 1) > 0.3, -INF)
    return x.index_fill(1, torch.tensor([v // 2]), 30.0)


@settings(max_examples=150, deadline=None)
@given(kind=_SCORES, n=st.integers(0, 3), v=st.integers(1, 60), k=st.integers(1, 60), seed=st.integers(0, 999))
def test_eigenvalues_and_norms_are_those_of_the_dense_matrix(kind, n, v, k, seed):
    x = _scores(kind, n, v, seed)
    p = softmax_reference(x)
    k = min(k, v)
    expected = _dense(p)
    assert torch.allclose(softmax_spectrum(x, k), expected[:, :k], rtol=1e-11, atol=3e-15)
    found = softmax_saturation(x)
    taking = (x > -INF).sum(1).clamp(min=1).double()
    assert torch.allclose(found.largest, expected[:, 0], rtol=1e-11, atol=3e-15)
    assert torch.allclose(found.trace, 1 - p.square().sum(1) - (p.sum(1) == 0).double(), rtol=1e-11, atol=1e-15)
    frobenius = torch.linalg.matrix_norm(_jacobian(p))
    assert torch.allclose(found.frobenius, frobenius, rtol=1e-11, atol=1e-15)
    assert torch.allclose(found.typical, frobenius / taking.sqrt(), rtol=1e-11, atol=1e-15)


@settings(max_examples=60, deadline=None)
@given(v=st.integers(2, 12), kind=_SCORES, seed=st.integers(0, 999))
def test_the_eigenvalues_add_up_to_trace_and_frobenius_and_rank(v, kind, seed):
    x = _scores(kind, 2, v, seed) * 3
    spectrum, found = softmax_spectrum(x), softmax_saturation(x)
    assert torch.equal(spectrum, spectrum.sort(1, descending=True).values)
    assert torch.allclose(spectrum.sum(1), found.trace, rtol=1e-12, atol=0)
    assert torch.allclose(spectrum.square().sum(1).sqrt(), found.frobenius, rtol=1e-12, atol=0)
    squares = spectrum.square().sum(1)
    rank = torch.where(squares == 0, 0.0, spectrum.sum(1).square() / torch.where(squares == 0, 1.0, squares))
    assert torch.allclose(found.effective_rank, rank, rtol=1e-11, atol=0)


def test_values_worked_by_hand():
    x = torch.tensor([[0.5, 0.25, 0.25, 0.0]]).log()
    assert softmax_spectrum(x)[0].tolist() == pytest.approx([3 / 8, 1 / 4, 0, 0], rel=1e-7)  # of the scores' float32
    uniform = softmax_saturation(torch.zeros(5))
    assert softmax_spectrum(torch.zeros(5)).tolist() == pytest.approx([0.2] * 4 + [0], rel=1e-14, abs=0)
    assert [float(one) for one in uniform] == pytest.approx([0.2, 0.8, 0.4, 0.4 / math.sqrt(5), 4], rel=1e-14)
    third = 1 / 3
    masked = softmax_saturation(torch.tensor([0.0, -INF, 0.0, 0.0]))
    assert [float(one) for one in masked] == pytest.approx([third, 2 * third, math.sqrt(2) / 3, math.sqrt(2 / 27), 2])


@pytest.mark.parametrize("small", [1e-3, 1e-12, 1e-17, 1e-100, 1e-200, 1e-300, 1e-307])
def test_two_classes_have_relative_accuracy(small):
    x = torch.tensor([math.log(small), 0.0], dtype=torch.float64)
    q = x[0].exp() / (1 + x[0].exp())
    right = float(2 * q * (1 - q))
    assert softmax_spectrum(x).tolist() == pytest.approx([right, 0], rel=1e-13, abs=0)
    found = softmax_saturation(x)
    expected = [right, right, right, right / math.sqrt(2), 1]
    assert [float(one) for one in found] == pytest.approx(expected, rel=1e-12, abs=0)


@pytest.mark.parametrize("small", [1e-3, 1e-12, 1e-30, 1e-250])
@pytest.mark.parametrize("v", [3, 7, 20])
def test_a_row_that_is_nearly_one_hot_has_relative_accuracy(small, v):
    """With 1 - p_max = small; scaled to its size the matrix is one that a dense method resolves."""
    others = torch.rand(v - 1, generator=torch.Generator().manual_seed(v), dtype=torch.float64) + 0.1
    others = others / others.sum()
    x = torch.cat([others[:2].log() + math.log(small), torch.zeros(1).double(), others[2:].log() + math.log(small)])
    p = softmax_reference(x)
    assert float(p[2]) >= 1 - 1.01 * small
    scaled = _laplacian(p) / small
    right = torch.linalg.eigvalsh(scaled).flip(0)
    found = softmax_spectrum(x) / small
    assert torch.allclose(found[:-1], right[:-1], rtol=1e-9, atol=0)
    assert found[-1] == 0
    norms = softmax_saturation(x)
    assert float(norms.largest / small) == pytest.approx(float(right[0]), rel=1e-9)
    assert float(norms.trace / small) == pytest.approx(float(scaled.trace()), rel=1e-9)
    assert float(norms.frobenius / small) == pytest.approx(float(scaled.norm()), rel=1e-9)
    assert float(norms.effective_rank) == pytest.approx(float((scaled.trace() / scaled.norm()) ** 2), rel=1e-9)


def test_small_eigenvalues_below_a_large_one_have_relative_accuracy():
    """p falls by 1e-20 from class to class, so that each eigenvalue is found from the classes around it."""
    x = -torch.arange(8, dtype=torch.float64) * math.log(1e20)
    found = softmax_spectrum(x)
    p = softmax_reference(x)
    right = [float(2 * p[1])] + [float(p[i] * (i + 1) / i) for i in range(2, 8)]  # one against all that are larger
    assert found[:7].tolist() == pytest.approx(right, rel=1e-12, abs=0)


def test_ties_are_eigenvalues_themselves():
    x = torch.tensor([2.0, 1.0, 1.0, 2.0, 0.0, 1.0, -INF], dtype=torch.float64)
    p, found = softmax_reference(x), softmax_spectrum(x)
    assert (found == p[0]).sum() == 1
    assert (found == p[1]).sum() == 2
    assert torch.allclose(found, _dense(p), atol=1e-15)
    near = torch.tensor([0.0, 1e-15, 2e-15, -1.0], dtype=torch.float64)
    assert torch.allclose(softmax_spectrum(near), _dense(softmax_reference(near)), atol=1e-15)


def test_edges_are_defined():
    x = torch.tensor([[1.0, 2.0, 3.0], [-INF, -INF, -INF], [-INF, 5.0, -INF], [1.0, torch.nan, 2.0]])
    found, norms = softmax_spectrum(x), softmax_saturation(x)
    assert torch.equal(found[1:3], torch.zeros(2, 3, dtype=torch.float64))
    assert found[3].isnan().all()
    for norm in norms:
        assert norm[1:3].tolist() == [0, 0]
        assert norm[3].isnan()
        assert norm[0] == getattr(softmax_saturation(x[0]), norms._fields[list(map(id, norms)).index(id(norm))])
    assert softmax_spectrum(torch.tensor([3.0])).tolist() == [0]
    assert [float(one) for one in softmax_saturation(torch.tensor([3.0]))] == [0] * 5
    assert [float(one) for one in softmax_saturation(torch.tensor(3.0))] == [0] * 5
    for shape in ((0,), (0, 3), (3, 0)):
        assert softmax_spectrum(torch.zeros(shape)).shape == shape
        assert softmax_saturation(torch.zeros(shape)).trace.tolist() == torch.zeros(shape[:-1]).tolist()


def test_temperatures():
    x = _randn(4, 6, dtype=torch.float32)
    t = torch.tensor([[0.0], [INF], [0.5], [2.0]])
    found, norms = softmax_spectrum(x, temperature=t), softmax_saturation(x, temperature=t)
    assert not found[0].any()
    assert norms.effective_rank[1].item() == pytest.approx(5)
    p = softmax_reference(x, temperature=t)
    assert torch.allclose(found, _dense(p), atol=1e-15)
    assert torch.equal(softmax_spectrum(x[2], temperature=0.5), found[2])
    assert torch.equal(softmax_spectrum(x.T, dim=0, temperature=t.T), found.T)
    with pytest.raises(ValueError, match="`temperature` must be at least 0"):
        softmax_spectrum(x, temperature=-1.0)
    with pytest.raises(ValueError, match="`temperature` must be a number, or broadcast"):
        softmax_saturation(x, temperature=torch.ones(6))


def test_any_dimension_and_no_derivatives():
    x = (_randn(3, 4, 5) * 2).requires_grad_()
    for dim in range(-3, 3):
        found = softmax_spectrum(x, 2, dim)
        assert not found.requires_grad
        right = _dense(softmax_reference(x.detach(), dim).movedim(dim, -1))[..., :2]
        assert torch.allclose(found.movedim(dim, -1), right, atol=1e-15)
        norms = softmax_saturation(x, dim)
        assert torch.allclose(norms.largest, right[..., 0])
        assert norms.typical.shape == right.shape[:-1]
    for k in (0, 6):
        with pytest.raises(ValueError, match=rf"`k` must lie in \[1, 5\], got {k}"):
            softmax_spectrum(x, k)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_results_are_float64_of_scores_of_any_dtype_and_offset(dtype):
    x = (_randn(3, 9) * 3).round().to(dtype)
    found = softmax_spectrum(x)
    assert found.dtype == torch.float64
    assert torch.equal(found, softmax_spectrum(x.double()))
    assert torch.equal(found, softmax_spectrum(x.double() + 1e8))


def test_whatever_the_block_the_numbers_are_the_same(monkeypatch):
    x = _randn(5, 33) * 3
    spectrum, norms = softmax_spectrum(x, 7), softmax_saturation(x)
    monkeypatch.setattr(_softmax_spectrum, "_BLOCK", 1 << 21)
    assert torch.allclose(softmax_spectrum(x, 7), spectrum, rtol=1e-13, atol=0)
    for one, other in zip(softmax_saturation(x), norms, strict=True):
        assert torch.allclose(one, other, rtol=1e-13, atol=0)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 10.0])
def test_a_whole_vocabulary_in_a_few_steps(scale, monkeypatch):
    """V = 262,144: an eigenvalue is where f changes its sign, trace and Frobenius norm as the definition has them."""
    monkeypatch.setattr(_softmax_spectrum, "_BLOCK", 1 << 20)
    steps, original = [], _softmax_spectrum._model_step
    monkeypatch.setattr(_softmax_spectrum, "_model_step", lambda *given: steps.append(1) or original(*given))
    x = _randn(1, 262_144) * scale
    found = softmax_spectrum(x, 3)[0]
    assert len(steps) <= 12
    p = x.softmax(1)[0]
    sorted_p = p.sort(descending=True).values
    for place in range(3):
        assert sorted_p[place + 1] < found[place] < sorted_p[place]
        below, above = (float((p / (p - found[place] * (1 + side))).sum()) for side in (-1e-12, 1e-12))
        assert below < 0 < above
    norms = softmax_saturation(x)
    assert norms.largest[0].item() == pytest.approx(found[0].item(), rel=1e-13)
    second, third = p.square().sum(), p.pow(3).sum()
    assert norms.trace[0].item() == pytest.approx(float(1 - second), rel=1e-12)
    assert norms.frobenius[0].item() == pytest.approx(float((second - 2 * third + second**2).sqrt()), rel=1e-12)


def test_halving_alone_finds_the_same(monkeypatch):
    x = torch.cat([_randn(2, 9) * 4, torch.tensor([[0.0] + [-500.0, -600.0, -650.0] * 2 + [-1.0, -2.0]]).double()])
    right = softmax_spectrum(x)
    monkeypatch.setattr(_softmax_spectrum, "_model_step", lambda x, *given: torch.full_like(x, torch.nan))
    assert torch.allclose(softmax_spectrum(x), right, rtol=1e-12, atol=0)
