"""UNE104: coefficients by rank of the full gradient, against a direct sort in float64."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.diagnostics import Coefficients, LinearHead, chunks
from unembed.diagnostics._coefficients import _rank_edges, random_share


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _projected(weight, gradient):
    left, values, _ = torch.linalg.svd(weight, full_matrices=False)
    left = left[:, values > 1e-9 * values[0]]
    return gradient @ left @ left.T


@settings(max_examples=40, deadline=None)
@given(vocab=st.one_of(st.integers(1, 300), st.integers(1, 400_000)))
def test_groups_cover_every_rank_once(vocab):
    edges = _rank_edges(vocab)
    assert edges[0] == 0
    assert edges[-1] == vocab
    assert (np.diff(edges) > 0).all()
    assert edges[: min(vocab, 16) + 1] == list(range(min(vocab, 16) + 1))  # single up to 16
    assert {top for top in (1, 10, 100) if top <= vocab} <= set(edges)  # where the shares are read off
    assert len(edges) < 80


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("v", [9, 150])
def test_the_profile_is_that_of_a_direct_sort(softcap, v):
    n, d = 12, 4
    head = LinearHead(_randn(v, d), bias=_randn(v, seed=1), softcap=softcap, scale=0.7)
    hidden, targets = _randn(n, d, seed=2), torch.arange(n) % v
    scores = 0.7 * (hidden @ head.weight.T + head.bias)
    capped = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    full = torch.softmax(capped, -1) - torch.nn.functional.one_hot(targets, v)
    if softcap is not None:
        full = full * (1 - torch.tanh(scores / softcap) ** 2)
    parts = {"full": full, "kept_raw": _projected(head.weight, full)}
    if softcap is None:
        parts["kept_centred"] = _projected(head.weight - head.weight.mean(0), full)
    order = torch.tensor(np.lexsort((np.arange(v)[None].repeat(n, 0), -full.abs().numpy())))

    coefficients = Coefficients(head)
    coefficients.update(hidden, targets)
    result = coefficients.result()
    columns = result.table("coefficients_profile").columns
    assert columns["rank_from"].tolist() == [edge + 1 for edge in _rank_edges(v)[:-1]]
    for name, values in parts.items():
        ordered = values.gather(1, order)
        for i, (start, end) in enumerate(zip(columns["rank_from"] - 1, columns["rank_to"], strict=True)):
            group = ordered[:, start:end]
            assert columns[f"{name}_mean"][i] == pytest.approx(float(group.mean()), rel=1e-9, abs=1e-14)
            assert columns[f"{name}_sd"][i] == pytest.approx(float(group.std(correction=0)), rel=1e-6, abs=1e-9)
            share = float(group.square().sum() / values.square().sum())
            assert columns[f"{name}_energy"][i] == pytest.approx(share, rel=1e-9, abs=1e-14)
        assert columns[f"{name}_energy"].sum() == pytest.approx(1, rel=1e-12)
        for top in (1, 10, 100):
            share = float(ordered[:, :top].square().sum() / values.square().sum())
            assert result.values[name][f"energy_top_{top}"] == pytest.approx(share, rel=1e-9)
    if softcap is not None:
        assert result.values["kept_centred"] is None
        assert "kept_centred_mean" not in columns


def test_a_certain_wrong_prediction_has_two_coefficients_and_by_hand():
    # p = (0, 1, 0, ...): G is -1 at the target and 1 at the winner; both are 1 in size, so the lower id comes first.
    head = LinearHead(100 * torch.eye(5, dtype=torch.float64))
    coefficients = Coefficients(head)
    coefficients.update(torch.eye(5, dtype=torch.float64)[1:2], torch.tensor([3]))
    columns = coefficients.result().table("coefficients_profile").columns
    np.testing.assert_allclose(columns["full_mean"], [1, -1, 0, 0, 0], atol=1e-12)
    coefficients = Coefficients(head)
    coefficients.update(torch.eye(5, dtype=torch.float64)[3:4], torch.tensor([1]))
    columns = coefficients.result().table("coefficients_profile").columns
    np.testing.assert_allclose(columns["full_mean"], [-1, 1, 0, 0, 0], atol=1e-12)
    np.testing.assert_allclose(columns["full_energy"], [0.5, 0.5, 0, 0, 0], atol=1e-12)
    np.testing.assert_allclose(columns["full_sd"], 0, atol=1e-7)


def test_ties_go_by_id_among_thousands():
    # Uniform predictions: all coefficients but the target's are equal, so the order is target, then ids.
    v, target = 5000, 1234
    head = LinearHead(_randn(v, 3))
    coefficients = Coefficients(head)
    coefficients.update(torch.zeros(1, 3, dtype=torch.float64), torch.tensor([target]))
    gradient = torch.full((1, v), 1 / v, dtype=torch.float64)
    gradient[0, target] -= 1
    kept = _projected(head.weight, gradient)[0]
    ordered = torch.cat([kept[target : target + 1], kept[:target], kept[target + 1 :]])
    columns = coefficients.result().table("coefficients_profile").columns
    expected = [float(ordered[a:b].mean()) for a, b in zip(columns["rank_from"] - 1, columns["rank_to"], strict=True)]
    np.testing.assert_allclose(columns["kept_raw_mean"], expected, rtol=1e-6, atol=1e-14)


@settings(max_examples=20, deadline=None)
@given(every=st.integers(1, 12), block=st.integers(1, 40), rows=st.integers(1, 10))
def test_which_predictions_are_sampled_does_not_depend_on_blocks_or_chunks(every, block, rows):
    n, v, d = 40, 11, 3
    head = LinearHead(_randn(v, d))
    hidden, targets, index = _randn(n, d, seed=1), torch.arange(n) % v, torch.arange(n)
    chosen = Coefficients(head)
    chosen.update(hidden[::every], targets[::every])
    sampled = Coefficients(head, every=every)
    for start in range(0, n, block):
        part = slice(start, start + block)
        for chunk in chunks(head, hidden[part], targets[part], index=index[part], rows=rows):
            sampled.add(chunk)
    one, other = chosen.result(), sampled.result()
    assert other.values["tokens"] == math.ceil(n / every)
    for name, column in one.table("coefficients_profile").columns.items():
        np.testing.assert_allclose(
            other.table("coefficients_profile").columns[name], column, rtol=1e-9, atol=1e-12, err_msg=name
        )


def test_nothing_sampled_says_so():
    coefficients = Coefficients(LinearHead(_randn(5, 2)), every=10)
    coefficients.update(_randn(3, 2), torch.arange(3), index=torch.tensor([1, 2, 3]))
    assert coefficients.result().values is None
    assert "sampled" in coefficients.result().reason


def test_every_below_one_is_an_error():
    with pytest.raises(ValueError, match="`every` must be at least 1, got 0"):
        Coefficients(LinearHead(torch.eye(2)), every=0)


@pytest.mark.parametrize("centre", [False, True])
def test_random_share_is_the_mean_over_random_subspaces(centre: bool) -> None:
    vocab, rank, draws = 30, 5, 4000
    random = np.random.default_rng(0)
    gradient = random.standard_normal(vocab) / np.arange(1, vocab + 1)
    gradient -= gradient.mean() if centre else 0
    gradient /= np.linalg.norm(gradient)
    energy = np.zeros(vocab)
    for _ in range(draws):
        columns = random.standard_normal((vocab, rank))
        basis = np.linalg.qr(columns - columns.mean(0) if centre else columns)[0]
        energy += (basis @ (basis.T @ gradient)) ** 2
    size = vocab - centre
    expected = random_share(gradient**2, np.ones(vocab), rank, size)
    assert expected.sum() == pytest.approx(1, abs=1e-12)
    assert energy / energy.sum() == pytest.approx(expected, abs=0.01)
    edges = [0, 1, 4, 30]
    grouped = random_share(np.add.reduceat(gradient**2, edges[:-1]), np.diff(edges), rank, size)
    assert grouped == pytest.approx(np.add.reduceat(expected, edges[:-1]))


@pytest.mark.parametrize(("rank", "vocab"), [(7, 7), (1, 1)])
def test_a_subspace_that_is_everything_keeps_everything_in_place(rank: int, vocab: int) -> None:
    full = np.linspace(1, 2, vocab) / np.linspace(1, 2, vocab).sum()
    assert random_share(full, np.ones(vocab), rank, vocab) == pytest.approx(full)


def test_nothing_is_left_by_a_subspace_without_dimensions() -> None:
    assert random_share(np.array([0.5, 0.5]), np.ones(2), 0, 2).tolist() == [0, 0]


def test_the_kept_profile_of_random_heads_is_the_null() -> None:
    """Random weights, random states: kept and null agree on average, in the JSON values too."""
    kept, null = [], []
    for seed in range(60):
        head = LinearHead(_randn(40, 6, seed=seed) * 1e-3)
        coefficients = Coefficients(head)
        coefficients.update(_randn(20, 6, seed=seed + 1000), torch.arange(20))
        values = coefficients.result().values
        assert values is not None
        kept.append([values[f"kept_{kind}"]["energy_top_1"] for kind in ("raw", "centred")])
        null.append([values[f"null_{kind}"]["energy_top_1"] for kind in ("raw", "centred")])
    assert np.mean(kept, axis=0) == pytest.approx(np.mean(null, axis=0), rel=0.03)
