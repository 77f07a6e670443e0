"""What a user may give, and one line for everything else."""

import json

import pytest
import torch
from safetensors.torch import save_file

from unembed.models import Unembedding
from unembed.results import InputError


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ([], "an empty folder"),
        (["notes.txt"], "not a model folder"),
        (["config.json", "pytorch_model.bin"], "pickle.*safetensors and GGUF.*save_pretrained"),
        (["consolidated.00.pth"], "pickle"),
        (["a.safetensors", "b.safetensors"], r"2 \.safetensors files and no model\.safetensors\.index\.json"),
        (["a.gguf", "b.gguf"], r"2 GGUF files \(a\.gguf, b\.gguf\)"),
        (["adapter_config.json", "adapter_model.safetensors"], "an adapter.*merge"),
    ],
)
def test_folders_without_a_readable_model(files, said, tmp_path):
    for name in files:
        (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match=said) as error:
        Unembedding.load(tmp_path)
    assert "\n" not in str(error.value)
    assert str(tmp_path) in str(error.value)


def test_files_that_are_no_models(tmp_path):
    for name, said in {"model.pt": "pickle", "readme.md": "not a model file", "a.gguf": "not a GGUF file"}.items():
        (tmp_path / name).write_text("hello")
        with pytest.raises(InputError, match=said):
            Unembedding.load(tmp_path / name)
    with pytest.raises(InputError, match="no such file or folder"):
        Unembedding.load(tmp_path / "absent")
    with pytest.raises(InputError, match="no such file or folder"):
        Unembedding.load("absent/model.gguf")
    with pytest.raises(InputError, match="`revision` is for hub ids"):
        Unembedding.load(tmp_path, revision="main")
    with pytest.raises(InputError, match="must be a path, a hub id or a model, got int"):
        Unembedding.load(3)


def test_weights_without_config_are_refused(tmp_path):
    save_file({"lm_head.weight": torch.ones(2, 2)}, tmp_path / "model.safetensors")
    with pytest.raises(InputError, match=r"config\.json: absent"):
        Unembedding.load(tmp_path)


def test_a_single_file_of_any_name_is_the_model(write, tensors, config):
    folder = write(tensors, config)
    (folder / "model.safetensors").rename(folder / "weights.safetensors")
    assert torch.equal(Unembedding.load(folder).weight, tensors["lm_head.weight"])


def test_a_tokenizer_can_be_given(write, tensors, config):
    class Tokenizer:
        def get_vocab(self):
            return {"a": 0, "b": 4}

    folder = write(tensors, config, tokens=12)
    head = Unembedding.load(folder, tokenizer=Tokenizer())
    assert (head.vocab_tokens, head.holes, head.tokens) == (5, (1, 2, 3), ["a", "", "", "", "b"])
    other = folder / "other.json"
    other.write_text(json.dumps({"model": {"vocab": [["x", 0.0], ["y", -1.0]]}}))
    assert Unembedding.load(folder, tokenizer=other).tokens == ["x", "y"]
    with pytest.raises(InputError, match="`tokenizer` must be"):
        Unembedding.load(folder, tokenizer=7)
    with pytest.raises(InputError, match="`tokenizer`"):
        Unembedding.load(folder, tokenizer=folder / "absent")


def test_without_a_tokenizer_the_check_is_skipped_not_passed(write, tensors, config):
    head = Unembedding.load(write(tensors, config))
    (check,) = (c for c in head.integrity if c.code == "UNE006")
    assert (check.status, head.vocab_tokens, head.tokens, head.real_rows) == ("skipped", None, None, 12)
