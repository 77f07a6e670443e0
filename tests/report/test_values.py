from unembed.report._values import cell, grids


def test_groups_with_the_same_keys_stand_side_by_side() -> None:
    made = grids("gradient", {"tokens": 5, "raw": {"rank": 2, "kept": 0.5}, "centred": {"rank": 3, "kept": None}})
    assert [row[:2] for row in made[0].rows] == [("tokens", "Predictions measured")]
    assert made[1].columns == ["Raw W", "Row-centred W"]
    assert [row[2] for row in made[1].rows] == [["2", "3"], ["0.5000", "none"]]


def test_a_group_that_repeats_the_top_level_becomes_its_column() -> None:
    shared = {"rank": 1, "largest": 2.0, "smallest": 0.5}
    inner = {"rows": 9, **shared, "centred": {**shared, "rank": 7}}
    made = grids("spectrum", {"tolerance": 0.1, "rows": 8, **shared, "centred": shared, "all_rows": inner})
    assert [row[0] for row in made[0].rows] == ["tolerance"]
    assert made[1].columns == ["Raw W", "Row-centred W", "With padding rows", "With padding rows, Row-centred W"]
    assert {row[0]: row[2] for row in made[1].rows}["rank"] == ["1", "1", "1", "7"]
    assert {row[0]: row[2] for row in made[1].rows}["rows"] == ["8", "", "9", ""]


def test_no_value_is_lost() -> None:
    values = {"a": 1, "b": {"c": 2, "d": {"e": 3}}, "f": {"mean": 4.0, "ci95": [3.0, 5.0]}, "g": [], "h": None}
    shown = {row[0]: row[2] for grid in grids("new", values) for row in grid.rows}
    assert shown == {
        "a": ["1"],
        "c": ["2"],
        "e": ["3"],
        "f": ["4.000 (95 % 3.000 to 5.000)"],
        "g": ["none"],
        "h": ["none"],
    }


def test_cells() -> None:
    assert cell({"mean": 13.5, "sd": 0.13}) == "13.50 (sd 0.1300)"
    assert cell({"mean": 1.0, "ci95": None}) == "1.000"
    assert cell([1.0, 2.0]) == "1.000 to 2.000"
    assert cell(["a", "b", "c"]) == "a, b, c"
    assert grids("x", {}) == []
