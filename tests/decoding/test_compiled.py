"""The compiled ways: the same draws and lists as the plain ones, their numbers against float64, bad rows, no numba."""

import math
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.decoding import Beam, _beam_search, _compiled, generate, sample
from unembed.ops import Stream, uniforms

pytest.importorskip("numba")
from unembed.decoding import _kernels

INF = math.inf
SIZES = [1, 2, 255, 256, 257, 600, 3000]


def scores_of(rows, size, seed, *, spread=2.0, whole=False):
    """Normal scores, some of them excluded, some equal."""
    random = torch.Generator().manual_seed(seed)
    found = spread * torch.randn(rows, size, generator=random)
    found[torch.rand(found.shape, generator=random) < 0.1] = -INF
    found[:, size // 2] = 0.25
    return found.round() if whole else found


def assert_the_same(found, wanted, *, but=1):
    """Equal draws, but for numbers that fall on a border, where the last bits of weights decide."""
    assert found.shape == wanted.shape
    assert int((found != wanted).sum()) <= but


@settings(deadline=None, max_examples=150)
@given(
    size=st.sampled_from(SIZES),
    kind=st.fixed_dictionaries({"spread": st.sampled_from([0.01, 1.0, 5.0, 60.0]), "whole": st.booleans()}),
    offset=st.sampled_from([0.0, -1e4, 3e7]),
    temperature=st.sampled_from([0, 1e-30, 0.3, 1, 2.5, 1e30, 1e39, 1e300, INF]),
    top_k=st.sampled_from([None, 1, 7, 130]),
    top_p=st.sampled_from([None, 0.0, 0.3, 0.95]),
    min_p=st.sampled_from([None, 0.05, 1.0]),
    joint=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_draws_are_those_of_the_plain_way(plainly, **options):
    size, seed, offset, kind = (options.pop(name) for name in ("size", "seed", "offset", "kind"))
    scores = scores_of(40, size, seed, **kind) + offset
    seeds, positions = torch.arange(40) + seed, torch.arange(40) % 7

    def run():
        return sample(scores, seeds=seeds, positions=positions, **options)

    assert_the_same(run(), plainly(run))


@pytest.mark.parametrize(
    "options",
    [{}, {"top_p": 0.6}, {"min_p": 0.02}, {"top_k": 40, "top_p": 0.9}, {"temperature": 0.7, "top_p": 0.1}],
    ids=str,
)
def test_many_draws_are_those_of_the_plain_way(plainly, options):
    scores = scores_of(10, 1000, 7).repeat(2000, 1)

    def run():
        return sample(scores, seeds=torch.arange(20_000), **options)

    assert_the_same(run(), plainly(run), but=4)


@pytest.mark.parametrize(
    "kind", [torch.float32, torch.float64, torch.bfloat16, torch.float16, "with a gradient"], ids=str
)
@pytest.mark.parametrize("seed", range(3))
def test_draws_with_settings_of_each_row_are_those_of_the_plain_way(plainly, seed, kind):
    random = torch.Generator().manual_seed(seed)
    scores = scores_of(200, 600, seed)

    def each(values):
        found = torch.tensor(values)[torch.randint(len(values), (200,), generator=random)]
        return found.requires_grad_() if kind == "with a gradient" else found.to(kind)

    options = {
        "temperature": each([0.0, 0.5, 1.0, 4.0, INF]),
        "top_k": torch.tensor([1, 3, 60, 600, 10**6])[torch.randint(5, (200,), generator=random)],
        "top_p": each([-0.1, 0.2, 0.9, 1.0, 1.5]),
        "min_p": each([0.0, 0.1, 0.7, 1.0]),
    }

    def run():
        return sample(scores, seeds=torch.arange(200), **options)

    assert_the_same(run(), plainly(run))
    options["top_k"] = 3
    assert_the_same(run(), plainly(run))


def test_draws_of_a_generator_are_those_of_the_plain_way(plainly):
    scores = scores_of(50, 300, 1)

    def run():
        generator = torch.Generator().manual_seed(3)
        return torch.cat([sample(scores, top_p=0.7, generator=generator) for _ in range(4)])

    assert_the_same(run(), plainly(run))


def test_the_default_device_is_not_that_of_the_scores():
    wanted = sample(torch.zeros(2, 9), generator=torch.Generator().manual_seed(1))
    scores = torch.zeros(2, 9)
    torch.manual_seed(1)
    torch.set_default_device("meta")
    try:
        found = sample(scores)
    finally:
        torch.set_default_device("cpu")
    assert found.tolist() == wanted.tolist()


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 0.5, 1 - 2.0**-52, 1 - 2.0**-53])
def test_a_number_at_the_end_of_its_range_finds_a_class(uniform):
    """Rounding may leave the running sum below the whole; a class of probability 0 is no answer."""
    maxima, sums = np.empty(2, np.int32), np.empty(2)
    for seed in range(300):
        row = np.append(scores_of(1, 300, seed, spread=5.0)[0].numpy(), np.float32(-INF))
        peak = _kernels._value(_kernels._scan(row, maxima)[0])
        settings_ = (peak, np.float32(1), np.float32(4e-38))
        total = _kernels._sums(row, maxima, sums, *settings_)
        found = _kernels._place(row, sums, total, uniform, *settings_, np.float32(-INF), 0)
        assert 0 <= found < len(row)
        assert row[found] > -INF


@pytest.mark.parametrize("seed", [17295355239141486029])
def test_a_seed_whose_number_is_the_largest_one_finds_a_class(plainly, seed):
    assert uniforms([seed]).tolist() == [1 - 2.0**-53]
    for start in range(40):
        scores = 5 * torch.randn(1, 100, generator=torch.Generator().manual_seed(start))
        assert sample(scores, seeds=[seed]).item() >= 0
        assert sample(scores, seeds=[seed], top_p=0.5).item() >= 0


def test_equal_scores_go_by_the_lowest_index_where_denormals_are_zero():
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot take denormals as 0")
    try:
        found = sample(torch.zeros(200, 300), top_p=0.3, seeds=range(200))
    finally:
        torch.set_flush_denormal(False)
    assert int(found.max()) < 90


@pytest.mark.parametrize(
    "make", ["strided", "transposed", "expanded", "three dimensions", "bfloat16", "with a gradient"]
)
def test_scores_of_any_layout(plainly, make):
    scores = scores_of(6, 400, 2)
    made = {
        "strided": scores[:, ::2],
        "transposed": scores.T[:300],
        "expanded": scores[:1].expand(5, -1),
        "three dimensions": scores.view(2, 3, 400),
        "bfloat16": scores.bfloat16(),
        "with a gradient": scores.clone().requires_grad_(),
        "negative bit": torch.complex(scores, torch.where(scores.isfinite(), scores, 0.0)).conj().imag,
    }[make]
    options = {"top_k": 20, "seeds": torch.arange(math.prod(made.shape[:-1]))}
    before = made.detach().clone()
    found = sample(made, **options)
    assert found.shape == made.shape[:-1]
    assert torch.equal(found, plainly(lambda: sample(made, **options)))
    assert torch.equal(found, sample(made.detach().contiguous(), **options))
    assert torch.equal(made, before)


@pytest.mark.parametrize("options", [{}, {"top_k": 3}, {"top_p": 0.5}, {"temperature": 0}, {"min_p": 0.1}], ids=str)
@pytest.mark.parametrize("bad", [math.nan, -math.nan, INF, None], ids=["nan", "-nan", "inf", "nothing"])
@pytest.mark.parametrize("place", [0, 150, 299])
def test_a_bad_row_is_refused_with_the_words_of_the_plain_way(plainly, options, bad, place):
    scores = scores_of(4, 300, 3)
    if bad is None:
        scores[2] = -INF
    else:
        scores[2, place] = math.copysign(1.0, bad) * abs(bad) if math.isinf(bad) else bad
    if bad is not None and math.isnan(bad) and math.copysign(1.0, bad) < 0:
        scores.view(torch.int32)[2, place] = -4194304  # the bits of the NaN that 0 / 0 is on most processors
    told = []
    for run in (lambda: sample(scores, **options), lambda: plainly(lambda: sample(scores, **options))):
        with pytest.raises(ValueError, match=r"^Row 2 of `scores`") as caught:
            run()
        told.append(str(caught.value))
    assert told[0] == told[1]


@settings(deadline=None, max_examples=100)
@given(
    size=st.sampled_from(SIZES),
    part=st.floats(0, 1),
    kind=st.fixed_dictionaries({"spread": st.sampled_from([0.02, 1.0, 30.0]), "whole": st.booleans()}),
    seed=st.integers(0, 1000),
)
def test_the_largest_and_their_sums(size, part, kind, seed):
    scores = scores_of(3, size, seed, **kind)
    scores[:, ::5] *= 0.0  # some of them -0
    scores = scores.nan_to_num(nan=-INF, neginf=-INF)
    scores[:, size // 2] = 0.25
    k = max(1, int(part * size))
    found = _compiled.best(scores, k, sums=True)
    wanted = scores.sort(dim=-1, descending=True, stable=True)
    assert found.ids.tolist() == wanted.indices[:, :k].tolist()
    assert found.values.tolist() == wanted.values[:, :k].tolist()
    exact = torch.logsumexp(scores.double(), -1) - scores.amax(-1).double()
    assert np.abs(found.log_sums - exact.numpy()).max() < 16 * 2.0**-24  # of exponentials, and of sums of 1,024


def test_rows_without_a_sum():
    scores = torch.randn(3, 300)
    scores[1] = -INF
    assert _compiled.best(scores, 4, sums=True) is None
    assert _compiled.best(scores, 4).ids[1].tolist() == [0, 1, 2, 3]
    scores[1, 7] = math.nan
    assert _compiled.best(scores, 4) is None


def test_the_exponential_is_within_two_roundings_and_falls_to_almost_nothing():
    x = -(86 * np.random.default_rng(0).random(20_000)).astype(np.float32)
    x[:3] = 0.0, -0.0, -86.0
    found = np.array([_kernels._exp(one) for one in x])
    assert np.abs(found / np.exp(x.astype(np.float64)) - 1).max() < 2 * 2.0**-24
    assert found[:2].tolist() == [1.0, 1.0]
    for far in (-87.0, -1e4, -3e38, -INF):
        assert 0 < _kernels._exp(np.float32(far)) < 1.7e-38


def test_keys_are_in_the_order_of_values():
    x = np.array([-INF, -3.4e38, -1.0, -1e-45, 0.0, 1e-45, 1.0, 3.4e38, INF], dtype=np.float32)
    keys = [_kernels._key(one) for one in x]
    assert keys == sorted(set(keys))
    assert _kernels._key(np.float32(-0.0)) == _kernels._key(np.float32(0.0))
    assert [_kernels._value(np.int32(key)) for key in keys] == x.tolist()


def test_uniform_numbers_are_those_of_the_other_ways():
    seeds, places = np.array([0, 1, 2**64 - 1, 12345], np.uint64), np.array([0, 7, 2**63, 2**64 - 1], np.uint64)
    for attempt in (0, 1, 40):
        wanted = uniforms(seeds, places, stream=Stream.TOKEN, attempt=attempt)
        found = [_kernels._uniform(seed, place, attempt) for seed, place in zip(seeds, places, strict=True)]
        assert found == wanted.tolist()


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_parts_in_threads_give_what_one_call_gives(monkeypatch, rows):
    scores = scores_of(rows, 300, 5)
    options = {"top_k": torch.arange(rows) + 1, "seeds": torch.arange(rows), "positions": torch.arange(rows)}
    whole, best = sample(scores, **options), _compiled.best(scores, 5, sums=True)
    shared = sample(scores, top_p=0.9, seeds=range(rows))
    monkeypatch.setattr(_compiled, "_SPLIT", 200)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
    assert torch.equal(sample(scores, **options), whole)
    assert torch.equal(sample(scores, top_p=0.9, seeds=range(rows)), shared)
    for one, other in zip(_compiled.best(scores, 5, sums=True), best, strict=True):
        assert np.array_equal(one, other)
    scores[-1] = -INF
    with pytest.raises(ValueError, match=f"Row {rows - 1} of `scores` has no finite score"):
        sample(scores, **options)


@pytest.mark.parametrize("penalty", [-1.0, 0.0, 1.0])
def test_beams_are_those_of_the_plain_way(plainly, toy, penalty):
    function = toy(40, 1)
    prompts = torch.tensor([[3, 4], [5, 6]])

    def run():
        return generate(
            lambda ids: function(ids).float(),
            prompts,
            strategy=Beam(4, length_penalty=penalty, returns=3),
            max_new_tokens=8,
            eos_ids=[1, 2],
        )

    found, wanted = run(), plainly(run)
    assert torch.equal(found.tokens, wanted.tokens)
    assert found.finish == wanted.finish
    torch.testing.assert_close(found.scores, wanted.scores, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.log_probs, wanted.log_probs, rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=200)
@given(
    sizes=st.lists(st.integers(1, 4), min_size=1, max_size=4),
    shape=st.tuples(st.integers(0, 2), st.integers(1, 9)),
    width=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_the_best_of_each_prompt_are_those_of_a_sort(sizes, shape, width, seed):
    random, ends = np.random.default_rng(seed), shape[0]
    owner = np.repeat(np.arange(len(sizes)) * 3, sizes)
    cost = random.integers(0, 6, (len(owner), sum(shape))).astype(float)
    cost[:, ends:].sort(axis=1)
    cost[random.random(cost.shape) < 0.2] = INF  # ends among the best tokens, and what is not allowed
    rows, columns = _compiled.ranked(cost, ends, owner, width)
    for found, other in zip((rows, columns), _beam_search._ranked(cost, ends, owner, width), strict=True):
        assert found.tolist() == other.tolist()
    worst = random.integers(-4, 1, owner[-1] + 1).astype(float)
    both = [one._ends_above if one is _beam_search else one.ends_above for one in (_beam_search, _compiled)]
    above, others = (one(cost, ends, 0.5, worst, owner) for one in both)
    assert [one.tolist() for one in above] == [one.tolist() for one in others]
    tokens, total = random.integers(0, 9, cost.shape), random.random(len(cost))
    (one, alive), (other, lives) = (f(total, -cost, tokens, ends) for f in (_compiled.costs, _beam_search._costs))
    assert np.array_equal(one, other)
    assert alive == lives
    wanted = []
    for one in np.unique(owner):
        own = [(cost[i, j], i, j) for i in np.flatnonzero(owner == one) for j in range(ends, sum(shape))]
        wanted += sorted(each for each in own if each[0] < INF)[:width]
    assert list(zip(rows, columns, strict=True)) == [(i, j) for _, i, j in wanted]


def test_log_probabilities_of_some_classes():
    scores = scores_of(4, 300, 8) + 1e4
    found = _compiled.best(scores, 3, sums=True)
    ids = np.array([[5, 299, 0, 5]] * 4)
    peaks, sums = torch.from_numpy(found.values[:, :1]), torch.from_numpy(found.log_sums[:, None])
    own = _compiled.log_probs(scores, ids, peaks, sums)
    exact = torch.log_softmax(scores.double(), -1).gather(1, torch.from_numpy(ids))
    torch.testing.assert_close(torch.from_numpy(own), exact, rtol=1e-6, atol=1e-6)
    assert (_compiled.log_probs(scores, ids, peaks - 1, 0 * sums) <= 0).all()


def test_functions_are_compiled_where_nothing_can_be_kept(monkeypatch):
    real = _kernels.njit

    def njit(*, cache=False, **options):
        if cache:
            raise RuntimeError("cannot cache function 'f': no locator available")
        return real(**options)

    monkeypatch.setattr(_kernels, "njit", njit)

    @_kernels._compiled
    def twice(x):
        return 2 * x

    assert twice(4) == 8


SCRIPT = """
import importlib.util, sys, torch
from unembed.decoding import _compiled, sample
real = importlib.util.find_spec
{before}
print(sample(torch.zeros(1, 9), seeds=[3]).tolist(), _compiled.kernels())
print("llvmlite" in sys.modules)
"""


@pytest.mark.parametrize("how", ["switched off", "not installed", "of another NumPy", "not compiling"])
def test_without_numba_decoding_goes_on(how):
    before = {
        "not installed": "importlib.util.find_spec = lambda name: None if name == 'numba' else real(name)",
        "of another NumPy": "importlib.util.find_spec = lambda name: 'there' if name == 'numba' else real(name)\n"
        "sys.modules['numba'] = None",
    }.get(how, "")
    switch = {"switched off": {"UNEMBED_FAST": "0"}, "not compiling": {"NUMBA_DISABLE_JIT": "1"}}.get(how, {})
    environment = {**os.environ, **switch}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(before=before)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    wanted = sample(torch.zeros(1, 9), seeds=[3]).tolist()
    assert done.stdout.splitlines() == [f"{wanted} None", str(how == "not compiling")]
    assert ("decoding goes on without it" in done.stderr) == (how == "of another NumPy")
