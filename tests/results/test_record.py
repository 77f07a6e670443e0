"""A record is written whole and read back equal."""

import errno
import json
import math
import os

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unembed.results import SCHEMA_VERSION, Check, Finding, Record, Result, Table, safe_name
from unembed.results._files import Stage

HOSTILE = [
    "<script>alert(1)</script>",
    "a\x00b",
    "\u202eevil",
    "\ud800",
    "",
    "'\"\\,\n",
    "=cmd()",
    "終",
    "é",
    "__proto__",
]


def _record():
    table = Table(
        "gradient_bands",
        "Bands",
        {"x": np.array([0.1, math.nan, -math.inf]), "n": np.array([1, 2, 2**60]), "s": np.array(["a", "<b>", "終"])},
        {"x": "a number"},
    )
    empty = Table("empty_table", "Nothing", {"x": np.zeros(0), "s": np.zeros(0, dtype="<U5")})
    findings = (
        Finding("UNE103", "info", "one", "e", "m", "n"),
        Finding("UNE103", "warning", "two", "e", "m"),
        Finding("UNE103", "info", "three", "e", "m"),
    )
    return Record(
        model={"source": "x/y", **{f"key {text}": text for text in HOSTILE}},
        head={"kind": "linear", "softcap": None, "scale": 0.1 + 0.2},
        integrity=[Check("UNE001", "ok", text) for text in HOSTILE],
        results={
            "spectrum": Result("spectrum", "UNE101", "S", {"rank": 3, "nested": {"a": [1, 2.5, None, "b"]}}, (empty,)),
            "gradient": Result("gradient", "UNE103", "G", {"kept": 1e-300, "code_of": "x"}, (table,), findings),
            "coefficients": Result("coefficients", "UNE104", "C", None, reason="no prediction was sampled"),
        },
        provenance={"seed": 2**63, "text": {"names": HOSTILE}},
        timing={"started": "2026-01-01T00:00:00+00:00", "seconds": 0.25},
    )


def _assert_equal(one, other):
    for name in ("model", "head", "integrity", "provenance", "timing"):
        assert getattr(one, name) == getattr(other, name), name
    assert list(one.results) == list(other.results)
    for name, result in one.results.items():
        back = other.results[name]
        for part in ("name", "code", "title", "values", "findings", "reason"):
            assert getattr(back, part) == getattr(result, part), (name, part)
        assert [table.name for table in back.tables] == [table.name for table in result.tables]
        for a, b in zip(result.tables, back.tables, strict=True):
            assert (a.title, a.notes, list(a.columns)) == (b.title, b.notes, list(b.columns))
            for key, column in a.columns.items():
                assert b.columns[key].dtype == column.dtype, key
                np.testing.assert_array_equal(b.columns[key], column)


def _everything(folder):
    return {str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None for p in sorted(folder.rglob("*"))}


def test_a_record_comes_back_equal_hostile_strings_included(tmp_path):
    record = _record()
    assert record.save(tmp_path / "a" / "b") == tmp_path / "a" / "b"
    back = Record.load(tmp_path / "a" / "b")
    _assert_equal(record, back)
    assert back.worst() == "warning"
    back.save(tmp_path / "again")
    first = (tmp_path / "a" / "b" / "audit.json").read_bytes()
    assert (tmp_path / "again" / "audit.json").read_bytes() == first
    first.decode("ascii")  # escapes only: a lone surrogate cannot spoil the file


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.dictionaries(st.text(max_size=8).filter(lambda key: key != "code"), json_values, max_size=3))
def test_any_json_values_come_back_equal(tmp_path, values):
    record = Record(values, values, results={"spectrum": Result("spectrum", "UNE101", "S", values)})
    record.save(tmp_path / "r")
    _assert_equal(record, Record.load(tmp_path / "r"))


def test_numbers_that_json_cannot_hold_are_null_and_numpy_scalars_plain(tmp_path):
    values = {
        "nan": math.nan,
        "inf": [math.inf, (-math.inf, 1.0)],
        "f32": np.float32(0.5),
        "i64": np.int64(7),
        "bool": np.bool_(True),
        "str": np.str_("x"),
        "nan32": np.float32("nan"),
        3: {"deep": np.float64("inf")},
    }
    record = Record({}, {}, results={"s": Result("s", "UNE101", "S", values)})
    expected = {
        "nan": None,
        "inf": [None, [None, 1.0]],
        "f32": 0.5,
        "i64": 7,
        "bool": True,
        "str": "x",
        "nan32": None,
        "3": {"deep": None},
    }
    record.save(tmp_path)
    assert Record.load(tmp_path).results["s"].values == expected
    written = record.to_json()["results"]["s"]
    assert type(written["i64"]) is int
    assert type(written["bool"]) is bool
    text = (tmp_path / "audit.json").read_text()
    assert "NaN" not in text
    assert "Infinity" not in text


def test_the_files_are_the_json_the_arrays_and_a_csv_a_table(tmp_path):
    _record().save(tmp_path, extra={"report.html": "<p>\ud800</p>"})
    assert sorted(_everything(tmp_path)) == [
        "audit.json",
        "report.html",
        "tables",
        "tables.npz",
        "tables/empty_table.csv",
        "tables/gradient_bands.csv",
    ]
    assert (tmp_path / "tables" / "empty_table.csv").read_text() == "x,s\n"
    content = json.loads((tmp_path / "audit.json").read_text())
    assert content["schema_version"] == SCHEMA_VERSION
    assert content["results"]["gradient"]["code"] == "UNE103"
    assert content["results"]["coefficients"] is None
    assert content["not_applicable"] == {"coefficients": "no prediction was sampled"}
    assert content["tables"]["gradient_bands"]["rows"] == 3
    assert [finding["title"] for finding in content["findings"]] == ["two", "one", "three"]


def test_a_second_audit_in_the_same_folder_leaves_no_table_of_the_first(tmp_path):
    _record().save(tmp_path)
    (tmp_path / "tables" / "mine.csv").write_text("not ours")
    second = _record()
    del second.results["spectrum"]
    second.save(tmp_path)
    assert sorted(p.name for p in (tmp_path / "tables").iterdir()) == ["gradient_bands.csv", "mine.csv"]
    _assert_equal(second, Record.load(tmp_path))


@pytest.mark.parametrize("hostile", [{"tables": {"../../victim": {}}}, {"tables": ["../victim"]}, [], {"tables": 3}])
def test_an_earlier_file_that_is_not_ours_cannot_name_files_to_delete(tmp_path, hostile):
    folder = tmp_path / "a" / "audit"
    folder.mkdir(parents=True)
    for victim in (tmp_path / "victim.csv", tmp_path / "a" / "victim.csv", folder / "victim.csv"):
        victim.write_text("precious")
    (folder / "audit.json").write_text(json.dumps(hostile))
    _record().save(folder)
    assert all(v.exists() for v in (tmp_path / "victim.csv", tmp_path / "a" / "victim.csv", folder / "victim.csv"))
    _assert_equal(_record(), Record.load(folder))


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("failing", range(6))
@pytest.mark.parametrize("before", [False, True])
def test_a_write_that_fails_anywhere_leaves_the_folder_as_it_was(tmp_path, monkeypatch, error, failing, before):
    folder = tmp_path / "audit"
    if before:
        _record().save(folder)
    state = _everything(tmp_path)
    changed = _record()
    changed.model["source"] = "other"
    calls = 0

    def fsync(handle):
        nonlocal calls
        calls += 1
        if calls > failing:
            raise error

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fsync)
        if failing < 5:  # two tables, the arrays, the report, the JSON
            with pytest.raises(type(error)):
                changed.save(folder, extra={"report.html": "new"})
            assert _everything(tmp_path) == state
        else:
            changed.save(folder, extra={"report.html": "new"})
            assert Record.load(folder).model["source"] == "other"


def test_a_write_that_fails_inside_a_file_leaves_no_part_of_it(tmp_path, monkeypatch):
    def text(self, name, content):
        with self.open(name) as file:
            file.write(content.encode("utf-8", "replace")[:3])
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Stage, "text", text)
    with pytest.raises(OSError, match="No space"):
        _record().save(tmp_path / "audit")
    assert _everything(tmp_path) == {}


def test_values_that_are_no_json_fail_before_anything_is_replaced(tmp_path):
    _record().save(tmp_path)
    state = _everything(tmp_path)
    with pytest.raises(TypeError):
        Record({"path": object()}, {}).save(tmp_path)
    assert _everything(tmp_path) == state


@pytest.mark.parametrize("version", [SCHEMA_VERSION + 1, None, "1", 0])
def test_another_schema_is_an_error_that_names_both_versions(tmp_path, version):
    _record().save(tmp_path)
    path = tmp_path / "audit.json"
    content = json.loads(path.read_text())
    content["schema_version"] = version
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=rf"audit\.json: expected schema_version {SCHEMA_VERSION}, got {version!r}"):
        Record.load(tmp_path)


def test_missing_files_are_an_error_of_their_own(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"audit\.json"):
        Record.load(tmp_path)
    _record().save(tmp_path)
    (tmp_path / "tables.npz").unlink()
    with pytest.raises(FileNotFoundError, match=r"tables\.npz"):
        Record.load(tmp_path)


def test_arrays_with_pickled_objects_are_not_loaded(tmp_path):
    _record().save(tmp_path)
    np.savez(tmp_path / "tables.npz", **{"t/x": np.array([print], dtype=object)})
    with pytest.raises(ValueError, match="allow_pickle=False"):
        Record.load(tmp_path)


@given(st.text())
def test_safe_names_are_file_names_and_never_hidden_or_empty(name):
    safe = safe_name(name)
    assert safe
    assert set(safe) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789._-")
    assert safe[0] not in "-."
    assert safe_name(safe) == safe


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/Model-1.5B", "org-Model-1.5B"),
        ("../../etc/passwd", "etc-passwd"),
        ("..", "model"),
        ("", "model"),
        ("終", "model"),
    ],
)
def test_safe_names_by_example(name, expected):
    assert safe_name(name) == expected
