"""`decoding.sample`: the distribution of the chain it stands for, draws that no neighbour changes, public bug cases."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy import stats

from unembed import decoding
from unembed.decoding import Chain, MinP, Temperature, TopK, TopP, sample
from unembed.ops import uniforms
from unembed.ops._draw import _picked_on_device, _picked_on_host, block_sums
from unembed.testing._checks_decode import chi_square

pytestmark = pytest.mark.usefixtures("way")
DRAWS = 100_000
OPTIONS = [
    {},
    {"temperature": 0.7},
    {"top_k": 5},
    {"top_k": 5, "top_p": 0.8},
    {"top_p": 0.5},
    {"top_p": 0.9, "min_p": 0.05},
    {"min_p": 0.1},
    {"top_p": 0.02},
    {"temperature": math.inf},
    {"temperature": 1.3, "top_k": 50, "top_p": 0.95, "min_p": 0.02},
]


def chain_of(**options):
    """The filters that the options stand for."""
    kinds = {"temperature": Temperature, "top_k": TopK, "top_p": TopP, "min_p": MinP}
    return Chain(tuple(kinds[name](options[name]) for name in kinds if name in options))


def probabilities(scores, **options):
    return torch.softmax(chain_of(**options)(scores.double()), -1)


def p_value(ids, expected):
    """Of a chi-square test of draws."""
    return chi_square(torch.bincount(ids, minlength=len(expected)), expected)


def many(scores, count=DRAWS, **options):
    """Draws of one row, in blocks that fit a cache."""
    each = max(1, min(count, (1 << 21) // len(scores)))
    return torch.cat([sample(scores.expand(min(each, count - done), -1), **options) for done in range(0, count, each)])


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("size", [3, 130])
def test_has_the_distribution_of_its_chain(size, options):
    scores = 2 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    if size > 5:
        scores[3], scores[4] = -torch.inf, scores[2]
    ids = many(scores, generator=torch.Generator().manual_seed(1), **options)
    assert p_value(ids, probabilities(scores, **options)) > 1e-4


@pytest.mark.parametrize("options", [{}, {"top_k": 5}, {"top_p": 0.5}], ids=str)
def test_seeded_draws_have_the_distribution_over_seeds_and_over_positions(options):
    scores = torch.randn(40, generator=torch.Generator().manual_seed(0))
    expected = probabilities(scores, **options)
    rows = scores.expand(DRAWS, -1)
    counting, fixed = torch.arange(DRAWS), torch.full((DRAWS,), 7)
    assert p_value(sample(rows, seeds=counting, **options), expected) > 1e-4
    assert p_value(sample(rows, seeds=fixed, positions=counting, **options), expected) > 1e-4


def test_neighbouring_seeds_and_positions_are_independent():
    scores = torch.zeros(4)
    count = 40_000
    rows = scores.expand(count, -1)
    for first, second in (((0, 0), (1, 0)), ((0, 0), (0, 1)), ((0, 1), (1, 0))):
        drawn = [
            sample(rows, seeds=torch.arange(count) * 2 + seed, positions=torch.full((count,), place))
            for seed, place in (first, second)
        ]
        assert p_value(4 * drawn[0] + drawn[1], torch.full((16,), 1 / 16, dtype=torch.float64)) > 1e-4


@settings(max_examples=60, deadline=None, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(data=st.data())
def test_what_is_drawn_is_kept_by_the_chain(data):
    size = data.draw(st.integers(1, 150))
    numbers = st.one_of(st.floats(-30, 30, width=32), st.just(-math.inf), st.sampled_from([0.0, 1.0, -0.0]))
    scores = torch.tensor(data.draw(st.lists(numbers, min_size=size, max_size=size)))
    scores[data.draw(st.integers(0, size - 1))] = 2.0
    options = {"temperature": data.draw(st.sampled_from([0.0, 1e-30, 0.5, 1.0, 3, math.inf]))}
    for name, values in {
        "top_k": st.integers(1, 200),
        "top_p": st.sampled_from([-1.0, 0.0, 1e-8, 0.3, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.1, 0.9, 1.0]),
    }.items():
        if data.draw(st.booleans()):
            options[name] = data.draw(values)
    # An edge of a set may fall otherwise by rounding, so nothing here lies on one: sets of the two precisions agree.
    kept = chain_of(**options)(scores.double()) > -torch.inf
    single = chain_of(**options)(scores) > -torch.inf
    drawn = sample(scores.expand(40, -1), generator=torch.Generator().manual_seed(size), **options)
    assert bool((kept | single)[drawn].all())


@pytest.mark.parametrize("options", [*OPTIONS, {"temperature": 0.0}], ids=str)
@pytest.mark.parametrize("size", [5, 64, 1001])
def test_a_seeded_row_is_the_same_in_any_batch(size, options):  # D20
    rows = 3 * torch.randn(8, size, generator=torch.Generator().manual_seed(0))
    seeds, positions = torch.arange(100, 108), torch.arange(8) ** 2
    whole = sample(rows, seeds=seeds, positions=positions, **options)
    for batch in (1, 2, 3):
        for part in torch.arange(8).split(batch):
            alone = sample(rows[part], seeds=seeds[part], positions=positions[part], **options)
            assert torch.equal(alone, whole[part])
    order = torch.tensor([1, 0, 7, 3, 2, 6, 5, 4])
    swapped = sample(rows[order], seeds=seeds[order], positions=positions[order], **options)
    assert torch.equal(swapped, whole[order])


def test_rows_of_other_settings_change_nothing():  # D20
    rows = 3 * torch.randn(6, 300, generator=torch.Generator().manual_seed(0))
    each = {
        "temperature": torch.tensor([0.0, 0.5, 1.0, 2.0, torch.inf, 1.0]),
        "top_k": torch.tensor([300, 3, 50, 1000, 20, 299]),
        "top_p": torch.tensor([0.9, 1.0, 0.5, 0.7, 0.9, 0.2], dtype=torch.float64),
        "min_p": torch.tensor([0.0, 0.1, 0.0, 0.02, 0.0, 0.5]),
    }
    for seed in range(50):
        seeds = torch.arange(6) + 10 * seed
        whole = sample(rows, seeds=seeds, **each)
        for row in range(6):
            own = {name: value[row].item() for name, value in each.items()}
            assert int(sample(rows[row], seeds=[int(seeds[row])], **own)) == int(whole[row])


def test_a_generator_gives_one_batch_again():
    rows = torch.randn(5, 2000)
    drawn = [sample(rows, top_p=0.5, generator=torch.Generator().manual_seed(3)) for _ in range(2)]
    assert torch.equal(*drawn)


def test_joint_top_p_is_of_the_whole_distribution():
    # p = .4 .3 .2 .1: the two largest have .7; sequential renormalises them to .57 and .43.
    scores = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    sequential = many(scores, 2000, top_k=2, top_p=0.55)
    joint = many(scores, 2000, top_k=2, top_p=0.55, joint=True)
    assert set(sequential.tolist()) == {0}
    assert set(joint.tolist()) == {0, 1}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("options", [{}, {"top_k": 4, "top_p": 0.9}, {"top_p": 0.9}], ids=str)
def test_half_and_double_precision(dtype, options):
    scores = (2 * torch.randn(100, generator=torch.Generator().manual_seed(0))).to(dtype)
    ids = many(scores, generator=torch.Generator().manual_seed(0), **options)
    assert p_value(ids, probabilities(scores.double(), **options)) > 1e-4


def test_shapes_strides_and_an_empty_batch():
    rows = torch.randn(400, 6).T.reshape(2, 3, 400)
    strided = torch.stack([rows, rows], -1)[..., 0]
    seeds = list(range(6))
    for options in ({}, {"top_k": 3}, {"top_p": 0.4}, {"temperature": 0.0}):
        found = sample(strided, seeds=seeds, **options)
        assert found.shape == (2, 3)
        assert torch.equal(found, sample(rows.contiguous(), seeds=seeds, **options))
    assert sample(torch.zeros(0, 7)).shape == (0,)
    assert sample(torch.zeros(0, 7), top_k=2, seeds=[]).shape == (0,)
    assert sample(torch.zeros(7)).shape == ()
    assert sample(torch.tensor([3.0])).item() == 0


@pytest.mark.parametrize("p", [0.0, 1e-8, -1.0])
def test_top_p_of_nothing_is_the_argmax(p):  # D1
    for dtype in (torch.float16, torch.bfloat16, torch.float32):
        scores = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(dtype)
        scores[123] = 9.0
        assert set(many(scores, 50, top_p=p).tolist()) == {123}


@pytest.mark.parametrize(("p", "kept"), [(0.8, {0, 1}), (0.5, {0})])
def test_a_mass_that_rounding_just_misses_is_reached(p, kept):  # D2
    scores = torch.tensor([0.5, 0.3, 0.2]).log()
    for more in ({}, {"top_k": 2}):
        assert set(many(scores, 500, top_p=p, **more).tolist()) == kept
    assert set(many(torch.cat([scores, torch.full((200,), -torch.inf)]), 500, top_p=p).tolist()) == kept


def test_one_hot_with_a_huge_k():  # D4
    scores = torch.full((32_000,), -torch.inf)
    scores[31_999] = 0.0
    assert set(many(scores, 100, top_k=2**30, top_p=1.0).tolist()) == {31_999}


def test_rows_of_minus_infinity():  # D5
    rows = torch.full((3, 500), -torch.inf)
    rows[0, [7, 400]] = torch.tensor([1.0, 2.0])
    rows[1, 3] = -1e30
    assert sample(rows[:2], top_k=1).tolist() == [400, 3]
    for options in ({}, {"top_k": 1}, {"top_p": 0.5}, {"temperature": 0.0}, {"top_k": torch.tensor([1, 500, 500])}):
        with pytest.raises(ValueError, match=r"Row 2 of `scores` has no finite score"):
            sample(rows, **options)


def test_k_beyond_the_vocabulary_keeps_all():  # D6
    ids = many(torch.zeros(10), 20_000, top_k=15, generator=torch.Generator().manual_seed(0))
    assert p_value(ids, torch.full((10,), 0.1, dtype=torch.float64)) > 1e-4


@pytest.mark.parametrize("temperature", [1e-5, 1e-12, 1e-38, 1e-50, 0])
def test_cold_temperatures_are_the_argmax(temperature):  # D7
    for scores in (torch.tensor([2.9, 11.06], dtype=torch.float16), torch.tensor([10.0, 20.0, 30.0])):
        best = len(scores) - 1
        for more in ({}, {"top_k": 2}, {"top_p": 0.9}):
            assert set(many(scores, 50, temperature=temperature, **more).tolist()) == {best}
            heat = torch.full((50,), temperature, dtype=torch.float64)
            assert set(sample(scores.expand(50, -1), temperature=heat, **more).tolist()) == {best}


def test_infinite_temperature_is_uniform_over_what_is_finite():  # D7
    scores = torch.tensor([3.0, -torch.inf, 0.0, -20.0])
    ids = many(scores, 30_000, temperature=math.inf, generator=torch.Generator().manual_seed(0))
    assert p_value(ids, torch.tensor([1, 0, 1, 1], dtype=torch.float64) / 3) > 1e-4


def test_exactly_k_of_equal_scores():  # D8
    ids = many(torch.zeros(1000), 20_000, top_k=50, generator=torch.Generator().manual_seed(0))
    assert set(ids.tolist()) == set(range(50))


def test_probability_zero_is_never_drawn():  # D17
    scores = torch.tensor([0.33, 0.34, 0.0, 0.33]).log()
    expected = torch.tensor([0.33, 0.34, 0.0, 0.33], dtype=torch.float64)
    assert p_value(many(scores, 400_000, generator=torch.Generator().manual_seed(0)), expected) > 1e-4
    # Nor at the ends of the uniform numbers, in the first block or the last.
    for size, place in itertools.product((4, 64, 65, 129), (0, -1)):
        weights = torch.zeros(1, size)
        weights[0, place] = 0.3
        for uniform in (0.0, 1 - 2.0**-53):
            number = torch.tensor([uniform], dtype=torch.float64)
            assert int(_picked_on_device(weights, block_sums(weights), number)) == place % size
            assert int(_picked_on_host(*(x.numpy() for x in (weights, block_sums(weights), number)))[0]) == place % size


def test_the_two_ways_to_pick_are_one():
    generator = torch.Generator().manual_seed(0)
    for size in (1, 63, 64, 65, 1000, 5000):
        weights = torch.rand(200, size, generator=generator) ** 8
        weights[:, ::3] *= 0
        weights[:, -1] += 1e-6
        uniform = torch.rand(200, dtype=torch.float64, generator=generator)
        sums = block_sums(weights)
        host = _picked_on_host(weights.numpy(), sums.numpy(), uniform.numpy())
        assert torch.equal(_picked_on_device(weights, sums, uniform), torch.from_numpy(host))


def test_more_classes_than_float32_can_count():  # D18
    scores = torch.zeros(2**24)
    scores[: 2**23] = math.log(2)
    seeds = list(range(24))
    units = uniforms(seeds) * 1.5 * 2**24  # of weight 1: two a class of the first half, then one
    wanted = np.where(units < 2**24, units / 2, units - 2**23)
    assert (wanted >= 2**23).any()
    assert (wanted < 2**23).any()
    for options in ({}, {"temperature": torch.ones(1)}):
        drawn = np.array([int(sample(scores[None], seeds=[seed], **options)) for seed in seeds])
        assert abs(drawn - wanted).max() <= 4
    many_rows = sample(torch.zeros(65, 262_144), seeds=list(range(65)))
    assert many_rows.tolist() == (uniforms(range(65)) * 262_144).astype(int).tolist()


def test_long_tails_have_no_floor():  # D19
    """One token, and 262,144 that are 20.5 nats below it: of 10^5 draws 33 fall on them, each where it should."""
    scores = torch.full((262_145,), -20.5)
    scores[1000] = 0.0
    one, count = math.exp(-20.5), 100_000
    mass = 262_144 * one
    place = uniforms(range(count)) * (1 + mass)  # how far each seed's number goes in the mass
    inside = (place >= 1000 * one) & (place <= 1000 * one + 1)
    edges = np.argsort(np.minimum(place - 1000 * one, 1000 * one + 1 - place) + 2 * ~inside)[:60]  # barely inside
    tried = np.sort(np.concatenate([np.flatnonzero(~inside), edges]))
    drawn = np.concatenate(
        [sample(scores.expand(len(part), -1), seeds=part).numpy() for part in np.array_split(tried, 12)]
    )
    expected = count * mass / (1 + mass)
    assert 32 < expected < 34
    assert abs((drawn != 1000).sum() - expected) < 4 * math.sqrt(expected)
    wanted = np.where(place < 1000 * one, place / one, 1001 + (place - 1000 * one - 1) / one)[tried]
    far = ~inside[tried] & (abs(wanted - 1000) > 64)  # its block is summed in float32, where its 63 others are lost
    assert abs(drawn[far] - np.floor(wanted[far])).max() <= 1
    assert (drawn[inside[tried]] == 1000).all()


def test_flat_scores_of_a_large_vocabulary():  # D25
    scores = 1e-3 * torch.randn(152_000, generator=torch.Generator().manual_seed(0))
    kept = TopP(0.9)(scores) > -torch.inf
    drawn = torch.cat([sample(scores.expand(8, -1), top_p=0.9, seeds=torch.arange(8) + 8 * k) for k in range(20)])
    assert bool(kept[drawn].all())
    ids = many(torch.tensor([0.45] + [0.55 / 999] * 999).log(), 20_000, top_k=50)
    assert set(ids.tolist()) == set(range(50))


def test_the_statistical_test_rejects_a_sampler_that_keeps_two():  # D27: of the one test that all draws go through
    scores = 5 * torch.randn(32_000, generator=torch.Generator().manual_seed(15))
    expected = probabilities(scores)
    broken = probabilities(scores, top_k=2)
    generator = torch.Generator().manual_seed(0)
    cosine = torch.nn.functional.cosine_similarity(expected, broken, dim=0)
    assert cosine > 0.99  # the usual check passes
    assert p_value(torch.multinomial(broken, DRAWS, replacement=True, generator=generator), expected) < 1e-4
    assert p_value(torch.multinomial(expected, DRAWS, replacement=True, generator=generator), expected) > 1e-4


def test_the_statistical_test_is_that_of_scipy_and_calls_right_draws_rare_as_often_as_it_says():
    p = torch.tensor([0.4, 0.3, 0.2, 0.1], dtype=torch.float64)
    counts = torch.tensor([430, 290, 190, 90])
    assert chi_square(counts, p) == pytest.approx(stats.chisquare(counts.numpy(), 1000 * p.numpy()).pvalue, rel=1e-9)
    assert chi_square(torch.tensor([999, 0, 1]), torch.tensor([0.9, 0.1, 0.0])) == 0
    long = torch.cat([p * (1 - 3e-6), torch.full((3,), 1e-6, dtype=torch.float64)])  # rare ones must not decide
    generator = torch.Generator().manual_seed(0)
    drawn = torch.multinomial(long, 2000 * 1000, replacement=True, generator=generator).reshape(1000, 2000)
    low = sum(p_value(row, long) < 0.01 for row in drawn)
    assert 1 <= low <= 25  # 10 of 1,000


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -1.0}, "`temperature` must be at least 0"),
        ({"temperature": math.nan}, "`temperature` must be at least 0"),
        ({"top_k": 0}, "`top_k` must be at least 1"),
        ({"top_k": 2.5}, "`top_k` must be whole"),
        ({"top_k": True}, "`top_k` must be whole, got True"),
        ({"top_k": torch.tensor([True, True])}, "`top_k` must be whole"),
        ({"top_p": math.nan}, "`top_p`"),
        ({"min_p": 1.5}, "`min_p` must be at least 0 and at most 1"),
        ({"temperature": torch.ones(3)}, r"`temperature` must be a number or have shape \[2\]"),
        ({"seeds": [1]}, "`seeds` must have one number for each of 2 rows"),
        ({"seeds": [1, 2], "positions": [1]}, "`positions`"),
        ({"positions": [1, 2]}, "`positions` count the draws of `seeds`"),
        ({"seeds": [1, 2], "generator": torch.Generator()}, "Give `seeds` or `generator`"),
        ({"seeds": [0.5, 1.0]}, "`seeds` must be whole numbers"),
        ({"seeds": [True, False]}, "`seeds` must be whole numbers"),
        ({"seeds": 1.5}, "`seeds` must be whole numbers"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        sample(torch.zeros(2, 5), **options)


def test_whole_numbers_of_numpy_are_whole_numbers():
    rows = torch.randn(3, 50, generator=torch.Generator().manual_seed(0))
    wanted = sample(rows, top_k=3, seeds=[1, 2, -3])
    found = sample(rows, top_k=np.int64(3), seeds=[np.int64(1), np.uint8(2), np.int32(-3)])
    assert torch.equal(found, wanted)
    assert torch.equal(TopK(np.int32(3))(rows), TopK(3)(rows))


@pytest.mark.parametrize("bad", [math.nan, -math.nan, math.inf])
@pytest.mark.parametrize("options", [{}, {"top_k": 2}, {"top_k": 60}, {"top_p": 0.5}, {"temperature": 0}], ids=str)
def test_scores_that_are_no_numbers_are_refused(bad, options):
    rows = torch.randn(2, 500)
    rows[1, 77] = bad
    with pytest.raises(ValueError, match="Row 1 of `scores`"):
        sample(rows, **options)


def test_a_number_that_was_fine_does_not_let_its_equals_of_other_types_pass():
    """What is asked once is kept, and 1, 1.0 and True are equal."""
    scores = torch.randn(2, 9)
    sample(scores, top_k=1)
    for bad in (1.0, True):
        with pytest.raises(ValueError, match="`top_k` must be whole"):
            sample(scores, top_k=bad)


def test_scores_must_be_rows_of_floats():
    for scores in (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 0), torch.tensor(1.0), np.zeros((2, 3)), [1.0]):
        with pytest.raises(ValueError, match="`scores` must be floating point"):
            sample(scores)
    with pytest.raises(ValueError, match=r"`generator` must be a torch\.Generator, got 3"):
        sample(torch.zeros(2, 3), generator=3)
    assert decoding.sample is sample
