"""Seeded uniform numbers against the same in whole numbers of Python, and how they lie; the public case D22."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import chisquare

from unembed.ops import Noise, Stream, uniforms
from unembed.ops._seeds import generated, words

WORD = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15


def by_hand(seed, position, stream, attempt):
    """The definition: words folded through the finaliser of SplitMix64, the upper 53 bits as a part of one."""

    def mixed(state):
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & WORD
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB & WORD
        return state ^ (state >> 31)

    state = mixed((seed + GOLDEN) & WORD)
    state = mixed(state ^ mixed((position + 2 * GOLDEN) & WORD))
    state = mixed(state ^ (stream << 32 | attempt))
    return (state >> 11) / 2**53


SEED = st.integers(-(2**63), 2**64 - 1)


@given(
    rows=st.lists(st.tuples(SEED, SEED), max_size=5), stream=st.sampled_from(list(Stream)), attempt=st.integers(0, 99)
)
def test_is_the_definition(rows, stream, attempt):
    seeds, positions = [seed for seed, _ in rows], [position for _, position in rows]
    found = uniforms(seeds, positions, stream=stream, attempt=attempt)
    assert found.dtype == np.float64
    assert found.tolist() == [by_hand(seed & WORD, place & WORD, stream, attempt) for seed, place in rows]
    assert ((found >= 0) & (found < 1)).all()


def test_the_finaliser_is_that_of_splitmix64():
    # First outputs of the generator seeded with 0: of its state after one and two steps of the golden ratio.
    state, outputs = 0, []
    for _ in range(2):
        state = (state + GOLDEN) & WORD
        mixed = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 & WORD
        mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB & WORD
        outputs.append(mixed ^ (mixed >> 31))
    assert outputs == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F4]


def test_a_position_of_none_is_0_and_signs_do_not_matter():
    assert uniforms([3, -1]).tolist() == uniforms([3, 2**64 - 1], [0, 0]).tolist()


@pytest.mark.parametrize(
    "given",
    [
        [1, 2, -3],
        [np.int64(1), np.uint8(2), np.int32(-3)],
        np.array([1, 2, -3]),
        np.array([1, 2, -3], dtype=np.int8),
        torch.tensor([1, 2, -3]),
    ],
)
def test_whole_numbers_of_any_kind_are_the_same_words(given):
    assert words("seeds", given).tolist() == [1, 2, 2**64 - 3]


@pytest.mark.parametrize(
    "bad",
    [
        [0.5],
        [True],
        [np.True_],
        [None],
        3,
        1.5,
        None,
        [2**64],
        [-(2**63) - 1],
        torch.tensor([0.5]),
        np.zeros((2, 2), dtype=np.int64),
        torch.tensor(3),
    ],
)
def test_what_is_no_seed_is_refused_by_name(bad):
    with pytest.raises(ValueError, match="`seeds` must be whole numbers of 64 bits, one a row, got"):
        uniforms(bad)


def test_positions_must_fit():
    with pytest.raises(ValueError, match="`positions` must have one number for each of 2 seeds, got 3"):
        uniforms([1, 2], [1, 2, 3])


def _even(numbers, cells=100):
    counts = np.bincount((numbers * cells).astype(int), minlength=cells)
    return chisquare(counts).pvalue


MANY = np.arange(100_000)
WAYS = {
    "seeds": uniforms(MANY),
    "positions": uniforms(np.full_like(MANY, 7), MANY),
    "both": uniforms(MANY, MANY),
    "strided seeds": uniforms(MANY << 32),
    "far seeds": uniforms(MANY - 50_000),
    "attempts": np.array([float(uniforms([1], attempt=attempt)[0]) for attempt in range(20_000)]),
}


@pytest.mark.parametrize("way", WAYS)
def test_numbers_are_uniform_along_every_way(way):
    assert _even(WAYS[way]) > 1e-4


@pytest.mark.parametrize("way", ["seeds", "positions", "both", "attempts"])
def test_neighbours_are_independent(way):
    numbers = WAYS[way]
    pairs = (numbers[:-1] * 10).astype(int) * 10 + (numbers[1:] * 10).astype(int)
    assert chisquare(np.bincount(pairs[::2], minlength=100)).pvalue > 1e-4


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"stream": Stream.DRAFT}, {"stream": Stream.ACCEPT}),  # D22
        ({"stream": Stream.DRAFT}, {"stream": Stream.TOKEN}),  # D22
        ({"stream": Stream.TOKEN}, {"stream": Stream.COIN}),
        ({"attempt": 0}, {"attempt": 1}),
        ({"stream": Stream.TOKEN, "attempt": 1}, {"stream": Stream.DRAFT, "attempt": 0}),
    ],
)
def test_d22_two_uses_of_one_seed_and_position_are_independent(one, other):
    first, second = (uniforms(MANY, MANY, **options) for options in (one, other))
    assert not (first == second).any()
    pairs = (first * 10).astype(int) * 10 + (second * 10).astype(int)
    assert chisquare(np.bincount(pairs, minlength=100)).pvalue > 1e-4


def test_noise_of_seeds_is_uniforms_and_parts_of_it_those_of_the_rows():
    seeds, positions = torch.arange(9) * 5, torch.arange(9)
    noise = Noise.of(9, torch.device("cpu"), seeds=seeds, positions=positions)
    for step in (0, 3):
        whole = noise(step)
        assert whole.dtype == torch.float64
        assert whole.tolist() == uniforms(seeds, positions, attempt=step).tolist()
        for part in (slice(2, 5), slice(7, 20), torch.tensor([4, 0, 8]), torch.tensor([], dtype=torch.int64)):
            some = noise.at(part)
            assert some.rows == len(some(step))
            assert torch.equal(some(step), whole[part])
    assert torch.equal(noise.at(slice(2, 8)).at(torch.tensor([1, 3]))(), noise()[[3, 5]])


def test_noise_of_a_generator_is_that_of_seeds_from_it():
    generator = torch.Generator().manual_seed(1)
    noise = Noise.of(6, torch.device("cpu"), generator=generator)
    assert noise.seeds is not None
    assert len(set(noise.seeds.tolist())) == 6
    assert not torch.equal(noise(0), noise(1))
    assert torch.equal(noise.at(torch.tensor([5, 1, 2]))(1), noise(1)[[5, 1, 2]])
    assert not torch.equal(Noise.of(6, torch.device("cpu"), generator=generator)(), noise())
    again = Noise.of(6, torch.device("cpu"), generator=torch.Generator().manual_seed(1))
    assert torch.equal(again(), noise())
    torch.manual_seed(1)
    assert torch.equal(Noise.of(6, torch.device("cpu"))(), noise())


def test_noise_of_a_device_goes_on_and_has_as_many_numbers_as_rows():
    """Elsewhere than on a CPU a generator gives the draws; the meta device stands for it."""
    noise = Noise.of(6, torch.device("meta"), generator=torch.Generator().manual_seed(1))
    assert noise.seeds is None
    assert noise().shape == (6,)
    assert noise.at(slice(4, 9))().shape == (2,)
    generator = torch.Generator().manual_seed(1)
    assert not torch.equal(*(generated(6, torch.device("cpu"), generator) for _ in range(2)))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"positions": [1, 2, 3]}, "`positions` count the draws of `seeds`: give both"),
        ({"seeds": [1, 2, 3], "generator": torch.Generator()}, "`seeds` or `generator`, not both"),
        ({"seeds": [1, 2]}, "`seeds` must have one number for each of 3 rows, got 2"),
        ({"seeds": [1, 2, 3], "positions": [1]}, "`positions` must have one number for each of 3 rows, got 1"),
    ],
)
def test_noise_that_does_not_fit_is_refused(options, says):
    with pytest.raises(ValueError, match=says):
        Noise.of(3, torch.device("cpu"), **options)
