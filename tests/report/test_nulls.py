"""The nulls that the figures compute themselves, against random draws."""

import numpy as np
import pytest

from unembed.report._coefficients import random_share, symlog
from unembed.report._spectrum import random_spectrum


def test_random_share_is_the_mean_over_random_subspaces() -> None:
    vocab, rank, draws = 30, 5, 4000
    random = np.random.default_rng(0)
    gradient = random.standard_normal(vocab) / np.arange(1, vocab + 1)
    gradient /= np.linalg.norm(gradient)
    energy = np.zeros(vocab)
    for _ in range(draws):
        basis = np.linalg.qr(random.standard_normal((vocab, rank)))[0]
        energy += (basis @ (basis.T @ gradient)) ** 2
    expected = random_share(gradient**2, np.ones(vocab), rank, vocab)
    assert expected.sum() == pytest.approx(1, abs=1e-12)
    assert energy / energy.sum() == pytest.approx(expected, abs=0.01)
    edges = [0, 1, 4, 30]
    grouped = random_share(np.add.reduceat(gradient**2, edges[:-1]), np.diff(edges), rank, vocab)
    assert grouped == pytest.approx(np.add.reduceat(expected, edges[:-1]))


@pytest.mark.parametrize(("rank", "vocab"), [(7, 7), (1, 1)])
def test_a_subspace_that_is_everything_keeps_everything_in_place(rank: int, vocab: int) -> None:
    full = np.linspace(1, 2, vocab) / np.linspace(1, 2, vocab).sum()
    assert random_share(full, np.ones(vocab), rank, vocab) == pytest.approx(full)


@pytest.mark.parametrize(("rows", "width"), [(4000, 200), (300, 200), (200, 200)])
def test_random_spectrum_is_that_of_random_entries(rows: int, width: int) -> None:
    matrix = np.random.default_rng(0).standard_normal((rows, width)) * 0.3
    values = np.linalg.svd(matrix, compute_uv=False)
    expected = random_spectrum(width, rows, float((values**2).sum()))
    assert (expected**2).sum() == pytest.approx((values**2).sum())
    assert expected == pytest.approx(values, abs=0.03 * values[0])
    assert (np.diff(expected) <= 0).all()


def test_symlog_is_odd_linear_inside_and_a_decade_a_step_outside() -> None:
    values = np.array([0, 5e-4, 1e-3, 1e-2, 1.0])
    assert symlog(values, 1e-3) == pytest.approx([0, 0.5, 1, 2, 4])
    assert symlog(-values, 1e-3) == pytest.approx([0, -0.5, -1, -2, -4])
