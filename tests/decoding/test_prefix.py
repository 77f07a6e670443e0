"""The shortest prefix against a sort and a running sum."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.decoding import _prefix

INF = math.inf


@settings(deadline=None)
@given(
    rows=st.integers(0, 4),
    width=st.integers(1, 600),
    values=st.integers(1, 500),
    part=st.lists(st.floats(-0.1, 1.2), min_size=4, max_size=4),
    seed=st.integers(0, 1000),
)
def test_is_its_definition_at_every_shape(rows, width, values, part, seed):
    # Weights are whole, so that sums are exact and every border is reached exactly.
    random = torch.Generator().manual_seed(seed)
    keys = torch.randint(0, values, (rows, width), generator=random) / 3
    weights = torch.randint(0, 5, (rows, width), generator=random).float()
    keys[torch.rand(rows, width, generator=random) < 0.1] = INF
    mass = torch.tensor(part[:rows], dtype=torch.float64) * weights.sum(-1).double()
    mass[::2] = mass[::2].round()
    found = _prefix.shortest_prefix(keys, weights, mass)
    assert torch.equal(found, _prefix._reference(keys, weights, mass))


def test_a_mass_that_is_never_reached_keeps_all_and_none_keeps_nothing():
    keys, weights = torch.rand(3, 100), torch.ones(3, 100)
    found = _prefix.shortest_prefix(keys, weights, torch.tensor([101.0, 0.0, -1.0]))
    assert found.sum(-1).tolist() == [100, 0, 0]
    assert _prefix.shortest_prefix(keys, weights, torch.full((3,), 101.0)).all()


def test_more_rows_than_are_worked_on_at_a_time_and_none_depends_on_another():
    random = torch.Generator().manual_seed(0)
    keys, weights = torch.rand(600, 70, generator=random), torch.rand(600, 70, generator=random)
    mass = 30 * torch.rand(600, generator=random, dtype=torch.float64)
    found = _prefix.shortest_prefix(keys, weights, mass)
    assert torch.equal(found, _prefix._reference(keys, weights, mass))
    weights[0] = math.nan  # sums of the first row must not reach the others
    assert torch.equal(_prefix.shortest_prefix(keys, weights, mass)[1:], found[1:])
    weights[0] = 1e30
    assert torch.equal(_prefix.shortest_prefix(keys, weights, mass)[1:], found[1:])
