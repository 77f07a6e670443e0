"""The page of a decoding study: nothing runs, nothing is missing, and it says what was measured."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
from plotly.offline import get_plotlyjs

from unembed import report
from unembed.report._study_figures import METRICS
from unembed.results import InputError

HOSTILE = "</script><script>alert(1)</script>\x1b[31m\u202e{{ 7 * 7 }}<img src=x onerror=alert(2)>"


def _row(name, settings, value, *, width=0.01):
    found = {metric: {"value": value, "ci95": [value - width, value + width], "reason": ""} for metric in METRICS}
    found["longest_repeat"] = {"value": 3.0, "ci95": None, "reason": "no interval: 2 sequences"}
    found["self_bleu_4"] = {"value": None, "ci95": None, "reason": "too few tokens"}
    positions = {"from": [0, 16], "nats": [value, value / 2], "low": [value, None], "high": [value, None]}
    return {"name": name, "settings": settings, "metrics": found, "positions": positions, "seconds": 1.0}


@pytest.fixture
def study():
    rows = [
        _row("human", None, 0.25),
        _row("greedy", {"strategy": "greedy"}, 0.75),
        _row("beam 4", {"strategy": "beam", "beams": 4}, 0.255),
        _row("penalised", {"strategy": "greedy", "repetition_penalty": 1.2}, 0.1),
        _row("top-p 0.9", {"strategy": "sample", "top_p": 0.9}, 0.2),
    ]
    about = {"schema_version": 1, "model": "a model", "prompts": 12, "prompt_tokens": 32, "tokens": 64, "seed": 0}
    return about | {"text": {"kind": "topics"}, "rows": rows}


@pytest.fixture
def folder(study, tmp_path):
    def write(**changes):
        (tmp_path / "study.json").write_text(json.dumps(study | changes))
        return tmp_path

    return write


def test_the_page_says_what_was_measured_of_likely_text_and_no_more(folder, parse):
    words = parse(report.render_study(folder())).words()
    assert "12 prompts of 32 tokens, each continued by 64 tokens, by 4 strategies" in words
    assert "greedy: perplexity 0.7500 (0.7400 to 0.7600) under this model, the human text 0.2500" in words
    assert words.count("It repeats more: the intervals do not meet.") == 1  # greedy
    assert words.count("The intervals meet.") == 1  # the beam
    assert "penalised: perplexity" not in words
    assert "low means likely to it, not good" in words


def test_numbers_intervals_and_reasons_are_in_the_table(folder, parse):
    page = parse(report.render_study(folder()))
    words = page.words()
    for said in ("0.7500", "0.7400 to 0.7600", "too few tokens", "3.000"):
        assert said in words
    tables = [page.table(number) for number in range(1 + len(METRICS))]
    assert "greedy,0.75,0.74,0.76" in tables[1]
    assert "human,16,0.125,nan,nan" in tables[0]


def test_figures_show_every_strategy_beside_the_human_line(folder, parse):
    page = parse(report.render_study(folder()))
    drawings = next(json.loads(data) for about, data in page.scripts if about.get("id") == "drawings")
    curve, first = drawings[0], drawings[1]
    assert [trace["name"] for trace in curve["traces"]] == ["human", "greedy", "beam 4", "top-p 0.9"]
    fixed, drawn, human, *ends = first["traces"]
    assert fixed["y"] == ["greedy", "beam 4", "penalised"]
    assert drawn["y"] == ["top-p 0.9"]
    assert fixed["error_x"]["array"][0] == pytest.approx(0.01)
    assert human["x"] == [0.25, 0.25]
    assert [end["x"] for end in ends] == [[0.24, 0.24], [0.26, 0.26]]
    bleu = drawings[len(METRICS)]
    assert bleu["traces"][0]["x"] == [None, None, None]


def test_texts_of_the_first_prompt_are_shown_as_they_are_not_run(folder, parse):
    place = folder(model=HOSTILE, machine=HOSTILE)
    (place / "continuations").mkdir()
    (place / "continuations" / "greedy.jsonl").write_text(json.dumps({"text": HOSTILE}) + "\n")
    html = report.render_study(place)
    page = parse(html)
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert len([about for about, _ in page.scripts if "type" not in about]) == 2
    outside = html.replace(get_plotlyjs(), "")
    assert not re.search("[\u202e\x1b]", outside)
    assert r"\x1b[31m\u202e{{ 7 * 7 }}" in page.words()
    assert not re.search(r"https?:|//cdn", outside)


def test_a_folder_without_a_study_or_of_a_later_version_is_named(tmp_path, folder):
    with pytest.raises(InputError, match=r"expected a folder with study.json"):
        report.render_study(tmp_path / "none")
    with pytest.raises(InputError, match=r"expected schema_version 1, got 2"):
        report.render_study(folder(schema_version=2))


def test_the_page_is_written_without_torch_and_is_the_same_each_time(folder):
    place = folder()
    script = "import sys, unembed.report as r; r.write_study(sys.argv[1]); print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script, place], capture_output=True, check=True, text=True)
    assert done.stdout.strip() == "False"
    assert (place / "report.html").read_text(encoding="utf-8") == report.render_study(place)


def test_few_rows_and_no_human_text_make_a_page(folder, study, parse):
    for rows in ([], study["rows"][:1], study["rows"][1:]):
        page = parse(report.render_study(folder(rows=rows)))
        assert "What was measured" in page.words()
