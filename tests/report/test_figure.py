import numpy as np
import pytest

from unembed.report._figure import MOST_POINTS, line, log_labels, plain, thin


@pytest.mark.parametrize("length", [0, 1, MOST_POINTS, MOST_POINTS + 1, 12_345, 262_144, 2_000_000])
def test_thin_keeps_both_ends_and_the_dense_start(length: int) -> None:
    drawn = thin(length)
    assert len(drawn) == len(set(drawn.tolist())) <= MOST_POINTS
    if length <= MOST_POINTS:
        assert drawn.tolist() == list(range(length))
    else:
        assert len(drawn) > 0.97 * MOST_POINTS
        assert (drawn[0], drawn[-1]) == (0, length - 1)
        assert drawn[:100].tolist() == list(range(100))
        assert (np.diff(drawn) > 0).all()


def test_long_line_is_thinned_but_true() -> None:
    x = np.arange(1, 100_001)
    trace = line("all", "raw", x, 1 / x)
    assert len(trace["x"]) <= MOST_POINTS
    assert trace["y"] == plain(1 / np.array(trace["x"]))


def test_plain_is_json_without_nan() -> None:
    assert plain(np.array([1.23456789, np.nan, np.inf, 0.0])) == [1.23457, None, None, 0.0]
    assert plain(np.array([123456789])) == [123456789]


def test_log_labels_follow_the_decades() -> None:
    assert log_labels([1, 30]) == {"type": "log", "dtick": "D2", "tickformat": ",~g"}
    assert log_labels([1, 1e6])["dtick"] == 1
    assert log_labels([1e-10, 1e10, 0.0, np.nan])["dtick"] == 3
    assert log_labels([0.0])["type"] == "log"
