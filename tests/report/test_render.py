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
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from plotly.offline import get_plotlyjs

from unembed import report
from unembed.report._render import embed
from unembed.results import Check, Record, Result, Table

VOID = {"meta", "link", "img", "br", "input", "hr"}


class Page(HTMLParser):
    """What a browser would make of a page: elements, attributes, visible text; fails on tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[tuple[dict[str, str], str]] = []
        self.styles: list[str] = []
        self.text: list[str] = []
        self.declared = ""
        self._open: list[tuple[str, dict[str, str]]] = []
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_decl(self, decl: str) -> None:
        self.declared = decl

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment in the page: {data[:80]}")

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> without a start"
        assert self._open[-1][0] == tag, f"</{tag}> inside <{self._open[-1][0]}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "script":
            self.scripts.append((attributes, data))
        elif tag == "style":
            self.styles.append(data)
        else:
            self.text.append(data)

    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def table(self, number: int) -> str:
        return next(json.loads(data) for about, data in self.scripts if about.get("id") == f"table-{number}")


@pytest.fixture(scope="module")
def html(record: Record) -> str:
    return report.render(record)


@pytest.fixture(scope="module")
def page(html: str) -> Page:
    return Page(html)


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


def test_render_never_imports_torch(record: Record, tmp_path: Path) -> None:
    record.save(tmp_path)
    script = "import sys, unembed.report as r; r.write(sys.argv[1]); print([m for m in sys.modules if m == 'torch'])"
    out = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, check=True, text=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize(("module", "package"), [("plotly.offline", "plotly"), ("jinja2", "jinja2")])
def test_missing_part_names_the_extra(
    record: Record, monkeypatch: pytest.MonkeyPatch, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ImportError, match=rf'{package}: pip install "unembed\[report\]"'):
        report.render(record)


def test_page_needs_nothing_else(page: Page, html: str) -> None:
    for tag, attributes in page.elements:
        assert tag not in {"iframe", "object", "embed", "base", "img"}
        for name in ("src", "href", "action", "data", "poster", "srcset"):
            value = attributes.get(name)
            assert value is None or value.startswith("#") or value == "data:,", (tag, name, value)
        assert not [name for name in attributes if name.startswith("on")], (tag, attributes)
    assert not re.search(r"@import|url\(|@font-face", "".join(page.styles))
    policy = next(a["content"] for t, a in page.elements if t == "meta" and a.get("http-equiv"))
    assert "default-src 'none'" in policy
    assert "http" not in policy
    rest = html.replace(get_plotlyjs(), "")
    assert len(rest) < len(html)
    assert not re.search(r"https?:|//cdn", rest), "an address outside plotly.js"


def test_plotly_is_inside_once_and_only_where_figures_are(html: str) -> None:
    assert html.count(get_plotlyjs()) == 1
    assert html.count("* plotly.js v") == 1
    bare = report.render(Record({}, {}))
    assert "plotly.js v" not in bare


def test_headings_are_in_order_and_ids_are_unique(page: Page) -> None:
    levels = [int(tag[1]) for tag, _ in page.elements if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    ids = [attributes["id"] for _, attributes in page.elements if "id" in attributes]
    assert len(ids) == len(set(ids))
    targets = [a["href"][1:] for t, a in page.elements if t == "a"]
    assert set(targets) <= set(ids)


def test_summary_comes_first_then_integrity_numbers_measurements_provenance(page: Page, record: Record) -> None:
    sections = [attributes["id"] for tag, attributes in page.elements if tag == "section"]
    assert sections == ["summary", "integrity", "numbers", *record.results, "provenance"]


def test_findings_are_whole_and_by_severity(record: Record, unknown: Result) -> None:
    page = Page(report.render(dataclasses.replace(record, results=record.results | {"flux": unknown})))
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


def test_every_key_number_stands_beside_what_it_is_held_against(record: Record, page: Page) -> None:
    words = page.words()
    gradient = record.results["gradient"].values["centred"]
    assert f"Gradient kept over its null {gradient['ratio']:.3f} ×" in words
    assert f"95 % interval {gradient['ratio_ci95'][0]:.3f} to {gradient['ratio_ci95'][1]:.3f}" in words
    assert f"null {gradient['kept_null']:.4f}, row-centred rank 16" in words
    assert "Rank of log P 17 of 17 17 is the bound. 240 contexts, tolerance" in words
    assert "Rank of W 16 of 16 Row-centred 16. Tolerance" in words
    assert "Uniform guess 5.704" in words
    assert "Padding rows 0 300 rows, 300 ids" in words


def test_softcap_has_no_bound_and_no_centred_convention(capped: Record) -> None:
    words = Page(report.render(capped)).words()
    assert "No bound under a soft-cap" in words
    assert "Only the raw W convention applies to this head." in words
    assert "Row-centred W centred does not apply" in words


def test_padding_rows_and_missing_intervals_are_said(padded: Record) -> None:
    words = Page(report.render(padded)).words()
    assert "Padding rows 4 304 rows, 300 ids. They draw 0." in words
    assert "1 is a random subspace. no interval: too few documents." in words
    assert "With padding rows, Row-centred W" in words
    assert "95 % interval of the ratio ratio_ci95 none none" in words


def test_csv_inside_the_page_is_the_whole_table(record: Record, page: Page) -> None:
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


def test_long_table_shows_its_first_rows_and_keeps_all_in_the_csv(record: Record) -> None:
    table = Table("long_list", "A long list", {"id": np.arange(50_000), "value": np.arange(50_000) / 7})
    result = Result("new", "UNE999", "Something new", {"count": 50_000}, (table,))
    html = report.render(dataclasses.replace(record, results={"new": result}))
    page = Page(html)
    assert "The first 40 of 50,000 rows" in page.words()
    assert sum(tag == "td" for tag, _ in page.elements) < 300
    assert page.table(0) == table.to_csv()


def test_unknown_measurement_shows_values_and_tables_without_a_figure(record: Record, unknown: Result) -> None:
    page = Page(report.render(dataclasses.replace(record, results={"flux": unknown})))
    words = page.words()
    for part in ("Flux of the head", "Flux total flux_total 1.210", "By side", "Left left", "a, b", "Flux by height"):
        assert part in words
    assert "9 1.000 × 10⁻⁹" not in words
    assert "1.000\N{NARROW NO-BREAK SPACE}×\N{NARROW NO-BREAK SPACE}10⁻⁹" in words
    assert not [tag for tag, _ in page.elements if tag == "figure"]
    assert page.table(0) == unknown.tables[0].to_csv()


def test_not_applicable_says_why(record: Record) -> None:
    result = Result("gradient", "UNE103", "Logit gradient", None, reason="the head has no scores")
    page = Page(report.render(dataclasses.replace(record, results={"gradient": result})))
    assert "Not applicable: the head has no scores." in page.words()
    assert not [tag for tag, _ in page.elements if tag == "figure"]


@pytest.mark.parametrize("head", [{}, {"vocab_rows": 10, "padding_rows": 2}])
def test_missing_keys_do_not_break_the_page(record: Record, head: dict) -> None:
    for results in ({}, record.results):
        words = Page(report.render(Record({}, head, results=results))).words()
        assert "Unnamed model" in words
        assert "This audit measured the output head, from the weights alone." in words
        assert "undefined" not in words


def test_provenance_and_command(page: Page) -> None:
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


def test_hostile_text_is_visible_and_runs_nowhere(hostile: Record, record: Record) -> None:
    html = report.render(hostile)
    html.encode("utf-8")
    page = Page(html)
    friendly = Page(report.render(record))
    tables = sum(len(result.tables) for result in hostile.results.values())
    assert len([s for s in page.scripts if "type" not in s[0]]) == len(
        [s for s in friendly.scripts if "type" not in s[0]]
    )
    assert len(page.scripts) == 2 + 1 + tables
    assert not [a for _, a in page.elements if any(name.startswith("on") for name in a)]
    assert not [tag for tag, _ in page.elements if tag in {"img", "b"}]
    words = page.words()
    for part in (
        "<script>alert(1)</script>",
        '"><img src=x onerror=alert(3)>',
        "{{ 7 * 7 }}{% raw %}",
        r"right\u202eto left\u200b",
    ):
        assert part in words
    for part in (
        r"line\u2028and\u2029paragraph\x0d\x0aand\x09tab",
        r"lone \udc80 surrogate \ud800",
        r"nul \x00 bell \x07",
    ):
        assert part in words
    outside = html.replace(get_plotlyjs(), "")
    assert not re.search("[\u2028\u2029\u202e\u200b\x00\x07\x1b\r]", outside)


def test_hostile_record_writes_and_its_csv_keeps_every_character(hostile: Record, tmp_path: Path) -> None:
    page = Page(report.render(hostile))
    tables = [table for result in hostile.results.values() for table in result.tables]
    assert [page.table(i) for i in range(len(tables))] == [table.to_csv() for table in tables]
    (tmp_path / "audit.json").write_text(json.dumps(hostile.to_json()), encoding="utf-8")
    np.savez(tmp_path / "tables.npz")
    assert report.write(tmp_path).stat().st_size > 1_000_000


def test_embedded_json_cannot_leave_its_script() -> None:
    text = "</script><!-- & \u2028 \udc80 é"
    inside = embed({"x": text})
    assert inside.isascii()
    assert not set("<>&") & set(inside)
    assert json.loads(inside) == {"x": text}


def test_figures_are_what_plotly_expects_and_each_has_words(page: Page) -> None:
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


def test_colours_have_enough_contrast_in_both_themes(page: Page) -> None:
    pairs = re.findall(r"--([a-z]+): light-dark\((#\w{6}), (#\w{6})\)", page.styles[0])
    for theme in (1, 2):
        colour = {pair[0]: _luminance(pair[theme]) for pair in pairs}
        for ground in ("paper", "panel"):
            for name in ("ink", "muted", "link", "error", "warning", "info", "good"):
                assert _contrast(colour[name], colour[ground]) >= 4.5, (theme, name, ground)
        for name in ("raw", "centred", "full", "null", "focus"):
            assert _contrast(colour[name], colour["paper"]) >= 3, (theme, name)


def _luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _contrast(a: float, b: float) -> float:
    return (max(a, b) + 0.05) / (min(a, b) + 0.05)
