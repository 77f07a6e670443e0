"""`ops.draw` against its definition, against enumeration, and the public cases D5, D17, D18 and D19."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed import ops
from unembed.ops import _draw
from unembed.testing._checks_decode import chi_square

LAST = 1 - 2.0**-53  # the largest uniform number there is


def uniform(count, seed=0):
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None)
@given(
    rows=st.integers(0, 5),
    classes=st.integers(1, 200),
    spread=st.sampled_from([0.0, 1.0, 8.0, 60.0]),
    dead=st.floats(0, 0.9),
    seed=st.integers(0, 10**6),
    dtype=st.sampled_from([torch.float32, torch.float64]),
)
def test_is_the_definition_for_every_shape(*, rows, classes, spread, dead, seed, dtype):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, classes, generator=generator, dtype=dtype) * spread
    gone = torch.rand(rows, classes, generator=generator) < dead
    gone[:, seed % classes] = False
    scores = scores.masked_fill(gone, -torch.inf)
    numbers = torch.rand(rows, generator=generator, dtype=torch.float64)
    found = ops.draw(scores, numbers)
    # Rounding may move a draw over the edge of a class, so the number must lie in the class up to that.
    total = torch.nn.functional.pad(torch.softmax(scores.double(), -1).cumsum(-1), (1, 0))
    near = 8 * torch.finfo(dtype).eps
    assert (total.gather(-1, found[:, None]).squeeze(-1) - near <= numbers).all()
    assert (numbers <= total.gather(-1, found[:, None] + 1).squeeze(-1) + near).all()
    assert not gone[torch.arange(rows), found].any()
    wanted = _draw._reference(scores, numbers)
    below, above = total.gather(-1, wanted[:, None]).squeeze(-1), total.gather(-1, wanted[:, None] + 1).squeeze(-1)
    well_inside = (numbers - below > near) & (above - numbers > near)
    assert torch.equal(found[well_inside], wanted[well_inside])


def test_numbers_in_the_middle_of_classes_give_the_definition_exactly():
    scores = torch.randn(300, 130, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    total = torch.softmax(scores, -1).cumsum(-1)
    for place in (0, 1, 63, 64, 65, 127, 128, 129):
        numbers = total[:, place] - torch.softmax(scores, -1)[:, place] / 2
        assert (ops.draw(scores, numbers) == place).all()
        assert (_draw._reference(scores, numbers) == place).all()


def test_the_ends_of_the_numbers_are_the_first_and_the_last_class_that_can_be():
    scores = torch.zeros(2, 200)
    scores[:, :70] = scores[:, 150:] = -torch.inf
    assert ops.draw(scores, torch.tensor([0.0, LAST], dtype=torch.float64)).tolist() == [70, 149]
    far = torch.tensor([[0.0, -300.0, -300.0], [-300.0, -300.0, 0.0]])  # exp is 0 in float32
    for number in (0.0, 0.5, LAST):
        assert ops.draw(far, torch.tensor([number, number], dtype=torch.float64)).tolist() == [0, 2]


@pytest.mark.parametrize("classes", [3, 63, 64, 65, 200])
def test_draws_have_the_distribution(classes):
    scores = 2 * torch.randn(1, classes, generator=torch.Generator().manual_seed(classes))
    drawn = ops.draw(scores.expand(100_000, -1), uniform(100_000))
    assert chi_square(torch.bincount(drawn, minlength=classes), torch.softmax(scores[0].double(), -1)) > 1e-4


def test_a_row_is_drawn_as_it_is_alone():
    scores = 3 * torch.randn(33, 1000, generator=torch.Generator().manual_seed(2))
    numbers = uniform(33)
    together = ops.draw(scores, numbers)
    alone = [ops.draw(scores[row : row + 1], numbers[row : row + 1]) for row in range(33)]
    assert torch.equal(together, torch.cat(alone))
    assert torch.equal(together.flip(0), ops.draw(scores.flip(0), numbers.flip(0)))


@pytest.mark.parametrize("classes", [1, 63, 64, 65, 5000])
def test_few_rows_go_another_way_to_the_same_classes(classes):
    generator = torch.Generator().manual_seed(classes)
    weights = torch.randn(2000, classes, generator=generator).mul_(4).exp_()
    sums, numbers = _draw.block_sums(weights), uniform(2000)
    numbers[:2] = torch.tensor([0.0, LAST])
    on_host = torch.from_numpy(_draw._picked_on_host(weights.numpy(), sums.numpy(), numbers.numpy()))
    assert torch.equal(_draw._picked_on_device(weights, sums, numbers), on_host)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_scores_are_those_numbers_in_float32(dtype):
    scores = 3 * torch.randn(50, 300, generator=torch.Generator().manual_seed(3)).to(dtype)
    assert torch.equal(ops.draw(scores, uniform(50)), ops.draw(scores.float(), uniform(50)))


def test_d17_a_probability_of_0_is_never_drawn():
    scores = torch.tensor([[0.33, 0.33, 0.0, 0.33]]).log()
    edges = [place / 3 + step * 2.0**-53 for place in range(4) for step in range(-40, 41)]
    numbers = torch.tensor([number for number in edges if 0 <= number < 1], dtype=torch.float64)
    assert set(ops.draw(scores.expand(len(numbers), -1), numbers).tolist()) == {0, 1, 3}
    assert (ops.draw(scores.expand(200_000, -1), uniform(200_000)) != 2).all()


def test_d18_more_classes_than_float32_can_count():
    classes = 1 << 24
    weights = torch.ones(1, classes)
    weights[:, : classes // 2] = 2.0
    scores = weights.log()
    for number in (0.1, 0.6, 2 / 3 - 1e-6, 2 / 3 + 1e-6, 0.9, LAST):
        units = number * 1.5 * classes  # of weight 1: two a class of the first half, then one
        want = int(units / 2) if units < classes else int(units - classes / 2)
        found = int(ops.draw(scores, torch.tensor([number], dtype=torch.float64)))
        assert abs(found - want) <= 4, (number, found, want)


def test_d18_many_beams_over_a_large_vocabulary():
    scores = torch.zeros(1, 262_144).expand(65, -1)
    numbers = (torch.arange(65, dtype=torch.float64) + 0.5) / 65
    assert torch.equal(ops.draw(scores, numbers), (numbers * 262_144).long())


def test_d19_a_long_tail_far_below_is_drawn_as_often_as_it_should_be():
    scores = torch.full((1, 262_145), -20.5)
    scores[0, 1000] = 0.0
    weights = (scores - scores.amax()).exp()
    sums = _draw.block_sums(weights)
    hits = 0
    for part in uniform(100_000, seed=4).split(1000):
        drawn = _draw.picked(weights.expand(len(part), -1), sums.expand(len(part), -1), part)
        hits += int((drawn != 1000).sum())
    tail = 262_144 * math.exp(-20.5)
    want = 100_000 * tail / (1 + tail)
    assert 32 < want < 34
    assert abs(hits - want) < 4 * want**0.5


@pytest.mark.parametrize("bad", [-torch.inf, torch.nan, torch.inf])
def test_d5_rows_without_a_distribution_are_refused_by_number(bad):
    scores = torch.zeros(3, 5)
    scores[1] = -torch.inf
    scores[1, 2] = bad
    with pytest.raises(ValueError, match=r"Row 1 of `scores` has the largest score (-inf|nan|inf)"):
        ops.draw(scores, uniform(3))


def test_d5_rows_of_minus_infinity_but_for_one():
    scores = torch.full((4, 500), -torch.inf)
    places = torch.tensor([0, 63, 64, 499])
    scores[torch.arange(4), places] = -3.0
    assert torch.equal(ops.draw(scores, uniform(4)), places)


def test_no_rows():
    assert ops.draw(torch.zeros(0, 7), uniform(0)).shape == (0,)
