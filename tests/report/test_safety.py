from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from plotly.offline import get_plotlyjs

from unembed import report
from unembed.report._render import embed
from unembed.results import InputError, Record


@pytest.fixture(scope="module")
def html(record: Record) -> str:
    return report.render(record)


@pytest.fixture(scope="module")
def page(html: str, parse: type):
    return parse(html)


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
    with pytest.raises(InputError, match=rf'{package}: pip install "unembed\[report\]"'):
        report.render(record)


@pytest.mark.parametrize("package", ["plotly", "jinja2", "markupsafe"])
def test_a_missing_part_is_known_before_any_work(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    report.check_installed()
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(InputError, match=rf'needs {package}: pip install "unembed\[report\]"'):
        report.check_installed()


def test_the_look_for_the_parts_imports_none_of_them() -> None:
    script = (
        "import sys, unembed.report as r; r.check_installed()\n"
        "assert not {'plotly', 'jinja2', 'markupsafe'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_page_needs_nothing_else(page, html: str) -> None:
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


def test_hostile_text_is_visible_and_runs_nowhere(hostile: Record, record: Record, parse: type) -> None:
    html = report.render(hostile)
    html.encode("utf-8")
    page = parse(html)
    friendly = parse(report.render(record))
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
        r"line\u2028and\u2029paragraph\r\nand\ttab",
        r"lone \udc80 surrogate \ud800",
        r"nul \x00 bell \x07",
    ):
        assert part in words
    outside = html.replace(get_plotlyjs(), "")
    assert not re.search("[\u2028\u2029\u202e\u200b\x00\x07\x1b\r]", outside)


def test_hostile_record_writes_and_its_csv_keeps_every_character(hostile: Record, tmp_path: Path, parse: type) -> None:
    page = parse(report.render(hostile))
    tables = [table for result in hostile.results.values() for table in result.tables]
    assert [page.table(i) for i in range(len(tables))] == [table.to_csv() for table in tables]
    # Names of tables and columns are the program's own; as parts of file names they cannot hold everything.
    plain = {
        name: dataclasses.replace(result, tables=tuple(t for t in result.tables if "/" not in t.name))
        for name, result in hostile.results.items()
    }
    record = dataclasses.replace(hostile, results=plain)
    assert report.write(record.save(tmp_path)).read_text(encoding="utf-8") == report.render(record)


def test_embedded_json_cannot_leave_its_script() -> None:
    text = "</script><!-- & \u2028 \udc80 é"
    inside = embed({"x": text})
    assert inside.isascii()
    assert not set("<>&") & set(inside)
    assert json.loads(inside) == {"x": text}


def test_colours_have_enough_contrast_in_both_themes(page) -> None:
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
