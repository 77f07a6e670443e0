"""`unembed generate`: texts, options, errors, hostile tokens; and the study."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from typing import get_args

import pytest

from unembed import decoding, experiments, integrations
from unembed.cli import _continue, _generate, main
from unembed.cli._output import legible
from unembed.decoding import Event
from unembed.experiments import row_seeds

TINY = ["--max-new-tokens", "5"]


def _run(*arguments, capsys):
    try:
        code = main(list(map(str, arguments)))
    except SystemExit as stop:
        code = stop.code
    said = capsys.readouterr()
    return code, said.out, said.err


@pytest.fixture
def model(family_folder):
    return family_folder("llama")


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def opened(model):
    return integrations.open_model(model)


def _greedy(opened, prompt, count):
    model, tokenizer = opened
    ids = tokenizer(prompt)["input_ids"]
    return decoding.generate(model, ids, strategy=decoding.Greedy(), max_new_tokens=count, tokenizer=tokenizer)


def test_a_prompt_is_continued_greedily_and_the_text_is_all_that_is_printed(model, opened, capsys):
    code, out, err = _run("generate", model, "the head", "--max-new-tokens", "12", capsys=capsys)
    assert (code, err) == (0, "")
    assert out == legible(_greedy(opened, "the head", 12).texts[0][0]) + "\n"


@pytest.mark.parametrize(
    "order", [["the head", "--seed", "4", "--top-k", "9"], ["--seed", "4", "--top-k", "9", "the head"]]
)
def test_sampling_is_the_default_with_one_of_its_options_and_words_may_stand_anywhere(model, opened, order, capsys):
    code, out, _ = _run("generate", model, *order, *TINY, capsys=capsys)
    found = decoding.generate(
        opened[0],
        opened[1]("the head")["input_ids"],
        strategy=decoding.Sample(),
        top_k=9,
        max_new_tokens=5,
        tokenizer=opened[1],
        seeds=row_seeds(4, [0]),
    )
    assert code == 0
    assert out == legible(found.texts[0][0]) + "\n"


def test_several_prompts_are_each_as_alone_and_named(model, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a model\n\nthe token \n")
    path = tmp_path / "out.json"
    options = ["--temperature", "1", *TINY, "--prompts", prompts, "--json", path]
    code, out, _ = _run("generate", model, "the head", *options, capsys=capsys)
    assert code == 0
    rows = json.loads(path.read_text())["prompts"]
    assert [row["prompt"] for row in rows] == ["the head", "a model", "the token "]
    assert [line for line in out.splitlines() if line.startswith("== ")] == [
        '== 1 "the head"',
        '== 2 "a model"',
        '== 3 "the token "',
    ]
    for row in rows:
        assert legible(row["sequences"][0]["text"]) in out
    _, alone, _ = _run("generate", model, "the head", "--temperature", "1", *TINY, capsys=capsys)
    assert alone == legible(rows[0]["sequences"][0]["text"]) + "\n"


def test_prompts_of_jsonl_may_have_several_lines(model, tmp_path, capsys):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"say": "two\nlines"}) + "\n")
    path = tmp_path / "out.json"
    options = ["--prompts", prompts, "--field", "say", *TINY, "--json", path]
    assert _run("generate", model, *options, capsys=capsys)[0] == 0
    assert json.loads(path.read_text())["prompts"][0]["prompt"] == "two\nlines"


def test_json_holds_what_generate_gives(model, opened, tmp_path, capsys):
    path = tmp_path / "deep" / "out.json"
    options = ["--strategy", "beam", "--beams", "3", "--returns", "2", *TINY, "--json", path]
    code, out, _ = _run("generate", model, "the head", *options, capsys=capsys)
    assert code == 0
    content = json.loads(path.read_text())
    assert content["settings"] == {"strategy": "beam", "beams": 3, "returns": 2}
    ids = opened[1]("the head")["input_ids"]
    found = decoding.generate(
        opened[0], ids, strategy=decoding.Beam(3, returns=2), max_new_tokens=5, tokenizer=opened[1]
    )
    (row,) = content["prompts"]
    assert row["prompt_ids"] == ids
    for rank, one in enumerate(row["sequences"]):
        count = int(found.lengths[0, rank])
        assert one["tokens"] == found.tokens[0, rank, :count].tolist()
        assert one["log_probs"] == pytest.approx(found.log_probs[0, rank, :count].tolist())
        assert one["score"] == pytest.approx(float(found.scores[0, rank]))
        assert one["finish"] == found.finish[0][rank]
        assert f"== sequence {rank + 1}, score {one['score']:.4f}\n{legible(one['text'])}\n" in out


def test_samples_of_a_prompt_are_draws_of_their_own_and_do_not_depend_on_others(model, opened, tmp_path, capsys):
    def written(*prompts, count):
        path = tmp_path / "out.json"
        code, out, err = _run("generate", model, *prompts, "--returns", count, *TINY, "--json", path, capsys=capsys)
        assert (code, err) == (0, "")
        assert out.count("sequence ") == (len(prompts) * count if count > 1 else 0)
        return [[one["tokens"] for one in row["sequences"]] for row in json.loads(path.read_text())["prompts"]]

    many = written("the head", "a sentence", count=10)
    assert [len(row) for row in many] == [10, 10]
    assert len({tuple(one) for one in many[0]}) > 5
    assert written("the head", count=3) == [many[0][:3]]
    assert written("the head", count=1) == [many[0][:1]]
    ids = opened[1]("the head")["input_ids"]
    found = decoding.generate(opened[0], [ids], strategy=decoding.Sample(), seeds=[0], max_new_tokens=5)
    assert found.tokens[0].tolist() == many[0][:1]


def test_every_penalty_reaches_the_filters(model, opened, tmp_path, capsys):
    path = tmp_path / "out.json"
    options = ["--presence-penalty", "0.5", "--frequency-penalty", "0.2", "--no-repeat-ngram", "2", "--dry", "0.8"]
    _run("generate", model, "the head", *options, *TINY, "--json", path, capsys=capsys)
    filters = decoding.ordered(presence_penalty=0.5, frequency_penalty=0.2, no_repeat_ngram=2, dry=decoding.DRY(0.8))
    ids = opened[1]("the head")["input_ids"]
    found = decoding.generate(opened[0], [ids], strategy=decoding.Greedy(), filters=filters, max_new_tokens=5)
    assert json.loads(path.read_text())["prompts"][0]["sequences"][0]["tokens"] == found.tokens[0, 0].tolist()


def test_a_stop_string_ends_the_text_in_front_of_it(model, opened, capsys):
    whole = _greedy(opened, "the head", 12).texts[0][0]
    stop = whole[3:5]
    _, out, _ = _run("generate", model, "the head", "--max-new-tokens", "12", "--stop", stop, capsys=capsys)
    assert out == legible(whole[: whole.index(stop)]) + "\n"


def test_speculation_at_temperature_zero_is_greedy(model, opened, capsys):
    options = ["--strategy", "speculative", "--draft", model, "--temperature", "0", "--max-new-tokens", "12"]
    code, out, _ = _run("generate", model, "the head", *options, capsys=capsys)
    assert code == 0
    assert out == legible(_greedy(opened, "the head", 12).texts[0][0]) + "\n"


@pytest.mark.parametrize("strategy", [["contrastive", "--alpha", "0.3"], ["stochastic-beam", "--beams", "2"]])
def test_other_strategies_write_something(model, strategy, capsys):
    code, out, err = _run("generate", model, "the head", "--strategy", *strategy, *TINY, capsys=capsys)
    assert (code, err) == (0, "")
    assert out.strip()


def test_text_that_steers_a_terminal_reaches_it_as_escapes(capsys):
    hostile = "a\x1b[31m\tred\nnul\x00\u202eback\r\u200b\udc80"
    shown = "a\\x1b[31m\tred\nnul\\x00\\u202eback\\r\\u200b\\udc80"
    assert legible(hostile) == shown
    _continue._tell(Event(0, 1, -1.0, hostile))
    _continue._tell(Event(0, 1, -1.0, None))
    rows = [{"prompt": hostile, "sequences": [{"text": hostile, "score": 0.0}]}]
    _continue._show(rows, 0, alone=False)
    out = capsys.readouterr().out
    assert out.count(shown) == 2
    assert "\x1b" not in out
    assert len(out.splitlines()) == 4  # two of the first text, which ends in the line of the prompt, and one more


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "Expected a PROMPT or --prompts FILE, got neither."),
        (["x", "--temprature", "1"], "unrecognized argument --temprature, did you mean --temperature?"),
        (["x", "--temperature", "-1"], "--temperature: expected a number of at least 0, got '-1'"),
        (["x", "--top-p", "2"], "--top-p: expected a number from 0 to 1, got '2'"),
        (["x", "--top-k", "0"], "--top-k: expected a whole number of at least 1"),
        (
            ["x", "--strategy", "greedy", "--top-p", "0.5"],
            "--top-p does nothing with strategy greedy, which takes --repetition-penalty, --presence-penalty, ",
        ),
        (["x", "--length-penalty", "2"], "--length-penalty does nothing with strategy greedy"),
        (
            ["x", "--strategy", "beam", "--beams", "2", "--returns", "3"],
            "--returns must be at most --beams, got 3 of 2.",
        ),
        (["x", "--strategy", "beam", "--returns", "9"], "--returns must be at most --beams, got 9 of 4."),
        (["x", "--xtc-probability", "0.1"], "--xtc-probability does nothing without --xtc, its threshold."),
        (["x", "--strategy", "greedy", "--returns", "2"], "--returns does nothing with strategy greedy"),
        (["x", "--stop", ""], "--stop: expected a text, got an empty one"),
        (["x", "--strategy", "speculative"], "--strategy speculative needs --draft MODEL."),
        (["x", "--draft", "demo"], "--strategy greedy takes no --draft."),
        (["x", "--order", "transformers", "--top-n-sigma", "1"], "has no --top-n-sigma"),
        (["x", "--resume"], "--resume belongs to --study."),
        (["x", "--prompts", "missing.txt"], "missing.txt: cannot be read"),
        (["x", "--device", "abacus"], "abacus"),
        (["--study", "x"], "--study runs every strategy and takes no PROMPT"),
        (["--study", "--top-p", "0.5"], "--study runs every strategy and takes no --top-p."),
        (["--study", "--tokens", "1000"], "the model has 128 positions; take fewer tokens."),
    ],
)
def test_bad_input_is_one_line_that_names_it(model, arguments, said, here, capsys):
    code, _, error = _run("generate", model, *arguments, capsys=capsys)
    assert code == 2
    assert said in error
    assert error.startswith("unembed: ")
    assert error.count("\n") == 1
    assert list(here.iterdir()) == []


def test_places_that_cannot_be_written_are_told_before_the_model_is_opened(tmp_path, capsys):
    (tmp_path / "file").write_text("x")
    for options, said in (
        (["x", "--json", tmp_path], "expected a file, got a folder"),
        (["x", "--json", tmp_path / "file" / "out.json"], f"--json {tmp_path / 'file'}"),
        (["--study", "--out", tmp_path / "file"], "is a file; give a folder"),
    ):
        code, _, error = _run("generate", "nowhere/at/all", *options, capsys=capsys)
        assert code == 2
        assert said in error


def test_the_choices_are_those_of_the_library():
    """Kept apart so that `--help` needs no torch."""
    from unembed.decoding import _orders

    assert experiments._decoder.STRATEGIES == _generate.STRATEGIES
    assert get_args(_orders.Order) == _generate.ORDERS
    assert set(_generate._DECODER) | {"strategy"} == set(experiments.Decoder.__dataclass_fields__)


def test_the_study_writes_table_data_and_page(model, tmp_path, capsys):
    texts = tmp_path / "texts.txt"
    texts.write_text("".join(f"{i} the head of a model maps a hidden state to a score\n" for i in range(9)))
    out = tmp_path / "out"
    options = ["--study", "--prompts", texts, "--tokens", "8", "--prompt-tokens", "4", "--out", out]
    code, said, error = _run("generate", model, *options, capsys=capsys)
    assert code == 0
    names = list(experiments.study_decoders())
    assert error.splitlines() == [f"{i} of 13: {name}" for i, name in enumerate(["human", *names], 1)]
    study = json.loads((out / "study.json").read_text())
    assert study["prompts"] == 9
    for row in study["rows"]:
        assert row["name"] in said
        assert f"{row['metrics']['perplexity']['value']:.3g}" in said or row["metrics"]["perplexity"]["value"] >= 1000
    page = (out / "report.html").read_text(encoding="utf-8")
    assert "decoding study" in page
    assert len(list((out / "continuations").iterdir())) == 13
    code, _, error = _run("generate", model, *options, "--resume", capsys=capsys)
    assert code == 0
    assert error.count("(kept)") == 13


def test_an_interrupted_study_says_what_is_left(model, tmp_path):
    options = ["--study", "--tokens", "90", "--prompt-tokens", "4", "--out", str(tmp_path / "out")]
    command = [sys.executable, "-m", "unembed.cli", "generate", str(model), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert process.stderr is not None
    for line in process.stderr:
        if line.startswith("3 of 13"):
            break
    time.sleep(0.2)
    os.killpg(process.pid, signal.SIGINT)
    _, said = process.communicate(timeout=60)
    assert process.returncode == 130
    assert said.splitlines()[-1].startswith("unembed: interrupted; what was measured is in ")
    assert "Traceback" not in said
    assert [row["name"] for row in json.loads((tmp_path / "out" / "study.json").read_text())["rows"]][:2] == [
        "human",
        "greedy",
    ]
