"""The study of decoding: what its rows are, that it goes on after an interrupt, and what it finds on a real model."""

from __future__ import annotations

import csv
import json
import math

import pytest
import torch

from unembed import decoding
from unembed.experiments import Decoder, StudyConfig, degeneration, row_seeds, study_decoders
from unembed.experiments import _degeneration as study_module
from unembed.integrations import open_model
from unembed.results import InputError
from unembed.text import Document

CONFIG = StudyConfig(count=9, prompt_tokens=5, tokens=12, batch=4, seed=3)
FEW = {"greedy": Decoder(), "top-p 0.9": Decoder("sample", top_p=0.9)}


@pytest.fixture(scope="module")
def opened(family_folder):
    return open_model(family_folder("llama"), dtype="float64")


@pytest.fixture(scope="module")
def texts():
    words = "the head of a model maps hidden states to scores, and a softmax makes them a distribution over tokens. "
    return [Document(f"text {i}", (words * 3)[7 * i : 7 * i + 60]) for i in range(11)]


def _run(opened, texts, **options):
    return degeneration(*opened, texts, **{"config": CONFIG, "decoders": FEW} | options)


def _continuations(folder, name):
    return [json.loads(line) for line in (folder / "continuations" / f"{name}.jsonl").read_text().splitlines()]


def _equal(one, other):
    return [row | {"seconds": 0} for row in one["rows"]] == [row | {"seconds": 0} for row in other["rows"]]


def test_the_human_row_is_the_text_itself_and_its_likelihood_that_of_one_forward_pass(opened, texts, tmp_path):
    model, tokenizer = opened
    study = _run(opened, texts, folder=tmp_path)
    lines = _continuations(tmp_path, "human")
    assert [line["prompt"] for line in lines] == [f"text {i}" for i in range(9)]
    nats = []
    for line, document in zip(lines, texts, strict=False):
        ids = tokenizer(document.text)["input_ids"][:17]
        assert line["tokens"] == ids[5:]
        assert line["text"] == tokenizer.decode(ids[5:])
        with torch.no_grad():
            log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        own = [float(log_p[place - 1, ids[place]]) for place in range(5, 17)]
        assert line["log_probs"] == pytest.approx(own, rel=1e-5)
        nats.append(-sum(own))
    human = study["rows"][0]
    assert (human["name"], human["settings"]) == ("human", None)
    assert human["metrics"]["perplexity"]["value"] == pytest.approx(math.exp(sum(nats) / (9 * 12)))
    assert human["positions"]["from"] == [0]
    assert human["positions"]["nats"] == pytest.approx([sum(nats) / (9 * 12)])


def test_each_part_of_the_model_is_in_its_own_mode_afterwards(opened, texts):
    model, tokenizer = opened
    part = model.get_input_embeddings()
    try:
        model.train()
        part.eval()
        _run((model, tokenizer), texts)
        assert {one.training for one in model.modules() if one is not part} == {True}
        assert not part.training
    finally:
        model.eval()


def test_the_greedy_row_is_the_argmax_of_a_model_that_may_not_end(opened, texts, tmp_path):
    model, tokenizer = opened
    _run(opened, texts, folder=tmp_path)
    ends = list(study_module.ends_of(model, None))
    assert ends == [1]
    for line, document in zip(_continuations(tmp_path, "greedy"), texts, strict=False):
        ids = tokenizer(document.text)["input_ids"][:5]
        for token, said in zip(line["tokens"], line["log_probs"], strict=True):
            with torch.no_grad():
                log_p = model(torch.tensor([ids])).logits[0, -1].log_softmax(-1)
            allowed = log_p.clone()
            allowed[ends] = -torch.inf
            assert token == int(allowed.argmax())
            assert said == pytest.approx(float(log_p[token]), rel=1e-4)  # of the model as it is: the end has mass
            ids.append(token)


def test_texts_do_not_depend_on_the_batch(opened, texts):
    one = _run(opened, texts, config=StudyConfig(9, 5, 12, batch=1, seed=3))
    two = _run(opened, texts)
    for mine, other in zip(one["rows"], two["rows"], strict=True):
        for name, found in mine["metrics"].items():
            assert found["value"] == pytest.approx(other["metrics"][name]["value"], rel=1e-5), name


def test_the_seed_changes_what_is_drawn_and_nothing_else(opened, texts, tmp_path):
    for seed in (3, 4):
        _run(opened, texts, folder=tmp_path / str(seed), config=StudyConfig(9, 5, 12, seed=seed))
    for name, same in (("human", True), ("greedy", True), ("top-p-0.9", False)):
        mine, other = (_continuations(tmp_path / seed, name) for seed in ("3", "4"))
        assert (mine == other) is same, name


def test_files_hold_the_same_numbers(opened, texts, tmp_path):
    study = _run(opened, texts, folder=tmp_path, source="a | model")
    assert json.loads((tmp_path / "study.json").read_text()) == study
    assert (study["prompts"], study["model"], study["architecture"]) == (9, "a | model", "llama")
    with (tmp_path / "study.csv").open() as file:
        lines = list(csv.DictReader(file))
    for row in study["rows"]:
        own = {line["metric"]: line for line in lines if line["strategy"] == row["name"]}
        assert own.keys() == row["metrics"].keys()
        for name, found in row["metrics"].items():
            assert float(own[name]["value"]) == found["value"]
            if found["ci95"]:
                assert [float(own[name][end]) for end in ("low", "high")] == found["ci95"]
            else:
                assert own[name]["reason"] == found["reason"]
    table = (tmp_path / "study.md").read_text()
    assert f"{study['rows'][1]['metrics']['perplexity']['value']:.3g}" in table
    assert table.count("\n| ") == len(study["rows"]) + 2


def test_an_interrupt_keeps_what_was_measured_and_resuming_measures_the_rest(opened, texts, tmp_path, monkeypatch):
    whole = _run(opened, texts)

    def stop_at(place):
        def progress(_name, done, _total):
            if done == place:
                raise KeyboardInterrupt

        return progress

    with pytest.raises(KeyboardInterrupt):
        _run(opened, texts, folder=tmp_path, progress=stop_at(2))
    assert [row["name"] for row in json.loads((tmp_path / "study.json").read_text())["rows"]] == ["human", "greedy"]
    with pytest.raises(KeyboardInterrupt):  # early in the second run: nothing of the first is lost
        _run(opened, texts, folder=tmp_path, resume=True, progress=stop_at(1))
    assert [row["name"] for row in json.loads((tmp_path / "study.json").read_text())["rows"]] == ["human", "greedy"]

    said, calls = [], []
    real = decoding.generate
    monkeypatch.setattr(decoding, "generate", lambda *a, **o: calls.append(o) or real(*a, **o))
    resumed = _run(opened, texts, folder=tmp_path, resume=True, progress=lambda name, *_: said.append(name))
    assert said == ["human (kept)", "greedy (kept)", "top-p 0.9", ""]
    assert len(calls) == 3  # batches of the one strategy that was missing
    assert _equal(resumed, whole)
    assert _equal(json.loads((tmp_path / "study.json").read_text()), whole)


def test_a_strategy_with_other_settings_is_measured_again(opened, texts, tmp_path):
    _run(opened, texts, folder=tmp_path)
    said = []
    changed = FEW | {"top-p 0.9": Decoder("sample", top_p=0.9, temperature=0.5)}
    options = {"decoders": changed, "resume": True, "progress": lambda name, *_: said.append(name)}
    resumed = _run(opened, texts, folder=tmp_path, **options)
    assert said == ["human (kept)", "greedy (kept)", "top-p 0.9", ""]
    assert resumed["rows"][2]["settings"] == {"strategy": "sample", "temperature": 0.5, "top_p": 0.9}


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"config": StudyConfig(9, 5, 13, seed=3)}, "was measured with tokens 12, now it is 13"),
        ({"config": StudyConfig(8, 5, 12, seed=3)}, "was measured with prompts 9, now it is 8"),
        ({"source": "another"}, "with model 'one', now it is 'another'"),
    ],
)
def test_another_study_is_not_gone_on_with(opened, texts, tmp_path, options, said):
    _run(opened, texts, folder=tmp_path, source="one")
    with pytest.raises(InputError, match=r"leave out --resume") as error:
        _run(opened, texts, folder=tmp_path, resume=True, **{"source": "one"} | options)
    assert said in str(error.value)


def test_a_file_that_is_no_study_is_named(opened, texts, tmp_path):
    (tmp_path / "study.json").write_text("[]")
    with pytest.raises(InputError, match=r"study.json: not a study of decoding"):
        _run(opened, texts, folder=tmp_path, resume=True)


def test_short_documents_are_passed_over_and_none_left_is_an_error(opened, texts):
    mixed = [Document("short", "too short"), *texts[:2]]
    study = _run(opened, mixed)
    assert study["prompts"] == 2
    assert study["rows"][0]["metrics"]["perplexity"]["reason"] == "no interval: 2 sequences, at least 8 are needed"
    with pytest.raises(InputError, match=r"^None of 1 texts has the 18 tokens that a prompt of 5 and its continuation"):
        _run(opened, mixed[:1])


def test_what_cannot_be_measured_is_refused_before_any_work(opened, texts):
    with pytest.raises(InputError, match=r"are 140, and the model has 128 positions"):
        _run(opened, texts, config=StudyConfig(4, 40, 100))
    with pytest.raises(InputError, match="must not use the name human"):
        _run(opened, texts, decoders={"human": Decoder()})
    with pytest.raises(InputError, match="`tokens` must be a whole number of at least 2, got 1"):
        StudyConfig(tokens=1)


def test_lone_surrogates_in_a_document_are_no_end_of_the_study(opened, texts):
    study = _run(opened, [Document("odd", "\udc80" + texts[0].text)], decoders={})
    assert study["prompts"] == 1


def test_every_strategy_of_the_study_runs(opened, texts):
    study = _run(opened, texts, decoders=None, config=StudyConfig(8, 5, 6))
    assert [row["name"] for row in study["rows"]] == ["human", *study_decoders()]
    for row in study["rows"]:
        assert 1 <= row["metrics"]["perplexity"]["value"] < math.inf


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"temperature": 0.5}, "`temperature` does nothing with strategy greedy"),
        ({"strategy": "sample", "beams": 3}, "`beams` does nothing with strategy sample"),
        ({"strategy": "beam", "alpha": 0.5}, "`alpha` does nothing with strategy beam"),
        ({"strategy": "random"}, "`strategy` must be one of greedy, sample"),
    ],
)
def test_options_that_do_nothing_are_refused(options, said):
    with pytest.raises(InputError, match=said):
        Decoder(**options)


def test_a_decoder_is_what_generate_takes():
    fused = Decoder("sample", temperature=0.7, top_k=5).arguments()
    assert fused == {"strategy": decoding.Sample(), "temperature": 0.7, "top_k": 5}
    chain = decoding.ordered(order="vllm", temperature=0.7, top_k=5)
    assert Decoder("sample", temperature=0.7, top_k=5, order="vllm").arguments()["filters"] == chain
    typical = Decoder("sample", temperature=0.7, typical_p=0.9).arguments()
    assert typical["filters"] == decoding.ordered(temperature=0.7, typical_p=0.9)
    cut = Decoder("sample", xtc=0.1, xtc_probability=0.3, dry=0.8).arguments()
    assert cut["filters"] == decoding.ordered(xtc=decoding.XTC(0.1, 0.3), dry=decoding.DRY(0.8))
    assert Decoder("sample", xtc=0.1).arguments()["filters"] == decoding.ordered(xtc=decoding.XTC(0.1, 0.5))
    assert Decoder("beam", beams=3, length_penalty=0.5, returns=2).arguments()["strategy"] == decoding.Beam(
        3, length_penalty=0.5, returns=2
    )
    assert Decoder("contrastive", top_k=7).arguments() == {"strategy": decoding.Contrastive(k=7, alpha=0.6)}
    assert Decoder("stochastic-beam", beams=2).arguments()["strategy"] == decoding.StochasticBeam(2)
    with pytest.raises(InputError, match="needs a draft model"):
        Decoder("speculative").arguments()
    with pytest.raises(InputError, match="takes no draft model"):
        Decoder().arguments(draft=lambda ids: ids)
    with pytest.raises(InputError, match="at most `width`"):
        Decoder("beam", beams=2, returns=3).arguments()


def test_seeds_of_one_run_are_those_of_no_other():
    assert row_seeds(0, range(3)) == [0, 1, 2]
    assert not set(row_seeds(1, range(1000))) & set(row_seeds(2, range(1000)))


def test_likely_text_of_the_demonstration_model_repeats_itself_and_drawn_text_does_not():
    from unembed._audit._api import DEMONSTRATION

    decoders = {name: study_decoders()[name] for name in ("greedy", "beam 4", "sample T=1")}
    study = degeneration(*open_model(DEMONSTRATION), config=StudyConfig(10, 24, 48), decoders=decoders)
    rows = {row["name"]: row["metrics"] for row in study["rows"]}

    def apart(low, high, metric):
        assert rows[low][metric]["ci95"][1] < rows[high][metric]["ci95"][0], (low, high, metric)

    for likely in ("greedy", "beam 4"):
        apart(likely, "human", "perplexity")
        apart(likely, "sample T=1", "perplexity")
        apart("human", likely, "rep_32")
        apart(likely, "human", "distinct_2")
        apart("human", likely, "longest_repeat")
        apart("human", likely, "zipf_coefficient")
    assert rows["sample T=1"]["seq_rep_4"]["value"] < rows["greedy"]["seq_rep_4"]["value"]
