"""The command: exit codes, one-line errors, nothing half-written."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from unembed.cli import main


def _run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    code = main(list(map(str, arguments)))
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def text(tmp_path, documents):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": document.text}) + "\n" for document in documents))
    return path


def _refused(code: int, error: str) -> str:
    assert code == 2
    assert error.startswith("unembed: ")
    assert error.count("\n") == 1
    return error


def test_an_audit_prints_a_summary_and_writes_its_files(family_folder, text, tmp_path, capsys):
    code, out, _ = _run(
        "audit", family_folder("llama"), "--text", text, "--tokens", "100", "--out", tmp_path / "out", capsys=capsys
    )
    assert code == 0
    assert "rank of log P" in out
    assert "random subspace" in out
    content = json.loads((tmp_path / "out" / "audit.json").read_text())
    assert content["provenance"]["tokens"] == 100
    assert content["provenance"]["command"].startswith("unembed audit")
    assert (tmp_path / "out" / "report.html").stat().st_size > 1e6


def test_several_models_get_a_folder_each(family_folder, tmp_path, capsys):
    models = [family_folder("llama"), family_folder("qwen3")]
    code, _, _ = _run("audit", *models, "--checks", "spectrum", "--out", tmp_path / "out", capsys=capsys)
    assert code == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(model.name for model in models)


def test_one_model_that_fails_does_not_stop_the_others(family_folder, tmp_path, capsys):
    good, missing = family_folder("llama"), tmp_path / "none" / "at" / "all"
    options = ["--checks", "spectrum", "--out", tmp_path / "out"]
    code, out, error = _run("audit", missing, good, *options, capsys=capsys)
    assert code == 2
    assert (tmp_path / "out" / good.name / "audit.json").exists()
    assert f"Audit of {good}" in out.replace("\n", "")
    first, last = error.strip().splitlines()
    assert first.startswith(f"unembed: {missing}: no such file")
    assert last == f"unembed: 1 of 2 models could not be audited: {missing}"
    assert [path.name for path in (tmp_path / "out").iterdir()] == [good.name]


@pytest.mark.parametrize("option", [["--text", "missing.txt"], ["--checks", "spectra"], ["--device", "abacus"]])
def test_what_is_wrong_for_all_models_is_said_once(option, family_folder, tmp_path, capsys):
    code, _, error = _run("audit", family_folder("llama"), family_folder("qwen3"), *option, capsys=capsys)
    assert option[1] in _refused(code, error)


def test_a_mistyped_option_names_the_right_one(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["audit", "--tokns", "64"])
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert error == (
        "unembed: unrecognized argument --tokns, did you mean --tokens?; `unembed audit --help` lists what it takes\n"
    )


def test_an_error_of_ours_ends_the_audit_of_several_with_a_traceback(family_folder, tmp_path, monkeypatch):
    def broken(*_arguments, **_options):
        raise RuntimeError("a bug")

    monkeypatch.setattr("unembed.audit", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        main(["audit", str(family_folder("llama")), "second", "--out", str(tmp_path / "out")])


def test_fail_on_turns_a_finding_into_exit_code_1(family_folder, tmp_path, capsys):
    options = ["audit", family_folder("llama"), "--checks", "spectrum", "--out", tmp_path / "out"]
    assert _run(*options, capsys=capsys)[0] == 0
    assert _run(*options, "--fail-on", "info", capsys=capsys)[0] == 1
    assert _run(*options, "--fail-on", "error", capsys=capsys)[0] == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["nowhere/at/all"], "nowhere/at/all"),
        (["--checks", "spectra"], "spectra"),
        (["--text", "missing.txt"], "missing.txt"),
        (["--device", "abacus"], "abacus"),
    ],
)
def test_bad_input_is_one_line_that_names_it(arguments, named, tmp_path, capsys):
    code, _, error = _run("audit", *arguments, "--out", tmp_path / "out", capsys=capsys)
    assert named in _refused(code, error)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--tokens", "0"], "a whole number of at least 1, got '0'"),
        (["--tokens", "9" * 5000], "a whole number of at least 1, got '999"),
        (["--context", "-3"], "a whole number of at least 1, got '-3'"),
        (["--context", "1.5"], "a whole number of at least 1, got '1.5'"),
        (["--seed", "-1"], "a whole number from 0 to 4294967295, got '-1'"),
        (["--seed", str(2**32)], "a whole number from 0 to 4294967295, got '4294967296'"),
    ],
)
def test_a_number_out_of_range_is_refused_at_once(arguments, expected, capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["audit", "nowhere/at/all", *arguments])
    assert f"argument {arguments[0]}: expected {expected}" in _refused(stopped.value.code, capsys.readouterr().err)


@pytest.fixture
def never(monkeypatch):
    """No audit may start."""

    def start(*_arguments, **_options):
        raise AssertionError("an audit was started")

    monkeypatch.setattr("unembed.audit", start, raising=False)


@pytest.mark.usefixtures("never")
@pytest.mark.parametrize(("package", "extra"), [("jinja2", "report"), ("plotly", "report"), ("rich.console", "cli")])
def test_a_missing_extra_is_one_line_before_any_work(package, extra, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    code, _, error = _run("audit", "--out", tmp_path / "out", capsys=capsys)
    assert f'pip install "unembed[{extra}]"' in _refused(code, error)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ModuleNotFoundError("No module named 'datasets'", name="datasets"), 'pip install "unembed[hf]"'),
        (ImportError("cannot import name 'x'", name="transformers.models"), 'pip install "unembed[hf]"'),
        (ImportError('`f` needs it: pip install "unembed[hf]"'), '`f` needs it: pip install "unembed[hf]"'),
    ],
)
def test_an_optional_package_that_cannot_be_imported_is_one_line(error, said, capsys, monkeypatch):
    def start(*_arguments, **_options):
        raise error

    monkeypatch.setattr("unembed.audit", start, raising=False)
    code, _, line = _run("audit", capsys=capsys)
    assert said in _refused(code, line)


def test_an_import_error_of_ours_keeps_its_traceback(monkeypatch):
    def start(*_arguments, **_options):
        raise ImportError("cannot import name 'x'", name="unembed.ops")

    monkeypatch.setattr("unembed.audit", start, raising=False)
    with pytest.raises(ImportError, match="cannot import name"):
        main(["audit"])


@pytest.mark.usefixtures("never")
def test_the_same_model_twice_is_refused_before_any_work(family_folder, capsys):
    code, _, error = _run("audit", family_folder("llama"), family_folder("llama"), capsys=capsys)
    assert "given twice" in _refused(code, error)


def test_models_of_one_name_get_a_folder_each_and_commands_of_their_own(family_folder, tmp_path, capsys, monkeypatch):
    for name in ("a", "b"):
        shutil.copytree(family_folder("llama"), tmp_path / name / "ck")
    monkeypatch.chdir(tmp_path)
    assert _run("audit", "a/ck", "b/ck", "--checks", "spectrum", capsys=capsys)[0] == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["a-ck", "b-ck"]
    for name in ("a", "b"):
        content = json.loads((tmp_path / "out" / f"{name}-ck" / "audit.json").read_text())
        command = f"unembed audit {name}/ck --checks spectrum --out out/{name}-ck"
        assert content["provenance"]["command"] == command


def test_an_unknown_option_is_one_line(capsys):
    with pytest.raises(SystemExit) as stopped:
        main(["audit", "--tokenz", "5"])
    assert "--tokenz" in _refused(stopped.value.code, capsys.readouterr().err)


def test_an_empty_text_is_refused(family_folder, tmp_path, capsys):
    (tmp_path / "empty.txt").write_text("")
    code, _, error = _run("audit", family_folder("llama"), "--text", tmp_path / "empty.txt", capsys=capsys)
    assert "empty.txt" in _refused(code, error)


def test_a_truncated_shard_is_refused_by_name(family_folder, tmp_path, capsys):
    shutil.copytree(family_folder("llama"), tmp_path / "model")
    file = tmp_path / "model" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    code, _, error = _run("audit", tmp_path / "model", "--out", tmp_path / "out", capsys=capsys)
    assert "model.safetensors" in _refused(code, error)
    assert not (tmp_path / "out").exists()


def test_a_missing_shard_is_refused_before_any_work(family_folder, tmp_path, capsys):
    shutil.copytree(family_folder("llama"), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "model-00002-of-00002.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    code, _, error = _run("audit", tmp_path / "model", capsys=capsys)
    assert "model-00002-of-00002.safetensors" in _refused(code, error)


@pytest.mark.parametrize("existed", [False, True])
def test_a_full_disk_leaves_nothing_half_written(existed, family_folder, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    if existed:
        out.mkdir()
        (out / "audit.json").write_text("{}")

    written = 0
    sync = os.fsync

    def full(handle: int) -> None:
        nonlocal written
        written += 1
        if written > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        sync(handle)

    monkeypatch.setattr("os.fsync", full)
    code, _, error = _run("audit", family_folder("llama"), "--checks", "spectrum", "--out", out, capsys=capsys)
    assert "No space left on device" in _refused(code, error)
    assert out.exists() == existed
    if existed:
        assert [path.name for path in out.iterdir()] == ["audit.json"]
        assert (out / "audit.json").read_text() == "{}"


_STUCK = """
import sys, time
import unembed.integrations
from unembed.cli import main

def stuck(*arguments, **options):
    print("measuring", flush=True)
    time.sleep(60)

unembed.integrations.hidden_states = stuck
sys.exit(main(sys.argv[1:]))
"""


def _interrupted(process: subprocess.Popen) -> str:
    """Press Ctrl-C, again if need be: Python drops an interrupt that comes while it runs a destructor."""
    for _ in range(15):
        time.sleep(0.3)
        process.send_signal(signal.SIGINT)
        try:
            return process.communicate(timeout=4)[1]
        except subprocess.TimeoutExpired:
            continue
    process.kill()
    return process.communicate()[1]


@pytest.mark.parametrize(
    ("more", "said"), [([], "no half-written file is left"), (["--resume"], "nothing was kept yet")]
)
def test_ctrl_c_exits_with_130_and_leaves_nothing(more, said, family_folder, text, tmp_path):
    arguments = ["audit", str(family_folder("llama")), "--text", str(text), "--out", str(tmp_path / "out"), *more]
    process = subprocess.Popen(
        [sys.executable, "-c", _STUCK, *arguments], stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout.readline() == "measuring\n"
    error = _interrupted(process)
    assert process.returncode == 130
    assert error.startswith("unembed: interrupted; ")
    assert error.endswith(f"{said}\n")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("kept", [True, False])
def test_ctrl_c_says_whether_the_sums_are_kept(kept, tmp_path, capsys, monkeypatch):
    def interrupted(*_arguments, resume, **_options):
        if kept:
            resume.parent.mkdir()
            resume.touch()
        raise KeyboardInterrupt

    monkeypatch.setattr("unembed.audit", interrupted, raising=False)
    code, _, error = _run("audit", "--resume", "--out", tmp_path / "out", capsys=capsys)
    assert code == 130
    place = tmp_path / "out" / ".unembed-resume"
    said = (
        f"the sums so far are kept in {place}; the same command goes on from them" if kept else "nothing was kept yet"
    )
    assert error == f"unembed: interrupted; {said}\n"


def test_help_needs_neither_torch_nor_numpy():
    script = (
        "import sys; from unembed.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit as stop: assert stop.code == 0\n"
        "assert not {'torch', 'numpy', 'transformers', 'rich'} & set(sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "audit" in done.stdout


def test_the_command_line_is_recorded_so_that_it_can_be_repeated(family_folder, tmp_path, capsys):
    arguments = ["audit", str(family_folder("llama")), "--checks", "spectrum", "--out", str(tmp_path / "a b")]
    assert _run(*arguments, capsys=capsys)[0] == 0
    content = json.loads((tmp_path / "a b" / "audit.json").read_text())
    assert (
        content["provenance"]["command"]
        == f"unembed audit {family_folder('llama')} --checks spectrum --out '{tmp_path}/a b'"
    )
    assert Path(tmp_path / "a b" / "tables" / "spectrum_values.csv").read_text().startswith("index,raw,centred")


def test_the_recorded_command_keeps_values_that_are_also_models(family_folder, text, tmp_path, capsys, monkeypatch):
    shutil.copytree(family_folder("llama"), tmp_path / "text")
    shutil.copytree(family_folder("llama"), tmp_path / "cpu")
    monkeypatch.chdir(tmp_path)
    arguments = ["text", "cpu", "--text", text.name, "text.jsonl", "--field", "text", "--device", "cpu"]
    assert _run("audit", *arguments, "--tokens", "50", "--fail-on=error", "--out=cpu/text", capsys=capsys)[0] == 0
    for name in ("text", "cpu"):
        content = json.loads((tmp_path / "cpu" / "text" / name / "audit.json").read_text())
        command = f"unembed audit {name} --text text.jsonl text.jsonl --tokens 50 --out cpu/text/{name} --fail-on error"
        assert content["provenance"]["command"] == command


def test_an_exhausted_text_is_said(family_folder, text, tmp_path, capsys):
    arguments = ["audit", family_folder("llama"), "--text", text, "--tokens", "100000", "--out", tmp_path / "out"]
    code, out, _ = _run(*arguments, capsys=capsys)
    assert code == 0
    measured = json.loads((tmp_path / "out" / "audit.json").read_text())["provenance"]["tokens"]
    assert 0 < measured < 100_000
    assert f"measured on {measured:,} of 100,000 predictions: the text is exhausted" in out


@pytest.mark.parametrize("fault", ["summary", "measuring"])
def test_a_reader_that_goes_away_is_no_traceback(fault, family_folder, tmp_path):
    script = (
        "import os, sys, unembed.cli\n"
        "if sys.argv[1] == 'measuring':\n"
        "    import unembed\n"
        "    def audit(*_, **__): raise BrokenPipeError\n"
        "    unembed.audit = audit\n"
        "sys.exit(unembed.cli.main(sys.argv[2:]))"
    )
    arguments = ["audit", str(family_folder("llama")), "--checks", "spectrum", "--out", str(tmp_path / "out")]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", script, fault, *arguments], stdout=writer, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0 if fault == "summary" else 2, "")
    assert (tmp_path / "out" / "report.html").exists() == (fault == "summary")


def test_help_into_a_closed_pipe_is_quiet():
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-m", "unembed.cli", "audit", "--help"]
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
