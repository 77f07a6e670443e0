"""The interval of a statistic of sums: Student's width is tested with the sums of documents, the quantile here."""

import pytest

from unembed.results._bootstrap import _t_quantile


def test_students_quantile_is_right_to_three_digits():
    from scipy.stats import norm, t

    for freedom in (7, 10, 30, 1000):
        for level in (0.005, 0.025, 0.05, 0.975):
            assert _t_quantile(norm.ppf(level), freedom) == pytest.approx(t.ppf(level, freedom), rel=2e-3)
