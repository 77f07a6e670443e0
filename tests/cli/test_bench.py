"""`unembed bench heads`: options, output, exit codes, interrupts."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from unembed import heads
from unembed.cli._bench import split_specs
from unembed.cli._main import main

SIZES = ["--tokens", "32", "--dim", "8", "--vocab", "31", "--rounds", "1"]


_OWN = """
from unembed import heads

class Benched(heads.Linear):
    names = ("benched",)

class Broken(heads.MonotonicSoftmax):
    names = ("broken",)

    def forward(self, hidden):
        raise KeyError("nothing")
"""


@pytest.mark.parametrize(
    ("listed", "specs"),
    [
        ("linear,adaptive", ["linear", "adaptive"]),
        ("linear, mos:k=4,shared=False ,low_rank", ["linear", "mos:k=4,shared=False", "low_rank"]),
        ("adaptive:cutoffs=[2,8],div_value=2,linear", ["adaptive:cutoffs=[2,8],div_value=2", "linear"]),
        (",linear,,", ["linear"]),
    ],
)
def test_commas_part_heads_and_their_options(listed, specs):
    assert split_specs(listed) == specs


def test_the_table_is_printed_and_saved(tmp_path, capsys):
    assert main(["bench", "heads", *SIZES, "--heads", "linear,mos:k=2", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines() == ["1 of 2: linear", "2 of 2: mos:k=2"]
    table = json.loads((tmp_path / "heads.json").read_text())
    assert (table["tokens"], table["dim"], table["vocab"]) == (32, 8, 31)
    for row in table["rows"]:
        assert row["head"] in printed.out
        assert f"{row['loss_at_init']:.3f}" in printed.out
    assert "rank bound" in printed.out


def test_a_head_that_cannot_be_measured_is_named_and_the_others_are_there(tmp_path, capsys, monkeypatch):
    """Heads of one's own, of which one fails; they are imported here and in the process that measures them."""
    (tmp_path / "my_heads.py").write_text(_OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.syspath_prepend(str(tmp_path))
    listed = ["--heads", "linear,benched,broken", "--import", "my_heads"]
    try:
        assert main(["bench", "heads", *SIZES, *listed, "--out", str(tmp_path / "out")]) == 2
    finally:  # or every test of all heads would find them
        for name in ("benched", "broken"):
            heads.HEADS.pop(name, None)
    printed = capsys.readouterr()
    assert printed.err.splitlines()[-1] == "unembed: 1 of 3 heads could not be measured: broken"
    assert "KeyError: 'nothing'" in printed.out
    rows = json.loads((tmp_path / "out" / "heads.json").read_text())["rows"]
    assert [("failed" in row) for row in rows] == [False, False, True]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--heads", "lineer"], "'lineer'; did you mean 'linear'?"),
        (["--heads", "mos:k=two"], "`k` of MixtureOfSoftmaxes takes an integer, got 'two'"),
        (["--heads", ""], "names no head"),
        (["--vocab", "1"], "--vocab: expected a whole number of at least 2, got '1'"),
        (["--device", "tpu"], "tpu"),
    ],
)
def test_bad_options_are_one_line(options, said, tmp_path, capsys):
    try:
        code = main(["bench", "heads", *options, "--out", str(tmp_path / "out")])
    except SystemExit as error:
        code = error.code
    line = capsys.readouterr().err
    assert code == 2
    assert said in line
    assert len(line.splitlines()) == 1
    assert not (tmp_path / "out").exists()


def test_an_interrupt_leaves_what_was_measured_and_no_process(tmp_path):
    sizes = ["--tokens", "512", "--dim", "64", "--vocab", "8192", "--rounds", "100000"]
    command = [sys.executable, "-m", "unembed.cli", "bench", "heads", *sizes, "--out", str(tmp_path)]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    assert process.stderr.readline().startswith("1 of ")
    time.sleep(3)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("unembed: interrupted; ")
    assert "Traceback" not in said
    for _ in range(100):  # Python's own helper process ends a moment later
        try:
            os.killpg(process.pid, 0)
        except ProcessLookupError:
            return
        time.sleep(0.1)
    pytest.fail("a process is left")
