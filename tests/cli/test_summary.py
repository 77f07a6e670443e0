from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from unembed.cli import main
from unembed.cli._audit import _reaches
from unembed.cli._output import printable
from unembed.cli._summary import print_summary
from unembed.results import Check, Finding, Record, Result

EVIL = "\x1b[31mevil\u202e\x07\udc80\r\n"
SHOWN = r"\x1b[31mevil\u202e\x07\udc80\r\n"


@pytest.fixture
def record() -> Record:
    convention = {"rank": 16, "kept": 0.5, "destroyed": 0.8, "kept_null": 0.25, "ratio": 2.0, "ratio_ci95": None}
    gradient = {
        "raw": convention,
        "centred": convention | {"ratio": None},
        "interval": "none: 3 documents, at least 8 are needed",
    }
    loss = {"mean": 5.5, "ci95": None}
    finding = Finding("UNE101", "info", "A finding", "1", "m")
    return Record(
        {"source": "org/model"},
        {"vocab_rows": 264, "in_features": 16, "vocab_tokens": 259, "tied": True, "dtype": "float32"},
        [Check("UNE001", "ok", "fine"), Check("UNE003", "ok", "fine"), Check("UNE002", "note", "tied")],
        {
            "spectrum": Result("spectrum", "UNE101", "S", {"rank": 16, "tolerance": 1e-5}, findings=(finding,)),
            "logprob_rank": Result("logprob_rank", "UNE102", "L", {"rank": 17, "bound": 17, "tolerance": 1e-5}),
            "gradient": Result("gradient", "UNE103", "G", gradient),
            "saturation": Result("saturation", "UNE105", "H", {"loss": loss, "entropy": loss, "entropy_uniform": 5.6}),
        },
    )


def _printed(record: Record, capsys, folder: str = "out") -> str:
    print_summary(record, Path(folder))
    return capsys.readouterr().out


def test_printable_shows_what_steers_a_terminal_and_keeps_what_is_read():
    assert printable(EVIL) == SHOWN
    assert printable("größe 東京 “a” \\n") == "größe 東京 “a” \\n"
    assert printable("a\u200bb\u2028c\x9bd") == r"a\u200bb\u2028c\x9bd"


@pytest.mark.parametrize("terminal", [True, False])
@pytest.mark.parametrize("columns", ["40", "200"])
def test_strings_of_a_file_cannot_steer_the_terminal(terminal, columns, record, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", columns)
    if terminal:
        monkeypatch.setenv("FORCE_COLOR", "1")
        monkeypatch.setenv("TERM", "xterm-256color")
    evil = dataclasses.replace(
        record,
        model={"source": EVIL},
        head=record.head | {"dtype": EVIL},
        integrity=[Check(EVIL, "warning", EVIL)],
        results={"x": Result("x", EVIL, "X", {}, findings=(Finding(EVIL, "error", EVIL, "e", "m"),))},
    )
    out = _printed(evil, capsys, EVIL)
    assert ("\x1b[" in out) == terminal
    assert out.count(r"\x1b[31mevil") >= 5
    for hidden in ("\x1b[31mevil", "\u202e", "\x07", "\udc80", "\r"):
        assert hidden not in out


def test_an_error_cannot_steer_the_terminal(capsys):
    assert main(["audit", f"nowhere/{EVIL}"]) == 2
    error = capsys.readouterr().err
    assert r"\x1b[31mevil\u202e" in error
    assert error.count("\n") == 1
    assert "\x1b" not in error
    with pytest.raises(SystemExit):
        main(["audit", f"--{EVIL}"])
    error = capsys.readouterr().err
    assert SHOWN in error
    assert error.count("\n") == 1


def test_a_missing_interval_gives_the_measurements_own_reason(record, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    out = _printed(record, capsys)
    ratio, loss = (next(line for line in out.splitlines() if name in line) for name in ("ratio to", "loss, nats"))
    assert "none: 3 documents, at least 8 are needed" in ratio
    assert loss.rstrip(" │|").endswith("none")
    assert "documents" not in loss
    record.results["gradient"].values["interval"] = "expanded percentile bootstrap over documents, 4000 resamples"
    ratio = next(line for line in _printed(record, capsys).splitlines() if "ratio to" in line)
    assert ratio.rstrip(" │|").endswith("none")


def test_integrity_is_counted(record, capsys):
    assert "integrity: 2 ok, 1 note\n" in _printed(record, capsys)


def test_a_narrow_terminal_gets_a_line_each_with_whole_numbers(record, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    out = _printed(record, capsys)
    words = " ".join(out.split())
    for whole in (
        "rank of log P: 17 bound 17, tolerance 1e-05",
        "gradient kept, raw: 0.5000 random subspace 0.2500",
        "ratio to the null: 2.000 1 95 % interval none: 3 documents, at least 8 are needed",
        "loss, nats: 5.5000 95 % interval none",
    ):
        assert whole in words
    assert all(len(line) <= 40 for line in out.splitlines())
    assert "─" not in out


@pytest.mark.parametrize(
    ("status", "severity", "code"),
    [
        ("warning", "never", 0),
        ("warning", "info", 1),
        ("warning", "warning", 1),
        ("warning", "error", 0),
        ("note", "warning", 0),
        ("note", "info", 1),  # the finding
        ("skipped", "warning", 0),
    ],
)
def test_a_warning_of_an_integrity_check_counts(status, severity, code, record):
    record.integrity.append(Check("UNE005", status, "3 rows are zero."))
    assert _reaches(record, severity) == code
