from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from unembed import report
from unembed.results import Record, Result, Table

pytestmark = pytest.mark.browser
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

NAMES = ("chromium", "chromium-browser", "google-chrome")
ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="module")
def browser() -> Iterator:
    path = next((found for name in NAMES if (found := shutil.which(name))), None)
    if path is None:
        pytest.skip(f"no browser on the path: {', '.join(NAMES)}")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=list(ARGUMENTS))
        yield browser
        browser.close()


class Visit:
    """An open report that remembers everything it should not have done."""

    def __init__(self, browser, path: Path, width: int = 1280, **options) -> None:
        self.complaints: list[str] = []
        self.context = browser.new_context(viewport={"width": width, "height": 900}, accept_downloads=True, **options)
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(f"console {message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(f"error: {error}"))
        self.page.on("dialog", lambda dialog: (self.complaints.append(f"dialog: {dialog.message}"), dialog.dismiss()))
        self.page.on("request", lambda request: self._request(request.url, path))
        self.page.goto(path.as_uri())
        self.settle()

    def _request(self, url: str, path: Path) -> None:
        if url != path.as_uri() and not url.startswith(("blob:", "data:")):
            self.complaints.append(f"request: {url[:200]}")

    def settle(self) -> None:
        """Until two frames have gone by, so that observers have run."""
        self.page.evaluate(
            "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 50))))"
        )

    def drawn(self) -> list[dict]:
        """What each figure shows: traces given and drawn, sizes, the colour of its words."""
        return self.page.evaluate(
            """() => [...document.querySelectorAll(".plot")].map((plot) => {
                const box = (part) => part.getBoundingClientRect();
                const data = JSON.parse(document.getElementById("drawings").textContent)[plot.dataset.figure];
                const area = box(plot.querySelector(".cartesianlayer"));
                const marks = [...plot.querySelectorAll(".trace path, .trace .point, .bars path")];
                const sized = marks.filter((mark) => box(mark).width + box(mark).height > 0);
                return {
                    given: data.traces.length,
                    traces: plot.querySelectorAll(".trace").length, marks: sized.length,
                    width: area.width, height: area.height,
                    outside: box(plot.querySelector(".main-svg")).right - box(plot).right,
                    ink: getComputedStyle(plot.querySelector(".xtick text, .ytick text")).fill,
                };
            })"""
        )

    def open_everything(self) -> None:
        self.page.evaluate("document.querySelectorAll('details').forEach((part) => { part.open = true; })")
        self.settle()

    def overflow(self) -> float:
        return self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def close(self) -> None:
        self.context.close()
        assert self.complaints == []


@pytest.fixture(scope="module")
def saved(record: Record, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return report.write(record.save(tmp_path_factory.mktemp("report with spaces & ünïcode")))


@pytest.mark.parametrize("width", [390, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_figure_is_drawn_and_the_page_is_silent(browser, saved: Path, width: int, scheme: str) -> None:
    visit = Visit(browser, saved, width, color_scheme=scheme)
    figures = visit.drawn()
    assert len(figures) == 10
    for figure in figures:
        assert figure["traces"] == figure["given"]
        assert figure["marks"] >= figure["traces"]
        assert figure["width"] > 0.5 * min(width, 900) - 60
        assert figure["height"] > 50
        assert figure["outside"] <= 1
        assert (_brightness(figure["ink"]) > 128) == (scheme == "dark")
    assert visit.overflow() <= 0
    visit.close()


def test_details_open_without_overflow_on_a_phone(browser, saved: Path) -> None:
    visit = Visit(browser, saved, 390, has_touch=True, is_mobile=True)
    visit.page.locator("details:not([open]) > summary").first.click()
    visit.open_everything()
    assert visit.overflow() <= 0
    visit.close()


def test_theme_button_goes_round_and_figures_follow(browser, saved: Path) -> None:
    visit = Visit(browser, saved, color_scheme="dark")
    button = visit.page.locator("#theme")
    seen = []
    for _ in range(4):
        ground = visit.page.evaluate("getComputedStyle(document.body).backgroundColor")
        seen.append((button.inner_text(), _brightness(ground) > 128, _brightness(visit.drawn()[0]["ink"]) > 128))
        button.click()
        visit.settle()
    system = ("Theme: system", False, True)
    assert seen == [system, ("Theme: light", True, False), ("Theme: dark", False, True), system]
    visit.close()


def test_log_buttons_change_the_scale_and_back(browser, saved: Path) -> None:
    visit = Visit(browser, saved)
    kind = "(b) => document.querySelector(`.plot[data-figure='${b.dataset.figure}']`)._fullLayout[b.dataset.axis].type"
    buttons = visit.page.locator(".scale").all()
    assert len(buttons) == 4
    for button in buttons:
        assert button.evaluate(kind) == "linear"
        button.click()
        assert button.evaluate(kind) == "log"
        assert button.get_attribute("aria-pressed") == "true"
        button.click()
        assert button.evaluate(kind) == "linear"
    assert all(figure["traces"] == figure["given"] for figure in visit.drawn())
    visit.close()


def test_csv_downloads_are_the_tables(browser, saved: Path, record: Record) -> None:
    visit = Visit(browser, saved)
    tables = {f"{table.name}.csv": table for result in record.results.values() for table in result.tables}
    visit.open_everything()
    buttons = visit.page.locator("button.csv").all()
    assert len(buttons) == len(tables)
    for button in buttons:
        with visit.page.expect_download() as download:
            button.click()
        table = tables.pop(download.value.suggested_filename)
        assert Path(download.value.path()).read_bytes() == table.to_csv().encode("utf-8")
    visit.close()


def test_print_is_light_whole_and_undone_afterwards(browser, saved: Path, tmp_path: Path) -> None:
    visit = Visit(browser, saved, color_scheme="dark")
    page = visit.page
    closed = page.locator("details:not([open])").count()
    assert closed > 3
    page.emulate_media(media="print", color_scheme="dark")
    sync_api.expect(page.locator("details:not([open])")).to_have_count(0)
    visit.settle()
    assert page.locator("button:visible").count() == 0
    assert page.locator("nav:visible").count() == 0
    assert _brightness(page.evaluate("getComputedStyle(document.body).backgroundColor")) > 128
    for figure in visit.drawn():
        assert _brightness(figure["ink"]) < 128
        assert 300 < figure["width"] <= 660
    page.emulate_media(media="screen", color_scheme="dark")
    sync_api.expect(page.locator("details:not([open])")).to_have_count(closed)
    visit.settle()
    assert all(_brightness(figure["ink"]) > 128 and figure["width"] > 660 for figure in visit.drawn())
    page.pdf(path=tmp_path / "report.pdf", format="A4")
    assert (tmp_path / "report.pdf").stat().st_size > 50_000
    visit.close()


def test_keyboard_reaches_the_tables_and_the_focus_shows(browser, saved: Path) -> None:
    visit = Visit(browser, saved)
    visit.page.keyboard.press("Tab")
    assert visit.page.evaluate("document.activeElement.className") == "skip"
    assert visit.page.evaluate("document.activeElement.getBoundingClientRect().top") >= 0
    assert visit.page.evaluate("parseFloat(getComputedStyle(document.activeElement).outlineWidth)") >= 2
    unreachable = visit.page.evaluate(
        """() => [...document.querySelectorAll(".scroll")].filter((part) => part.tabIndex !== 0).length"""
    )
    assert unreachable == 0
    visit.close()


def test_hostile_record_opens_and_nothing_of_it_runs(browser, hostile: Record, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_bytes(report.render(hostile).encode("utf-8"))
    for width in (390, 1280):
        visit = Visit(browser, path, width)
        assert all(figure["traces"] == figure["given"] and figure["marks"] for figure in visit.drawn())
        assert "<script>alert(1)</script>" in visit.page.locator("h1").inner_text()
        visit.open_everything()
        assert visit.overflow() <= 0
        visit.close()


def test_capped_padded_and_bare_records_are_silent_too(
    browser, capped: Record, padded: Record, unknown: Result, tmp_path: Path
) -> None:
    records = [capped, padded, Record({}, {}), Record({}, {}, results={"flux": unknown})]
    for record, figures in zip(records, (10, 10, 0, 0), strict=True):
        path = tmp_path / "report.html"
        path.write_bytes(report.render(record).encode("utf-8"))
        visit = Visit(browser, path)
        assert [figure["traces"] == figure["given"] for figure in visit.drawn()] == [True] * figures
        visit.close()


def test_a_vocabulary_long_table_stays_quick_and_downloads_whole(browser, record: Record, tmp_path: Path) -> None:
    count = 262_144
    random = np.random.default_rng(0)
    spectrum = record.results["spectrum"]
    columns = {name: np.sort(random.random(count))[::-1] for name in spectrum.table("spectrum_values").columns}
    table = Table("spectrum_values", "Many", columns | {"index": np.arange(1, count + 1)})
    rest = tuple(t for t in spectrum.tables if t.name != "spectrum_values")
    result = dataclasses.replace(spectrum, tables=(table, *rest))
    path = tmp_path / "report.html"
    path.write_bytes(report.render(dataclasses.replace(record, results={"spectrum": result})).encode("utf-8"))
    visit = Visit(browser, path)
    lengths = "[...document.querySelectorAll('.plot')].flatMap((plot) => plot.data.map((trace) => trace.x.length))"
    longest = max(visit.page.evaluate(lengths))
    assert 4_000 < longest <= 5_000
    visit.open_everything()
    with visit.page.expect_download() as download:
        visit.page.locator("button.csv").first.click()
    assert Path(download.value.path()).read_text(encoding="utf-8") == table.to_csv()
    visit.close()


def test_the_cell_of_a_notebook_is_small_and_silent(browser, saved: Path, tmp_path: Path) -> None:
    from unembed._audit import Audit

    cell = Audit(Record.load(saved.parent))._repr_html_()
    assert len(cell) < 400_000
    outer = tmp_path / "notebook.html"
    outer.write_text(cell, encoding="utf-8")
    visit = Visit(browser, outer)
    frame = visit.page.frames[1]
    frame.wait_for_selector("#summary")
    assert frame.evaluate("document.querySelectorAll('.plot, button.csv').length") == 0
    assert frame.evaluate("document.querySelectorAll('section.measurement table').length") > 5
    visit.complaints = [c for c in visit.complaints if c != "request: about:srcdoc"]
    visit.close()


def test_page_works_inside_the_frame_of_a_notebook(browser, saved: Path, tmp_path: Path) -> None:
    from html import escape

    outer = tmp_path / "notebook.html"
    page = escape(saved.read_text(encoding="utf-8"), quote=True)
    outer.write_text(
        f'<iframe srcdoc="{page}" sandbox="allow-scripts allow-downloads" width="1000" height="800"></iframe>'
    )
    visit = Visit(browser, outer)
    frame = visit.page.frames[1]
    frame.wait_for_selector(".plot .main-svg")
    assert frame.evaluate("document.querySelectorAll('.plot .cartesianlayer').length") == 10
    visit.complaints = [c for c in visit.complaints if c != "request: about:srcdoc"]
    visit.close()


def _brightness(colour: str) -> float:
    red, green, blue = (float(part) for part in colour[colour.index("(") + 1 : -1].split(",")[:3])
    return 0.299 * red + 0.587 * green + 0.114 * blue
