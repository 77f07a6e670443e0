"""Tables, results and the order of findings."""

import csv
import io
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unembed.results import Finding, Record, Result, Table
from unembed.text import visible


def _finding(severity, title="t"):
    return Finding("UNE103", severity, title, "evidence", "means")


def _read(text):
    return list(csv.reader(io.StringIO(text)))


@given(st.lists(st.floats(), max_size=8))
def test_floats_come_back_from_csv_to_the_last_bit(numbers):
    table = Table("t", "T", {"x": np.array(numbers, dtype=np.float64)})
    header, *rows = _read(table.to_csv())
    assert header == ["x"]
    for (text,), number in zip(rows, numbers, strict=True):
        assert float(text) == number or (math.isnan(number) and math.isnan(float(text)))
        assert math.copysign(1, float(text)) == math.copysign(1, number) or math.isnan(number)


@given(st.lists(st.floats(width=32, allow_nan=False), max_size=8))
def test_float32_columns_come_back_equal(numbers):
    column = np.array(numbers, dtype=np.float32)
    _, *rows = _read(Table("t", "T", {"x": column}).to_csv())
    assert np.array([float(text) for (text,) in rows], dtype=np.float32).tolist() == column.tolist()


@given(st.lists(st.text(max_size=9).map(visible), max_size=5))
def test_strings_made_visible_come_back_from_csv(strings):
    table = Table("t", "T", {"s": np.array(strings, dtype=str), "n": np.arange(len(strings))})
    _, *rows = _read(table.to_csv())
    assert rows == [[string, str(i)] for i, string in enumerate(strings)]


def test_integers_stay_integers_and_booleans_readable():
    table = Table("t", "T", {"i": np.array([2**62, -1]), "b": np.array([True, False])})
    assert table.to_csv() == f"i,b\n{2**62},True\n-1,False\n"


def test_an_empty_table_has_its_header():
    assert Table("t", "T", {"x": np.zeros(0), "y": np.zeros(0)}).to_csv() == "x,y\n"
    assert len(Table("t", "T", {"x": np.zeros(0)})) == 0
    assert len(Table("t", "T", {})) == 0


def test_columns_of_unequal_length_are_an_error_that_names_them():
    with pytest.raises(ValueError, match=r"Table `t`: columns must have one length, got \{'x': 2, 'y': 3\}"):
        Table("t", "T", {"x": np.zeros(2), "y": np.zeros(3)})


def test_objects_in_a_column_are_an_error_since_they_would_not_load_again():
    with pytest.raises(ValueError, match=r"Table `t`: .*'y'"):
        Table("t", "T", {"x": np.zeros(2), "y": np.array([None, 1.0])})


def test_a_table_is_found_by_name_and_a_missing_one_names_those_there_are():
    one, other = Table("one", "1", {}), Table("other", "2", {})
    result = Result("gradient", "UNE103", "G", {}, (one, other))
    assert result.table("other") is other
    with pytest.raises(KeyError, match=r"`gradient` has no table `none`, only \['one', 'other'\]"):
        result.table("none")


def test_findings_are_ordered_by_severity_and_then_as_found():
    titles = [("info", "a"), ("warning", "b"), ("error", "c"), ("info", "d"), ("warning", "e")]
    result = Result("g", "UNE103", "G", {}, findings=tuple(_finding(*item) for item in titles))
    assert [finding.title for finding in result.findings] == ["c", "b", "e", "a", "d"]
    record = Record(
        {}, {}, results={"a": Result("a", "UNE103", "A", {}, findings=(_finding("info", "z"),)), "g": result}
    )
    assert [finding.title for finding in record.findings] == ["c", "b", "e", "z", "a", "d"]


@pytest.mark.parametrize(
    ("severities", "worst"),
    [([], None), (["info"], "info"), (["info", "warning", "info"], "warning"), (["warning", "error"], "error")],
)
def test_the_worst_severity(severities, worst):
    results = {str(i): Result(str(i), "UNE103", "G", {}, findings=(_finding(s),)) for i, s in enumerate(severities)}
    assert Record({}, {}, results=results).worst() == worst
