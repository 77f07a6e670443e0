"""Sparsemax and alpha-entmax: definition, derivatives, edges, half precision, and cases L21 to L24."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.ops import _entmax_find, entmax, sparsemax
from unembed.ops._entmax import _reference
from unembed.ops._entmax_terms import searched

ALPHAS = [1.0, 1.2, 1.5, 2.0, 2.5]
F = torch.nn.functional


@pytest.fixture(autouse=True)
def small_groups(monkeypatch):
    """So that the search over groups is used at the sizes of tests, and a piece is a few rows."""
    monkeypatch.setattr(_entmax_find, "_SMALL", 12)
    monkeypatch.setattr(_entmax_find, "_GROUP", 4)
    monkeypatch.setattr(_entmax_find, "_CACHED", 64)


def _scores(*shape, spread=1.0, seed=0, dtype=torch.float64):
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread).to(dtype)


def _definition(x, alpha, dim):
    rows = x.movedim(dim, -1)
    return _reference(rows.reshape(-1, rows.shape[-1]), alpha).reshape(rows.shape).movedim(-1, dim)


@settings(max_examples=150, deadline=None)
@given(
    shape=st.lists(st.integers(1, 5), min_size=0, max_size=2),
    classes=st.integers(1, 70),
    dim=st.integers(-3, 2),
    alpha=st.sampled_from([1.0, 1.01, 1.2, 1.5, 1.9, 2.0, 2.5]),
    spread=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    seed=st.integers(0, 5),
)
def test_values_are_those_of_the_definition(*, shape, classes, dim, alpha, spread, seed):
    dim = max(-len(shape) - 1, min(dim, len(shape)))
    sizes = list(shape)
    sizes.insert(dim % (len(shape) + 1), classes)
    x = _scores(*sizes, spread=spread, seed=seed)
    found = entmax(x, alpha, dim)
    assert torch.allclose(found, _definition(x, alpha, dim), rtol=1e-9, atol=1e-13)
    assert torch.allclose(found.sum(dim), torch.ones(()).double(), atol=1e-12)


@pytest.mark.parametrize("alpha", ALPHAS)
@pytest.mark.parametrize("spread", [0.01, 0.5, 4.0])
def test_a_vocabulary_of_real_size(monkeypatch, alpha, spread):
    monkeypatch.undo()
    x = _scores(3, 20011, spread=spread, dtype=torch.float32)
    found, right = entmax(x, alpha), _definition(x, alpha, -1)
    assert torch.allclose(found.double(), right, rtol=3e-5, atol=1e-9)
    apart = ((found > 1e-12) ^ (right > 1e-12)).sum(1)
    assert (apart <= 0.001 * (right > 0).sum(1)).all()


@pytest.mark.parametrize("classes", [1023, 1024, 1025, 1031, 1039, 1040])
@pytest.mark.parametrize("kind", ["plain", "ties", "one leads", "line", "mixed", "grid"])
def test_rows_around_the_size_where_groups_begin(monkeypatch, classes, kind):
    monkeypatch.undo()
    x = _scores(3, classes, spread=3.0, dtype=torch.float32)
    if kind == "ties":
        x[:, ::7] = 9.0
    if kind == "one leads":
        x[:, -1] = 60.0
    if kind == "line":
        x = torch.linspace(0, 3, classes).repeat(3, 1)
    if kind == "mixed":
        x[1] *= 1e-3
    if kind == "grid":
        x = x.round() / 2
    for alpha in (2.0, 1.5, 1.1):
        assert torch.allclose(entmax(x, alpha).double(), _definition(x, alpha, -1), rtol=1e-5, atol=2e-9)


@pytest.mark.parametrize("seed", range(3))
def test_a_support_that_differs_by_the_rounding_of_a_threshold(monkeypatch, seed):
    """60,000 scores within a few ulps of the threshold: the support is that of float64, and the sum is 1."""
    monkeypatch.undo()
    x = torch.full((1, 60000), -1.0)
    x[0, 0] = 0
    x[0, 1:] += (torch.rand(59999, generator=torch.Generator().manual_seed(seed)) - 0.5) * 4e-7
    found, right = sparsemax(x), sparsemax(x.double())
    assert torch.equal(found > 0, right > 0)
    assert abs(float(found.double().sum()) - 1) < 1e-9


def test_worked_by_hand():
    # Two classes a apart: sparsemax moves half of a from one to the other, up to a = 1.
    assert torch.allclose(sparsemax(torch.tensor([0.6, 0.0])), torch.tensor([0.8, 0.2]))
    assert sparsemax(torch.tensor([1.5, 0.0])).tolist() == [1.0, 0.0]
    # 1.5: p = (x/2 - tau)^2; x = [0, 0] gives tau = -1/sqrt 2.
    assert torch.allclose(entmax(torch.zeros(2), 1.5), torch.tensor([0.5, 0.5]))
    assert entmax(torch.tensor([2.0, 0.0]), 1.5).tolist() == [1.0, 0.0]
    # x = [1, 0]: (0.5 - t)^2 + t^2 = 1 with t = -tau < 0 has t = (0.5 - sqrt(1.75)) / 2.
    t = (0.5 - 1.75**0.5) / 2
    assert torch.allclose(entmax(torch.tensor([1.0, 0.0]), 1.5), torch.tensor([(0.5 - t) ** 2, t**2]))


def test_case_l22_alpha_one_is_softmax():
    found = entmax(torch.tensor([0.0, 0.0, 1.0]), 1.0)
    assert torch.allclose(found, torch.tensor([0.2119, 0.2119, 0.5761]), atol=1e-4)


@pytest.mark.parametrize("as_tensor", [False, True])
def test_case_l23_alpha_near_one_and_below(as_tensor):
    def of(alpha):
        return torch.tensor(alpha, dtype=torch.float64) if as_tensor else alpha

    x = _scores(4, 9, spread=3.0)
    for bad in (0.9, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="alpha"):
            entmax(x, of(bad))
    assert torch.allclose(entmax(x, of(1 + 1e-6)), torch.softmax(x, -1), atol=1e-5)
    gap = [(entmax(x, of(1 + e)) - torch.softmax(x, -1)).abs().max() for e in (1e-3, 1e-6, 1e-9)]
    assert gap[0] < 1e-2
    assert gap[1] < 2e-3 * gap[0] + 1e-9
    assert gap[2] < 1e-7


@pytest.mark.parametrize("classes", [200, 3000])
@pytest.mark.parametrize("above", [1e-3, 1e-5, 1e-6, 1e-7])
def test_case_l23_in_single_precision(monkeypatch, classes, above):
    """Where b is raised to the power 1 / (alpha - 1), its rounding would be too."""
    monkeypatch.undo()
    x = _scores(2, classes, spread=3.0, dtype=torch.float32)
    found, right = entmax(x, 1 + above), entmax(x.double(), 1 + above)
    assert torch.allclose(found.double(), right, rtol=1e-4, atol=1e-9)
    assert torch.allclose(found.sum(1), torch.ones(2), atol=1e-6)


@pytest.mark.parametrize("value", [1.0, 1 + 1e-9, 1 + 1e-6, 1.05, 1.5, 2.0])
def test_gradient_of_alpha_is_finite_and_right(value):
    x = _scores(3, 8)
    upstream = _scores(3, 8, seed=1)
    alpha = torch.tensor(value, dtype=torch.float64, requires_grad=True)
    (found,) = torch.autograd.grad((entmax(x, alpha) * upstream).sum(), alpha)
    step = 1e-4
    value = 1.0 if value < 1 + 1e-5 else value  # the reference divides by alpha - 1
    sides = [float((_reference(x, a) * upstream).sum()) for a in (value, value + step, value + 2 * step)]
    found = found.detach()
    assert abs(float(found) - (-3 * sides[0] + 4 * sides[1] - sides[2]) / (2 * step)) < 2e-5


@pytest.mark.parametrize("alpha", ALPHAS)
def test_derivatives_of_first_and_second_order(alpha):
    x = _scores(2, 13, spread=0.7).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: entmax(x, alpha), (x,))
    assert torch.autograd.gradgradcheck(lambda x: entmax(x, alpha), (x,), fast_mode=True)


@pytest.mark.parametrize("shape", [(), (1,), (3, 1)])
def test_derivatives_with_an_alpha_that_learns(shape):
    x = _scores(3, 7).requires_grad_()
    alpha = (1.1 + torch.rand(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)).requires_grad_()
    assert torch.autograd.gradcheck(entmax, (x, alpha))
    assert torch.autograd.gradgradcheck(entmax, (x, alpha))


def test_an_alpha_for_each_row_is_that_of_the_row():
    x, alphas = _scores(5, 3, 20), [1.0, 1.3, 1.5, 2.0, 2.5]
    found = entmax(x, torch.tensor(alphas, dtype=torch.float64)[:, None, None])
    for row, alpha in enumerate(alphas):
        assert torch.allclose(found[row], entmax(x[row], alpha), atol=1e-12)
    with pytest.raises(ValueError, match="size 1 along dimension"):
        entmax(x, torch.full((20,), 1.5))


def test_forward_mode_and_transforms():
    x, tangent = _scores(4, 15), _scores(4, 15, seed=1)
    _, moved = torch.func.jvp(lambda x: entmax(x, 1.5), (x,), (tangent,))
    _, back = torch.func.vjp(lambda x: entmax(x, 1.5), x)
    assert torch.allclose(moved, back(tangent)[0], atol=1e-12)  # the Jacobian is symmetric
    assert torch.allclose(torch.func.vmap(lambda row: entmax(row, 1.5))(x), entmax(x, 1.5))
    alphas = torch.tensor([1.5, 1.0, 2.5, 2.0], dtype=torch.float64)  # some by the fast search, some not
    rows = [entmax(row, float(alpha)) for row, alpha in zip(x, alphas, strict=True)]
    assert torch.allclose(torch.func.vmap(entmax)(x, alphas), torch.stack(rows))
    slopes = torch.func.vmap(torch.func.grad(lambda row: entmax(row, 2.0)[0]))(x)
    whole = x.clone().requires_grad_()
    assert torch.allclose(slopes, torch.autograd.grad(sparsemax(whole)[:, 0].sum(), whole)[0])


@pytest.mark.parametrize("alpha", ALPHAS)
def test_excluded_scores_and_empty_rows(alpha):
    x = _scores(4, 20, spread=2.0)
    mask = torch.rand(4, 20, generator=torch.Generator().manual_seed(2)) < 0.6
    mask[1] = False
    x[0, 5] = -torch.inf
    x = x.requires_grad_()
    found = entmax(x, alpha, mask=mask)
    upstream = _scores(4, 20, seed=3)
    (slope,) = torch.autograd.grad((found * upstream).sum(), x)
    assert (found[1] == 0).all()
    assert (slope[1] == 0).all()
    for row in (0, 2, 3):
        keep = mask[row] & (x[row] != -torch.inf)
        part = x[row, keep].detach().requires_grad_()
        alone = entmax(part, alpha)
        assert torch.allclose(found[row, keep], alone, atol=1e-12)
        assert (found[row, ~keep] == 0).all()
        assert torch.allclose(slope[row, keep], torch.autograd.grad((alone * upstream[row, keep]).sum(), part)[0])
        assert (slope[row, ~keep] == 0).all()


@pytest.mark.parametrize("alpha", [1.5, 2.0, 1.25])
@pytest.mark.parametrize("spread", [0.01, 1.0])
def test_a_constant_on_all_scores_changes_nothing(monkeypatch, alpha, spread):
    monkeypatch.undo()
    steps = (_scores(3, 3000, spread=spread * 64, dtype=torch.float32)).round() / 64  # exact beside 1e5
    near, far = entmax(steps, alpha), entmax(steps + 2.0**17, alpha)
    assert torch.allclose(near, far, rtol=1e-6, atol=1e-9)
    assert torch.isfinite(entmax(torch.full((1, 3000), 1e8), alpha)).all()


def test_what_it_refuses():
    with pytest.raises(ValueError, match="floating point"):
        entmax(torch.zeros(3, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"`alpha` must lie in \[1, 2\.5\]"):
        entmax(torch.zeros(2, 0), torch.tensor(0.5))
    for alpha in (0.9, 2.6, float("nan"), float("inf")):
        with pytest.raises(ValueError, match=r"`alpha` must lie in \[1, 2\.5\]"):
            entmax(torch.zeros(3), alpha)
    assert entmax(torch.tensor(3.0), 1.5) == 1


def test_two_scores_at_the_border_of_the_support_sum_to_one_up_to_the_largest_alpha():
    for alpha in (2.0, 2.25, 2.5):
        gaps = (1 + torch.linspace(-0.3, 1e-3, 400, dtype=torch.float64)) / (alpha - 1)
        x = torch.stack([torch.zeros_like(gaps), -gaps], 1)
        assert float((entmax(x, alpha).sum(1) - 1).abs().max()) < 1e-6
        assert float((entmax(x.float(), alpha).sum(1) - 1).abs().max()) < 1e-6


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize("alpha", [1.5, 2.0])
@pytest.mark.parametrize("spread", [4.0, 0.01])
def test_memory_of_both_passes_is_at_most_three_copies_of_the_input(alpha, spread):
    code = f"""
import re, torch
from pathlib import Path
from unembed.ops import entmax
def resident(name): return int(re.findall(name + r":\\s*(\\d+)", Path("/proc/self/status").read_text())[0])
x = torch.randn(1024, 16384) * {spread}
x.requires_grad_()
up = torch.randn(1024, 16384)
warm = torch.randn(2, 4096, requires_grad=True)
torch.autograd.grad(entmax(warm, {alpha}), warm, torch.ones(2, 4096))
Path("/proc/self/clear_refs").write_text("5")
before = resident("VmRSS")
torch.autograd.grad(entmax(x, {alpha}), x, up)
print((resident("VmHWM") - before) * 1024 / x.nbytes)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 1.5 < float(done.stdout) < 3


def test_what_is_no_number_stays_so_in_its_row():
    x = _scores(3, 40, dtype=torch.float32)
    x[1, 3], x[2, 7] = torch.nan, torch.inf
    for alpha in (1.5, 2.0):
        found = entmax(x, alpha)
        assert found[1:].isnan().all()
        assert torch.allclose(found[0], entmax(x[:1], alpha)[0], atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("alpha", [1.2, 1.5, 2.0])
def test_case_l24_half_precision_is_rounded_once(dtype, alpha):
    for x in (torch.zeros(1, 50000, dtype=dtype), _scores(4, 3000, spread=1.0, dtype=dtype)):
        found, right = entmax(x, alpha), _definition(x, alpha, -1).to(dtype)
        assert found.dtype == dtype
        apart = (found.double() - right.double()).abs()
        assert (apart <= torch.finfo(dtype).eps * right.double() + 1e-12 * (dtype == torch.bfloat16) + 6e-8).all()


def test_half_precision_gradients_are_within_the_rounding_of_the_result():
    for dtype in (torch.float16, torch.bfloat16):
        x = _scores(4, 300, dtype=dtype).requires_grad_()
        upstream = _scores(4, 300, seed=1, dtype=dtype)
        (found,) = torch.autograd.grad((entmax(x, 1.5) * upstream).sum(), x)
        wide = x.detach().double().requires_grad_()
        (right,) = torch.autograd.grad((entmax(wide, 1.5) * upstream.double()).sum(), wide)
        assert (found.double() - right).abs().max() <= 2 * torch.finfo(dtype).eps * right.abs().max()


def test_strides_empty_input_and_memory_of_the_caller():
    x = _scores(6, 40).T[::2]
    kept = x.clone()
    assert torch.allclose(entmax(x, 1.5), entmax(kept, 1.5))
    assert torch.equal(x, kept)
    assert entmax(torch.zeros(0, 5), 1.5).shape == (0, 5)
    assert entmax(torch.zeros(3, 0), 2.0).shape == (3, 0)
    gone = torch.zeros(0, 5, requires_grad=True)
    assert torch.autograd.grad(entmax(gone, 1.5).sum(), gone)[0].shape == (0, 5)


def test_a_graph_that_is_kept_and_batched_gradients():
    x = _scores(3, 20).requires_grad_()
    p = entmax(x, 1.5)
    ups = torch.stack([_scores(3, 20, seed=1), _scores(3, 20, seed=2)])
    one = [torch.autograd.grad(p, x, up, retain_graph=True)[0] for up in ups]
    (both,) = torch.autograd.grad(p, x, ups, is_grads_batched=True)
    assert torch.allclose(torch.stack(one), both, atol=1e-12)


@pytest.mark.parametrize("rows", [1, 7])
def test_one_row_of_many_candidates_beside_rows_of_few(rows):
    x = _scores(rows, 64, spread=6.0)
    x[0] = 0.01 * x[0]
    for alpha in (1.5, 2.0):
        assert torch.allclose(entmax(x, alpha), _definition(x, alpha, -1), rtol=1e-9, atol=1e-13)


@pytest.mark.compile
@pytest.mark.parametrize("alpha", [1.0, 1.5, 2.0, 2.5])
def test_compiles_as_one_graph(alpha):
    x = _scores(3, 40, spread=2.0).requires_grad_()
    upstream = _scores(3, 40, seed=1)
    found = torch.compile(entmax, fullgraph=True, backend="aot_eager")(x, alpha)
    assert torch.allclose(found, entmax(x, alpha), atol=1e-11)
    slopes = [torch.autograd.grad((p * upstream).sum(), x)[0] for p in (found, entmax(x, alpha))]
    assert torch.allclose(*slopes, atol=1e-10)


@pytest.mark.compile
def test_the_node_that_stands_for_the_search():
    x = _scores(3, 9)
    x = x - x.amax(1, keepdim=True)
    one = torch.full((1, 1), 0.5, dtype=torch.float64)
    torch.library.opcheck(searched, (x, x == -torch.inf, one, 40))
    mapped = torch.func.vmap(searched, in_dims=(0, 0, None, None))(x[:, None], (x == -torch.inf)[:, None], one, 40)
    assert torch.allclose(mapped[:, 0], searched(x, x == -torch.inf, one, 40))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("alpha", [1.3, 1.5, 2.0])
def test_on_a_gpu(monkeypatch, alpha):
    monkeypatch.undo()
    x = _scores(5, 5000, spread=2.0, dtype=torch.float32)
    assert torch.allclose(entmax(x.cuda(), alpha).cpu(), entmax(x, alpha), rtol=1e-5, atol=1e-8)
