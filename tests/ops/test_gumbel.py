"""Gumbel noise and what is drawn by it: distributions, straight-through gradients, extreme draws, edges."""

import itertools
import math

import pytest
import torch
from scipy import stats

from unembed.ops._gumbel import gumbel_noise, gumbel_softmax, gumbel_topk
from unembed.ops._softmax import softmax
from unembed.testing._checks_decode import chi_square

INF = torch.inf
DRAWS = 100_000
DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
SCORES = torch.tensor([1.0, -0.5, -INF, 0.3, 2.0, -3.0])


def _generator(seed=0):
    return torch.Generator().manual_seed(seed)


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=_generator(seed), dtype=torch.float64).to(dtype)


def _fits(counts, probabilities):
    """Chi-square at 1e-4, and nothing of probability 0."""
    return chi_square(counts, probabilities) > 1e-4


@pytest.mark.parametrize("options", [{}, {"temperature": 0.0}, {"temperature": 3.0}, {"hard": True}])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_largest_entry_is_a_draw_from_softmax(options, dtype):
    x = SCORES.to(dtype).expand(DRAWS, 6)
    drawn = gumbel_softmax(x.float(), generator=_generator(), **options).argmax(1)
    assert _fits(drawn.bincount(minlength=6), softmax(x[0].double()))
    if options.get("hard"):
        one_hot = gumbel_softmax(x, generator=_generator(), **options)
        assert torch.equal(one_hot.argmax(1), drawn)
        assert torch.equal(one_hot, torch.nn.functional.one_hot(drawn, 6).to(dtype))


def test_the_noise_has_the_moments_and_the_tails_of_a_gumbel():
    noise = gumbel_noise(torch.empty(DRAWS), _generator())
    assert noise.dtype == torch.float64
    assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-4


def test_pairs_are_drawn_without_replacement():
    p = softmax(SCORES.double())
    drawn, values = gumbel_topk(SCORES.expand(DRAWS, 6), 2, generator=_generator(3))
    pairs = list(itertools.permutations(range(6), 2))
    right = torch.tensor([float(p[i] * p[j] / (1 - p[i])) for i, j in pairs])
    counts = torch.tensor([int(((drawn[:, 0] == i) & (drawn[:, 1] == j)).sum()) for i, j in pairs])
    assert int(counts.sum()) == DRAWS
    assert _fits(counts, right.double())
    assert (values[:, 0] >= values[:, 1]).all()
    # The largest perturbed log-probability is a standard Gumbel itself, whatever was drawn.
    assert stats.kstest(values[:, 0].double().numpy(), "gumbel_r").pvalue > 1e-4


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [0, (1 << 52) - 1])
def test_l25_rows_are_finite_at_the_extreme_draws(dtype, bits, monkeypatch):
    x = torch.tensor([[1.0, 2.0, -INF], [0.0, 0.0, 0.0]], dtype=dtype, requires_grad=True)
    monkeypatch.setattr(torch, "randint", lambda high, size, **_: torch.full(size, bits))
    for temperature in (0.0, 1e-3, 1.0, math.inf):
        for hard in (False, True):
            found = gumbel_softmax(x, temperature, hard=hard)
            assert torch.allclose(found.sum(1).float(), torch.ones(2), atol=4 * torch.finfo(dtype).eps)
            (gradient,) = torch.autograd.grad(found[:, 0].sum(), x)
            assert gradient.isfinite().all()
    assert gumbel_softmax(x, 0.0).tolist() == [[0, 1, 0], [1, 0, 0]]
    assert gumbel_topk(x, 2)[1].isfinite().all()
    extreme = -math.log(-math.log1p(-(bits + 0.5) / (1 << 52)))
    assert gumbel_noise(x).unique().tolist() == [pytest.approx(extreme, rel=1e-12)]
    assert extreme == pytest.approx(36.74 if bits == 0 else -3.603, abs=1e-2)


def test_a_class_of_probability_1e_9_can_win(monkeypatch):
    """A draw with E = 2^-34: in float32 the least is 2^-24, and the noise ends at 16.6."""
    x = torch.tensor([0.0, math.log(1e-9)])
    bits = torch.tensor([1 << 51, 1 << 18])  # E of log 2 for the large one
    monkeypatch.setattr(torch, "randint", lambda high, size, **_: bits.expand(size))
    assert gumbel_noise(x).tolist() == pytest.approx([-math.log(math.log(2)), 34 * math.log(2)], rel=1e-4)
    assert gumbel_softmax(x, 0.0).tolist() == [0, 1]
    assert gumbel_topk(x, 1)[0].tolist() == [1]


def test_draws_use_all_their_bits():
    drawn = torch.expm1(-torch.exp(-gumbel_noise(torch.empty(1000), _generator()))).neg() * 2**30
    assert (drawn - drawn.round()).abs().mean() > 0.2  # float32 draws would be whole numbers


def test_a_generator_makes_draws_reproducible_whatever_the_strides():
    x = _randn(5, 7)
    for of in (gumbel_softmax, lambda x, **options: gumbel_topk(x, 3, **options)[1]):
        one, two = (of(x, generator=_generator(4)) for _ in range(2))
        assert torch.equal(one, two)
        assert not torch.equal(one, of(x, generator=_generator(5)))
        strided = of(x.T.contiguous().T, generator=_generator(4))
        assert torch.allclose(one, strided, rtol=1e-12)
    torch.manual_seed(0)
    first = gumbel_softmax(x)
    torch.manual_seed(0)
    assert torch.equal(first, gumbel_softmax(x))


def test_derivatives_of_the_relaxed_draw():
    x, t = _randn(3, 4).requires_grad_(), torch.tensor([[0.5], [1.0], [3.0]], dtype=torch.float64, requires_grad=True)

    def of(x, t):
        return gumbel_softmax(x.T, t.T, dim=0, generator=_generator(1))

    assert torch.autograd.gradcheck(of, (x, t), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(of, (x, t))


def test_the_straight_through_gradient_is_that_of_the_relaxed_draw():
    x, t = _randn(6, 5).requires_grad_(), torch.full((6, 1), 0.7, dtype=torch.float64, requires_grad=True)
    upstream = _randn(6, 5, seed=2)
    soft, hard = (gumbel_softmax(x, t, hard=hard, generator=_generator(1)) for hard in (False, True))
    assert torch.equal(hard, torch.nn.functional.one_hot(soft.argmax(1), 5).double())
    found, right = (torch.autograd.grad((one * upstream).sum(), (x, t), create_graph=True) for one in (hard, soft))
    for one, other in zip(found, right, strict=True):
        assert torch.equal(one, other)
        assert other.abs().max() > 0
    second = [torch.autograd.grad(one[0].square().sum(), x)[0] for one in (found, right)]
    assert torch.equal(*second)


def test_derivatives_of_the_perturbed_log_probabilities():
    x = _randn(3, 5).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: gumbel_topk(x, 2, generator=_generator())[1], x)
    assert torch.autograd.gradgradcheck(lambda x: gumbel_topk(x, 2, generator=_generator())[1], x)


def test_an_offset_changes_nothing():
    x = torch.tensor([[0.0, 8.0, -8.0, 0.0]])
    for of in (gumbel_softmax, lambda x, **options: gumbel_topk(x, 3, **options)[1]):
        assert torch.equal(of(x, generator=_generator()), of(x + 1e8, generator=_generator()))


def test_edges_are_those_of_softmax():
    x = torch.tensor([[-INF, -INF, -INF], [1.0, torch.nan, -INF], [0.0, -INF, -INF]], requires_grad=True)
    for hard in (False, True):
        found = gumbel_softmax(x, hard=hard)
        assert found[0].tolist() == [0, 0, 0]
        assert found[1, :2].isnan().all()
        assert found[2].tolist() == [1, 0, 0]
        (gradient,) = torch.autograd.grad(found[[0, 2]].sum(), x)
        assert torch.equal(gradient[[0, 2]], torch.zeros(2, 3))
    drawn, values = gumbel_topk(x, 2)
    assert drawn.tolist() == [[-1, -1], [-1, -1], [0, -1]]
    assert values[0].tolist() == [-INF, -INF]
    assert values[1].isnan().all()
    assert values[2, 1] == -INF
    mask = torch.tensor([True, False, True])
    assert gumbel_softmax(torch.zeros(50, 3), mask=mask, hard=True)[:, 1].sum() == 0
    assert set(gumbel_topk(torch.zeros(50, 3), 2, mask=mask)[0].flatten().tolist()) == {0, 2}
    assert gumbel_softmax(torch.tensor(3.0)).item() == 1
    assert gumbel_topk(torch.tensor([2.0], dtype=torch.float16), 1)[1].dtype == torch.float32
    for shape in ((0,), (0, 3), (3, 0)):
        assert gumbel_softmax(torch.zeros(shape), 0.0, hard=True).shape == shape
    for k in (0, 4):
        with pytest.raises(ValueError, match=rf"`k` must lie in \[1, 3\], got {k}"):
            gumbel_topk(x, k)
    with pytest.raises(ValueError, match="`temperature` must be at least 0"):
        gumbel_softmax(x, -1.0)


def test_any_dimension():
    x = _randn(4, 5, 3)
    for dim in range(-3, 3):
        assert torch.allclose(gumbel_softmax(x, dim=dim).sum(dim), torch.ones((), dtype=torch.float64))
        drawn, values = gumbel_topk(x, 2, dim=dim)
        assert drawn.shape == values.shape == torch.Size(2 if i == dim % 3 else n for i, n in enumerate(x.shape))
        assert (drawn.select(dim, 0) != drawn.select(dim, 1)).all()


def test_torch_func():
    x = _randn(1, 4).expand(6, 4).contiguous()
    different = torch.func.vmap(gumbel_softmax, randomness="different")(x)
    same = torch.func.vmap(gumbel_softmax, randomness="same")(x)
    assert len(different[:, 0].unique()) == 6
    assert len(same[:, 0].unique()) == 1
    assert torch.func.vmap(lambda x: gumbel_topk(x, 2), randomness="different")(x)[0].shape == (6, 2)
    for hard in (False, True):

        def of(x, hard=hard):
            return gumbel_softmax(x, 0.5, hard=hard, generator=_generator(2))

        leaf = x.clone().requires_grad_()
        (right,) = torch.autograd.grad((of(leaf) * x).sum(), leaf)
        assert torch.allclose(torch.func.grad(lambda y, of=of: (of(y) * x).sum())(x), right)
        _, tangent = torch.func.jvp(lambda y, of=of: (of(y) * x).sum(), (x,), (torch.ones_like(x) * x,))
        assert torch.allclose(tangent, (right * x).sum())


@pytest.mark.compile
def test_compiles_whole_and_draws_with_all_bits():
    compiled = torch.compile(lambda x: gumbel_softmax(x, hard=True), fullgraph=True)
    torch.manual_seed(0)
    drawn = compiled(SCORES.expand(DRAWS, 6))
    assert _fits(drawn.argmax(1).bincount(minlength=6), softmax(SCORES.double()))
    noise = torch.compile(gumbel_noise, fullgraph=True)(torch.empty(1000))
    whole = torch.expm1(-torch.exp(-noise)).neg() * 2**30
    assert (whole - whole.round()).abs().mean() > 0.2
    ids, _ = torch.compile(lambda x: gumbel_topk(x, 2), fullgraph=True)(SCORES.expand(50, 6))
    assert (ids[:, 0] != ids[:, 1]).all()
    assert not (ids == 2).any()
