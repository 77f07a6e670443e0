"""What opens, and what a checkpoint that does not says in one line."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from unembed.integrations import open_model, resolve_device
from unembed.models import Unembedding
from unembed.results import InputError

transformers = pytest.importorskip("transformers")
TINY = {"vocab_size": 264, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}


def test_a_model_comes_ready_to_measure(family, family_folder):
    model, tokenizer = open_model(family_folder(family))
    assert not model.training
    assert not any(parameter.requires_grad for parameter in model.parameters())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert tokenizer.decode(tokenizer("a b", add_special_tokens=False)["input_ids"]) == "a b"


def test_the_weights_file_and_the_stored_dtype(family_folder, tmp_path):
    model, _ = open_model(family_folder("llama") / "model.safetensors")
    assert type(model).__name__ == "LlamaForCausalLM"
    folder = _copy(family_folder, tmp_path)
    weights = {name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _edit(folder, dtype="bfloat16")
    assert open_model(folder, dtype="auto")[0].dtype == torch.bfloat16
    assert open_model(folder)[0].dtype == torch.float32


def _copy(family_folder, tmp_path):
    return shutil.copytree(family_folder("llama"), tmp_path / "model")


def _edit(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def _without_head(folder):
    weights = load_file(folder / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _cut(folder):
    content = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(content[:-100])


def _pickled(folder):
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


def _no_tokenizer(folder):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda folder: _edit(folder, model_type="unheard-of"), "model type `unheard-of`"),
        (lambda folder: _edit(folder, model_type="own", auto_map={"AutoConfig": "a.B"}), "never runs"),
        (lambda folder: _edit(folder, hidden_size=32), r"has shape .* for .* transformers would make up"),
        (lambda folder: (folder / "config.json").write_text("{"), r"config\.json: expected JSON"),
        (lambda folder: (folder / "config.json").unlink(), "expected config.json, or one .gguf file, got neither"),
        (lambda folder: (folder / "model.safetensors").unlink(), "no file named model.safetensors"),
        (_without_head, "lm_head.weight is missing for LlamaForCausalLM"),
        (_cut, "deserializing header"),
        (_pickled, "no file named model.safetensors"),
        (_no_tokenizer, "no tokenizer that transformers can open; put tokenizer.json"),
    ],
)
def test_a_broken_folder_is_one_line_that_names_it(family_folder, tmp_path, harm, message):
    folder = _copy(family_folder, tmp_path)
    harm(folder)
    with pytest.raises(InputError, match=message) as error:
        open_model(folder)
    assert str(error.value).startswith(str(folder))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("kind", "sizes", "message"),
    [
        ("T5ForConditionalGeneration", {"d_model": 8, "num_layers": 1, "num_heads": 2, "d_kv": 4}, "encoder-decoder"),
        ("BertForMaskedLM", TINY, "BertForMaskedLM is not a causal language model"),
        ("LlamaForSequenceClassification", TINY, "LlamaForSequenceClassification is not a causal language model"),
        ("ViTModel", TINY, "ViTModel has no causal language model in transformers"),
    ],
)
def test_other_kinds_of_model_are_refused_before_the_weights(tmp_path, kind, sizes, message):
    config = getattr(transformers, kind).config_class(**{"vocab_size": 264, **sizes}, architectures=[kind])
    config.save_pretrained(tmp_path)
    with pytest.raises(InputError, match=message):
        open_model(tmp_path)


@pytest.mark.parametrize("source", ["/nowhere/model", "nowhere.gguf", "a/b/c", "nowhere/", "./nowhere", "a b"])
def test_a_path_that_is_not_there(source):
    with pytest.raises(InputError, match=f"^{source}: no such file or folder"):
        open_model(source)


def test_a_file_of_another_kind(tmp_path):
    (tmp_path / "a.bin").write_bytes(b"x")
    with pytest.raises(InputError, match=r"a\.bin: expected a model folder or a \.gguf file"):
        open_model(tmp_path / "a.bin")
    (tmp_path / "a.gguf").write_bytes(b"not a gguf file")
    with pytest.raises(InputError, match=r"a\.gguf: transformers cannot open it"):
        open_model(tmp_path / "a.gguf")


def test_devices(monkeypatch):
    assert resolve_device("cpu") == torch.device("cpu")
    with pytest.raises(InputError, match=r"'nonsense': expected auto, cpu, cuda"):
        resolve_device("nonsense")
    with pytest.raises(InputError, match=r"'meta' is not available here"):
        resolve_device("meta")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device("auto") == torch.device("cpu")
    with pytest.raises(InputError, match=r"'cuda' is not available here; use one of \['auto', 'cpu'\]"):
        resolve_device("cuda")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert resolve_device("auto") == torch.device("cuda")
    assert resolve_device("cuda:1") == torch.device("cuda:1")
    with pytest.raises(InputError, match="has 2 CUDA devices"):
        resolve_device("cuda:2")


def test_a_folder_of_a_head_alone_says_what_can_be_done_with_it(family_folder, tmp_path):
    folder = Unembedding.load(family_folder("llama")).save(tmp_path / "head")
    for source in (folder, folder / "model.safetensors"):
        with pytest.raises(InputError, match=r"holds a head alone .* use `--checks spectrum`") as error:
            open_model(source)
        assert str(error.value).startswith(str(source))


def test_without_transformers_the_extra_is_named(family_folder, monkeypatch):
    folder = family_folder("llama")
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(InputError, match=r'needs transformers: pip install "unembed\[hf\]"'):
        open_model(folder)


def test_a_package_that_the_checkpoint_needs_is_one_line(family_folder, monkeypatch):
    def fail(*_args, **_options):
        raise ImportError("\nLlamaTokenizer requires the SentencePiece library.\nYou can install it ...\n")

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", fail)
    with pytest.raises(InputError, match=r"requires the SentencePiece library\.$"):
        open_model(family_folder("llama"))
