from __future__ import annotations

import csv
import dataclasses
import io
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from unembed import report
from unembed.report import _gradient
from unembed.results import Check, Record, Result, Table


@pytest.fixture(scope="module")
def html(record: Record) -> str:
    return report.render(record)


@pytest.fixture(scope="module")
def page(html: str, parse: type):
    return parse(html)


def test_same_record_same_page_also_from_disk_and_in_other_processes(record: Record, html: str, tmp_path: Path) -> None:
    record.save(tmp_path)
    path = report.write(tmp_path)
    assert path == tmp_path / "report.html"
    assert path.read_bytes() == html.encode("utf-8")
    assert report.render(str(tmp_path)) == html
    script = "import sys, unembed.report as r; sys.stdout.buffer.write(r.render(sys.argv[1]).encode())"
    for seed in ("1", "2"):
        environment = os.environ | {"PYTHONHASHSEED": seed, "COLUMNS": "40", "TZ": "Asia/Tokyo"}
        out = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, check=True, env=environment)
        assert out.stdout == html.encode("utf-8")


def test_headings_are_in_order_and_ids_are_unique(page) -> None:
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [a["href"][1:] for t, a in page.elements if t == "a"]
    assert set(targets) <= set(ids)


def test_summary_comes_first_then_integrity_numbers_measurements_provenance(page, record: Record) -> None:
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    assert sections == ["summary", "integrity", "numbers", *record.results, "provenance"]


def test_findings_are_whole_and_by_severity(record: Record, unknown: Result, parse: type) -> None:
    page = parse(report.render(dataclasses.replace(record, results=record.results | {"flux": unknown})))
    words = page.words()
    shown = [a["class"].split()[1] for t, a in page.elements if t == "article"]
    assert shown == ["error"] + ["info"] * (len(shown) - 1)
    for finding in (*record.findings, *unknown.findings):
        for part in (finding.code, finding.title, finding.evidence, finding.means, finding.not_means):
            assert " ".join(part.split()) in words


def test_failed_checks_come_first_and_passed_ones_are_folded(record: Record) -> None:
    checks = [
        Check("A", "ok", "fine"),
        Check("B", "note", "noted"),
        Check("C", "failed", "broken"),
        Check("D", "warning", "odd"),
    ]
    html = report.render(dataclasses.replace(record, integrity=checks))
    places = [html.index(word) for word in ("broken", "odd", "noted", '<details class="passed">', "fine</span>")]
    assert places == sorted(places)


def test_every_key_number_stands_beside_what_it_is_held_against(record: Record, page) -> None:
    words = page.words()
    gradient = record.results["gradient"].values["centred"]
    assert f"Gradient kept over its null {gradient['ratio']:.3f} ×" in words
    assert f"95 % interval {gradient['ratio_ci95'][0]:.3f} to {gradient['ratio_ci95'][1]:.3f}" in words
    assert f"null {gradient['kept_null']:.4f}, row-centred rank 16" in words
    assert "Rank of log P 17 of 17 17 is the bound. 240 contexts, tolerance" in words
    assert "Rank of W 16 of 16 Row-centred 16. Tolerance" in words
    assert "Uniform guess 5.704" in words
    assert "Padding rows 0 300 rows, 300 ids" in words


def test_softcap_has_no_bound_and_no_centred_convention(capped: Record, parse: type) -> None:
    words = parse(report.render(capped)).words()
    assert "No bound under a soft-cap" in words
    assert "Only the raw W convention applies to this head." in words
    assert "Row-centred W centred does not apply" in words


def test_padding_rows_and_missing_intervals_are_said(padded: Record, parse: type) -> None:
    words = parse(report.render(padded)).words()
    assert "Padding rows 4 304 rows, 300 ids. They draw 0." in words
    assert re.search(
        r"1 ± [\d.]+ \(95 %\) is a random subspace\. no interval: 3 documents, at least 8 are needed", words
    )
    assert "With padding rows, Row-centred W" in words
    assert "95 % interval of the ratio ratio_ci95 none none" in words


def test_no_interval_gives_no_reason_that_the_record_does_not_give(padded: Record, parse: type) -> None:
    gradient = padded.results["gradient"]
    values = gradient.values | {"interval": "expanded percentile bootstrap over documents, 4000 resamples"}
    results = padded.results | {"gradient": dataclasses.replace(gradient, values=values)}
    html = report.render(dataclasses.replace(padded, results=results))
    assert re.search(r"1 ± [\d.]+ \(95 %\) is a random subspace\. no interval\. Kept", parse(html).words())
    assert "No interval. Uniform guess" in parse(html).words()
    assert "<br>no interval" in json.dumps(_gradient.figures(results["gradient"], padded)[0].traces)
    assert "too few documents" not in html


def test_what_a_document_is_in_files_is_said_once(record: Record, parse: type) -> None:
    said = "documents (parts of up to 32 Ki characters of a long plain file count as documents of their own)"
    assert parse(report.render(record)).words().count(said) == 1
    topics = dataclasses.replace(record, provenance=record.provenance | {"text": {"kind": "topics"}})
    assert said not in parse(report.render(topics)).words()


def test_an_exhausted_text_is_said_in_the_first_sentence(record: Record, parse: type) -> None:
    def words(wanted: int) -> str:
        provenance = record.provenance | {"tokens_requested": wanted}
        return parse(report.render(dataclasses.replace(record, provenance=provenance))).words()

    said = "on 240 of 100,000 predictions in 12 documents of 2 files; the text is exhausted."
    assert said in words(100_000)
    assert "Predictions asked for 100,000" in words(100_000)
    assert "exhausted" not in words(240)


_OK, _NOTE = Check("UNE001", "ok", "Whole."), Check("UNE002", "note", "Tied.")
_PARITY = Check("UNE020", "ok", "Scores rebuilt from the weights are the model's: largest error 0.01.")


@pytest.mark.parametrize(
    ("checks", "said"),
    [
        (
            [_OK, _NOTE, _PARITY],
            "Passed The head is loaded right: 2 of 3 checks passed, 1 note. Scores rebuilt from the weights are the "
            "model's: largest error 0.01.",
        ),
        (
            [_OK, _NOTE, _NOTE],
            "Passed The head is loaded right as far as its files tell: 1 of 3 checks passed, 2 notes. The model itself "
            "was not run.",
        ),
        (
            [_OK, Check("UNE005", "warning", "3 rows are zero."), _PARITY],
            "Warning The head may not be loaded right. UNE005: 3 rows are zero. (2 of 3 checks passed, 1 warning.)",
        ),
        (
            [_OK, Check("UNE009", "warning", "No norm."), Check("UNE005", "failed", "All rows are zero.")],
            "Failed The head is not loaded right. UNE005: All rows are zero. "
            "(1 of 3 checks passed, 1 failed, 1 warning.)",
        ),
        ([], ""),
    ],
)
def test_the_summary_begins_with_whether_the_head_is_loaded_right(
    record: Record, checks: list[Check], said: str, parse: type
) -> None:
    words = parse(report.render(dataclasses.replace(record, integrity=checks))).words()
    start = words.index("Summary", words.index("This audit measured"))
    assert words[start:].startswith(
        f"Summary {said} More" if said else f"Summary {record.findings[0].severity.capitalize()}"
    )


def test_csv_inside_the_page_is_the_whole_table(record: Record, page) -> None:
    tables = [table for result in record.results.values() for table in result.tables]
    for number, table in enumerate(tables):
        assert page.table(number) == table.to_csv()
        header, *rows = csv.reader(io.StringIO(page.table(number)))
        assert header == list(table.columns)
        for name, values in zip(header, zip(*rows, strict=True), strict=True):
            column = table.columns[name]
            assert (np.array(values, dtype=column.dtype) == column).all()
    buttons = [a for t, a in page.elements if t == "button" and a.get("class") == "csv"]
    files = {int(button["data-table"]): button["data-file"] for button in buttons}
    assert files == {number: f"{table.name}.csv" for number, table in enumerate(tables)}


def test_long_table_shows_its_first_rows_and_keeps_all_in_the_csv(record: Record, parse: type) -> None:
    table = Table("long_list", "A long list", {"id": np.arange(50_000), "value": np.arange(50_000) / 7})
    result = Result("new", "UNE999", "Something new", {"count": 50_000}, (table,))
    html = report.render(dataclasses.replace(record, results={"new": result}))
    page = parse(html)
    assert "The first 40 of 50,000 rows" in page.words()
    assert sum(tag == "td" for tag, _ in page.elements) < 300
    assert page.table(0) == table.to_csv()


def test_unknown_measurement_shows_values_and_tables_but_no_figure(
    record: Record, unknown: Result, parse: type
) -> None:
    page = parse(report.render(dataclasses.replace(record, results={"flux": unknown})))
    words = page.words()
    for part in ("Flux of the head", "Flux total flux_total 1.210", "By side", "Left left", "a, b", "Flux by height"):
        assert part in words
    assert "0 0.5000 1 none 2 1.000 × 10⁻⁹" in words
    assert not [tag for tag, _ in page.elements if tag == "figure"]
    assert page.table(0) == unknown.tables[0].to_csv()


def test_not_applicable_says_why(record: Record, parse: type) -> None:
    result = Result("gradient", "UNE103", "Logit gradient", None, reason="the head has no scores")
    page = parse(report.render(dataclasses.replace(record, results={"gradient": result})))
    assert "Not applicable: the head has no scores." in page.words()
    assert not [tag for tag, _ in page.elements if tag == "figure"]


@pytest.mark.parametrize("head", [{}, {"vocab_rows": 10, "padding_rows": 2}])
def test_missing_keys_do_not_break_the_page(record: Record, head: dict, parse: type) -> None:
    for results in ({}, record.results):
        words = parse(report.render(Record({}, head, results=results))).words()
        assert "Unnamed model" in words
        assert "This audit measured the output head, from the weights alone." in words
        assert "undefined" not in words


def test_provenance_and_command(page) -> None:
    words = page.words()
    for part in ("unembed audit someone/small-model --seed 12345", "Seed 12345", "Versions: PyTorch 2.13.0", "a.txt"):
        assert part in words
    assert "Scale of the scores 1 " in words


def test_title_of_a_path_is_its_last_part(record: Record) -> None:
    for source, name in (
        ("/data/models/tiny", "tiny"),
        (r"C:\models\tiny", "tiny"),
        ("org/tiny", "org/tiny"),
        ("./tiny/", "tiny"),
    ):
        html = report.render(dataclasses.replace(record, model={"source": source}, results={}))
        assert f"<h1>{name}</h1>" in html


def test_figures_are_what_plotly_expects_and_each_has_words(page) -> None:
    import plotly.graph_objects as go

    drawings = next(json.loads(data) for about, data in page.scripts if about.get("id") == "drawings")
    assert len(drawings) == 10
    for drawing in drawings:
        painted = json.loads(re.sub(r'"@[a-z]+(/[\d.]+)?"', '"#123456"', json.dumps(drawing)))
        figure = go.Figure(data=painted["traces"], layout=painted["layout"])
        for name, axis in painted["log"].items():
            figure.update_layout({name: axis})
        assert all(axis.title.text or axis.type == "category" for axis in figure.select_xaxes())
    plots = [a for t, a in page.elements if a.get("class") == "plot"]
    assert all(len(plot["aria-label"]) > 40 and plot["role"] == "img" for plot in plots)
    captions = len([tag for tag, _ in page.elements if tag == "figcaption"])
    assert captions == len(plots) == len(drawings)
