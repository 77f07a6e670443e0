"""The nulls that the figures compute themselves, against random draws."""

import numpy as np
import pytest

from unembed.report._coefficients import symlog
from unembed.report._spectrum import random_spectrum


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
