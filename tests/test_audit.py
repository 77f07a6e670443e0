"""`unembed.audit` from a model to numbers: families, formats, repeatability, and an independent float64 computation."""

from __future__ import annotations

import functools
import json
import math
import shutil
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

import unembed
from unembed import heads, integrations
from unembed.diagnostics._jacobian import token_gradient_reference
from unembed.results import InputError, IntegrityError, Record

TOKENS = 160


def _audit(source: Any, documents: Any, **options: Any) -> Record:
    return unembed.audit(source, text=documents, **{"tokens": TOKENS, **options}).record


def _leaves(value: Any, path: str = "") -> dict[str, Any]:
    if isinstance(value, dict):
        return {k: v for key, item in value.items() for k, v in _leaves(item, f"{path}.{key}").items()}
    if isinstance(value, list):
        return {k: v for i, item in enumerate(value) for k, v in _leaves(item, f"{path}.{i}").items()}
    return {path: value}


def _assert_same_numbers(one: Record, other: Record, digits: int = 6) -> None:
    mine, theirs = _leaves(one.to_json()["results"]), _leaves(other.to_json()["results"])
    assert mine.keys() == theirs.keys()
    for key, value in mine.items():
        if isinstance(value, float):
            # Rounding in the scores reaches the residual, which is nothing but rounding, in its first digit.
            allowed = 1.0 if key.endswith(".residual") else 10.0**-digits
            assert theirs[key] == pytest.approx(value, rel=allowed, abs=1e-9), key
        else:
            assert theirs[key] == value, key


def test_every_family_is_measured_and_its_json_follows_the_schema(family, family_folder, documents):
    record = _audit(family_folder(family), documents)
    content = json.loads(json.dumps(record.to_json()))
    jsonschema.validate(content, json.loads((files("unembed.results") / "audit.schema.json").read_text()))
    assert [check.code for check in record.integrity if check.status == "failed"] == []
    assert content["head"]["padding_rows"] == 5  # 264 rows, 259 ids
    kept = content["results"]["gradient"]["raw"]
    assert kept["rank"] == 16
    assert kept["kept_null"] == pytest.approx(np.sqrt(16 / 259))
    if family == "gemma2":
        assert content["results"]["logprob_rank"]["bound"] is None
        assert content["results"]["gradient"]["centred"] is None
        assert content["results"]["logprob_rank"]["residual"] > 1e-3
    else:
        # A LayerNorm keeps the hidden states in a hyperplane. Its bias moves that off the origin, which gives the
        # dimension back (GPT-2, GPT-NeoX) unless the head has a bias too (Phi: 18 possible).
        assert content["results"]["logprob_rank"]["rank"] == 17 - (family == "cohere")
        assert content["results"]["logprob_rank"]["bound"] == 17 + (family == "phi")
        assert content["results"]["logprob_rank"]["residual"] < 1e-5


def test_the_numbers_are_those_of_an_independent_float64_computation(family, family_folder, documents):
    folder = family_folder(family)
    record = _audit(folder, documents, tokens=64)
    expected = _independent(folder, documents, 64)
    found = record.results["gradient"].values
    assert found["raw"]["kept"] == pytest.approx(expected["raw"], rel=1e-4)
    assert record.results["saturation"].values["loss"]["mean"] == pytest.approx(expected["loss"], rel=1e-4)
    if found["centred"] is not None:
        assert found["centred"]["kept"] == pytest.approx(expected["centred"], rel=1e-4)


def _independent(folder: Path, documents: Any, tokens: int) -> dict[str, float]:
    """The model's own scores in float64, and plain formulas; the order of documents is the audit's."""
    import random

    config = transformers.AutoConfig.from_pretrained(folder)
    dtype = torch.float32 if config.model_type == "mamba" else torch.float64  # transformers' Mamba has no float64
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    texts = list(documents)
    random.Random(0).shuffle(texts)
    scores, targets = [], []
    with torch.no_grad():
        for document in texts:
            ids = tokenizer(document.text, return_tensors="pt").input_ids
            # The first window of a document is 64 predictions, all this test takes.
            ids = ids[:, : 64 + 1]
            scores.append(model(ids).logits[0, :-1])
            targets.append(ids[0, 1:])
            if sum(map(len, targets)) >= tokens:
                break
    z, y = torch.cat(scores)[:tokens], torch.cat(targets)[:tokens]
    z = z[:, : len(tokenizer)].double()
    gradient = torch.softmax(z, -1) - torch.nn.functional.one_hot(y, z.shape[1])
    cap = getattr(model.config, "final_logit_softcapping", None)
    if cap is not None:
        gradient = gradient * (1 - (z / cap) ** 2)
    weight = model.get_output_embeddings().weight.detach()[: z.shape[1]].double()
    q, _ = torch.linalg.qr(weight)
    q_centred, _ = torch.linalg.qr(weight - weight.mean(0))
    return {
        "raw": float((gradient @ q).norm() / gradient.norm()),
        "centred": float((gradient @ q_centred).norm() / gradient.norm()),
        "loss": float(torch.nn.functional.cross_entropy(z, y)),
    }


def test_file_shards_and_object_give_the_same_numbers(family_folder, documents, tmp_path):
    folder = family_folder("llama")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    tokenizer.save_pretrained(tmp_path / "shards")
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    whole = _audit(folder, documents)
    _assert_same_numbers(whole, _audit(tmp_path / "shards", documents))
    in_memory = unembed.audit(model, tokenizer=tokenizer, text=documents, tokens=TOKENS).record
    _assert_same_numbers(whole, in_memory)
    assert whole.model["hash"] == in_memory.model["hash"]


def test_a_second_run_gives_the_same_file_but_for_timing(family_folder, documents):
    one, two = (_audit(family_folder("qwen3"), documents, seed=3).to_json() for _ in range(2))
    assert one.pop("timing")["seconds"]["total"] > 0
    two.pop("timing")
    assert json.dumps(one) == json.dumps(two)


def test_a_row_centred_head_gives_the_same_centred_report(family_folder, documents, tmp_path):
    # M11: a constant added to all scores changes W, not one probability.
    shutil.copytree(family_folder("mistral"), tmp_path / "centred")
    file = tmp_path / "centred" / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["lm_head.weight"] - tensors["lm_head.weight"][:259].mean(0)
    save_file(tensors, file, metadata={"format": "pt"})
    one = _audit(family_folder("mistral"), documents).results
    two = _audit(tmp_path / "centred", documents).results
    centred, moved = one["gradient"].values["centred"], two["gradient"].values["centred"]
    assert moved["kept"] == pytest.approx(centred["kept"], rel=1e-5)
    assert moved["rank"] == centred["rank"]
    assert two["saturation"].values["loss"]["mean"] == pytest.approx(one["saturation"].values["loss"]["mean"], rel=1e-5)
    assert two["gradient"].values["raw"]["kept"] != pytest.approx(one["gradient"].values["raw"]["kept"], rel=1e-4)


def test_weights_alone_need_no_body(family_folder, tmp_path):
    folder = family_folder("llama")
    tensors = load_file(folder / "model.safetensors")
    head = {key: tensors[key] for key in ("lm_head.weight", "model.norm.weight")}
    shutil.copytree(folder, tmp_path / "head")
    save_file(head, tmp_path / "head" / "model.safetensors")
    record = unembed.audit(tmp_path / "head", checks=["spectrum"]).record
    assert list(record.results) == ["spectrum"]
    values = record.results["spectrum"].values
    expected = torch.linalg.svdvals(head["lm_head.weight"][:259].double())
    assert values["largest"] == pytest.approx(float(expected[0]), rel=1e-9)
    assert values["all_rows"]["rows"] == 264


def test_scores_that_are_not_the_models_stop_the_audit(family_folder, documents, monkeypatch):
    import dataclasses

    from unembed.models import Unembedding

    load = Unembedding.load.__func__
    monkeypatch.setattr(
        Unembedding,
        "load",
        classmethod(lambda cls, *args, **options: dataclasses.replace(load(cls, *args, **options), softcap=None)),
    )
    with pytest.raises(IntegrityError, match="UNE020"):
        _audit(family_folder("gemma2"), documents)


def test_few_documents_give_no_interval_and_say_so(family_folder, documents):
    values = _audit(family_folder("llama"), documents[8:10], tokens=40).results["gradient"].values
    assert values["raw"]["ratio_ci95"] is None
    assert "at least 8" in values["interval"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"checks": ["gradients"]}, "`checks` takes names"),
        ({"checks": []}, "`checks` takes names"),
        ({"tokens": 0}, "`tokens` must be at least 1"),
        ({"context": 0}, "`context` must be at least 1"),
        ({"seed": -1}, "`seed` must be at least 0"),
        ({"tokens": "200"}, "`tokens` must be a whole number, got '200'"),
        ({"text": 5}, "Expected documents, got int"),
    ],
)
def test_bad_options_are_named(options, message, family_folder, documents):
    with pytest.raises(InputError, match=message):
        unembed.audit(family_folder("llama"), **{"text": documents, **options})


def test_a_model_in_memory_asks_for_its_tokenizer(family_folder, documents):
    model = transformers.AutoModelForCausalLM.from_pretrained(family_folder("llama"))
    with pytest.raises(InputError, match="tokenizer="):
        unembed.audit(model, text=documents)


def test_the_demonstration_model_is_audited_and_saved(tmp_path):
    audit = unembed.audit(tokens=512)
    audit.save(tmp_path / "result")
    names = {path.name for path in (tmp_path / "result").iterdir()}
    assert names == {"audit.json", "tables.npz", "tables", "report.html"}
    again = Record.load(tmp_path / "result")
    assert json.dumps(again.to_json()) == json.dumps(audit.record.to_json())
    assert 1 < again.results["gradient"].values["centred"]["ratio"] < 2


def _stopping(after: int, seen: list[int]):
    def stop(phase: str, done: int, _total: int) -> None:
        if phase == "measure" and done:
            seen.append(done)
            if len(seen) == after:
                raise KeyboardInterrupt

    return stop


@pytest.fixture
def small_batches(monkeypatch):
    from unembed.integrations import hidden_states

    monkeypatch.setattr(hidden_states, "__kwdefaults__", {**hidden_states.__kwdefaults__, "batch_tokens": 64})


@pytest.mark.usefixtures("small_batches")
def test_an_interrupted_audit_goes_on_and_ends_with_the_same_numbers(family_folder, documents, tmp_path):
    folder, file, seen = family_folder("llama"), tmp_path / "kept", []
    whole = _audit(folder, documents, tokens=400)
    with pytest.raises(KeyboardInterrupt):
        _audit(folder, documents, tokens=400, resume=file, progress=_stopping(3, seen))
    assert file.exists()  # within the first minute: the interrupt itself wrote it
    before = seen[1]  # the third chunk was half done and does not count
    seen.clear()
    audit = unembed.audit(folder, text=documents, tokens=400, resume=file, progress=_stopping(-1, seen))
    assert seen[0] > before  # the first blocks were not run again
    _assert_same_numbers(whole, audit.record)
    assert file.exists()  # until the results are on disk
    audit.save(tmp_path / "out")
    assert not file.exists()


@pytest.mark.usefixtures("small_batches")
@pytest.mark.parametrize("changed", ["tokens", "documents", "body"])
def test_a_kept_run_is_not_mixed_with_another(changed, family_folder, documents, tmp_path):
    folder, file = family_folder("llama"), tmp_path / "kept"
    with pytest.raises(KeyboardInterrupt):
        _audit(folder, documents, tokens=400, resume=file, progress=_stopping(3, []))
    options = {"tokens": 399 if changed == "tokens" else 400, "resume": file}
    if changed == "documents":
        documents = [*documents[:-1], type(documents[0])("text 9", "something else")]
    if changed == "body":
        shutil.copytree(folder, tmp_path / "other")
        tensors = load_file(tmp_path / "other" / "model.safetensors")
        tensors["model.layers.0.mlp.up_proj.weight"] *= 1.5
        save_file(tensors, tmp_path / "other" / "model.safetensors", metadata={"format": "pt"})
        folder = tmp_path / "other"
    with pytest.raises(InputError, match="another model, text or options"):
        _audit(folder, documents, **options)


def test_an_exhausted_text_is_said(family_folder, documents):
    record = _audit(family_folder("llama"), documents, tokens=100_000)
    assert record.provenance["tokens"] < record.provenance["tokens_requested"] == 100_000
    assert [check.status for check in record.integrity if check.code == "UNE021"] == ["note"]


def test_a_foreign_file_is_not_taken_for_a_kept_run(family_folder, documents, tmp_path):
    (tmp_path / "kept").write_text("something else")
    with pytest.raises(InputError, match="not a file of an interrupted audit"):
        _audit(family_folder("llama"), documents, resume=tmp_path / "kept")
    assert (tmp_path / "kept").read_text() == "something else"


def _with_head(family_folder, byte_tokenizer, head_of):
    """A tiny model in memory whose output layer is one of `unembed.heads`."""
    model = transformers.AutoModelForCausalLM.from_pretrained(family_folder("llama"), dtype=torch.float32)
    torch.manual_seed(0)
    model.lm_head = head_of(model.config.hidden_size, model.config.vocab_size)
    return model, byte_tokenizer(bos=True)


def test_a_model_with_a_mixture_gets_its_gradient_through_the_jacobian(
    family_folder, byte_tokenizer, documents, tmp_path
):
    model, tokenizer = _with_head(family_folder, byte_tokenizer, lambda d, v: heads.MixtureOfSoftmaxes(d, v, k=2))
    audit = unembed.audit(model, tokenizer=tokenizer, text=documents, tokens=TOKENS, resume=tmp_path / "kept")
    values = audit.results["gradient"].values
    blocks = list(integrations.hidden_states(model, tokenizer, documents, tokens=TOKENS))
    every = -(-TOKENS // 64)
    hidden, targets = (torch.cat([getattr(block, name) for block in blocks]) for name in ("hidden", "targets"))
    full = kept = 0.0
    for h, y in zip(hidden[::every], targets[::every], strict=True):
        with torch.no_grad():
            g, passed = token_gradient_reference(model.lm_head, h, int(y))
        full, kept = full + float(g.square().sum()), kept + float(passed.square().sum())
    assert values["raw"] is None
    assert values["tokens"] == len(targets[::every])
    assert values["centred"]["kept"] == pytest.approx(math.sqrt(kept / full), rel=1e-6)
    assert audit.results["spectrum"].values is None
    assert "MixtureOfSoftmaxes" in audit.results["spectrum"].reason
    assert audit.record.head["kind"] == "mos"
    assert audit.record.head["vocab_tokens"] == 259
    folder = audit.save(tmp_path / "out")
    content = json.loads((folder / "audit.json").read_text())
    jsonschema.validate(content, json.loads((files("unembed.results") / "audit.schema.json").read_text()))
    assert "MixtureOfSoftmaxes" in (folder / "report.html").read_text()


def test_a_head_over_several_layers_cannot_stand_where_the_model_gives_one(family_folder, byte_tokenizer, documents):
    model, tokenizer = _with_head(family_folder, byte_tokenizer, heads.DirectOutputConnection)
    with pytest.raises(ValueError, match="hidden"):
        unembed.audit(model, tokenizer=tokenizer, text=documents, tokens=TOKENS, checks=["gradient"])


def test_a_linear_head_of_ours_is_a_matrix_like_any_other(family_folder, byte_tokenizer, documents):
    made = functools.partial(heads.Linear, softcap=2.0, scale=3.0)
    model, tokenizer = _with_head(family_folder, byte_tokenizer, made)
    record = unembed.audit(model, tokenizer=tokenizer, text=documents, tokens=TOKENS).record
    assert record.head["kind"] == "linear"
    assert (record.head["softcap"], record.head["scale"]) == (2.0, 3.0)
    gradient = record.results["gradient"].values
    assert gradient["centred"] is None
    assert gradient["before_softcap"]
    assert record.results["spectrum"].values["rank"] == model.config.hidden_size


def test_a_class_that_head_and_model_exclude_is_no_difference(family_folder, byte_tokenizer, documents):
    model, tokenizer = _with_head(family_folder, byte_tokenizer, lambda d, v: heads.Sigsoftmax(d, v, bias=True))
    with torch.no_grad():
        model.lm_head.bias[-1] = -torch.inf
    found = unembed.audit(model, tokenizer=tokenizer, text=documents, tokens=64, checks=["gradient"])
    assert found.results["gradient"].values["tokens"] == 64


def test_a_soft_cap_after_the_head_is_found(family_folder, byte_tokenizer, documents, monkeypatch):
    model, tokenizer = _with_head(family_folder, byte_tokenizer, heads.Sigsoftmax)
    forward = type(model).forward

    def capped(self, *args, **options):
        output = forward(self, *args, **options)
        output.logits = torch.tanh(output.logits)
        return output

    monkeypatch.setattr(type(model), "forward", capped)
    with pytest.raises(IntegrityError, match="not those of its head"):
        unembed.audit(model, tokenizer=tokenizer, text=documents, tokens=TOKENS, checks=["gradient"])
