"""Reading names without values, shards, and files that are not what they say."""

import json
import resource

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from unembed.models import Unembedding
from unembed.models import _safetensors as module
from unembed.results import InputError

SHARDS = {
    "model-00001-of-00002.safetensors": ["model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"],
    "model-00002-of-00002.safetensors": ["lm_head.weight", "model.norm.weight"],
}


def test_folder_file_and_shards_give_one_head(write, tensors, config):
    folder = write(tensors, config, tokens=9)
    heads = [
        Unembedding.load(folder),
        Unembedding.load(str(folder / "model.safetensors")),
        Unembedding.load(write(tensors, config, tokens=9, shards=SHARDS, name="shards")),
    ]
    for head in heads:
        assert torch.equal(head.weight, tensors["lm_head.weight"])
        assert torch.equal(head.norm.weight, tensors["model.norm.weight"])
        assert (head.kind, head.vocab_tokens, head.tokens[3]) == ("safetensors", 9, "t3")
    assert len({head.hash for head in heads}) == 1


def test_only_head_and_norm_are_read(write, tensors, config, monkeypatch):
    read = []
    get = module.Checkpoint.get
    monkeypatch.setattr(module.Checkpoint, "get", lambda self, name: read.append(name) or get(self, name))
    Unembedding.load(write(tensors, config, shards=SHARDS))
    assert sorted(set(read)) == ["lm_head.weight", "model.norm.weight"]


def test_the_body_costs_no_memory(write, tensors, config):
    folder = write(tensors, config)
    header = module.read_header(folder / "model.safetensors")
    end = max(entry["data_offsets"][1] for entry in header.values())
    header["model.layers.0.mlp.gate_proj.weight"] = {
        "dtype": "F32",
        "shape": [1 << 14, 1 << 14],
        "data_offsets": [end, end + (1 << 30)],
    }
    text = json.dumps(header).encode()
    data = (folder / "model.safetensors").read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text + data[start : start + end])
        file.truncate(8 + len(text) + end + (1 << 30))  # a hole of one gigabyte, never on the disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    head = Unembedding.load(folder)
    assert torch.equal(head.weight, tensors["lm_head.weight"])
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # kilobytes


def test_an_absent_shard_is_named_before_any_work(write, tensors, config, monkeypatch):  # M13: sglang PR#32279
    folder = write(tensors, config, shards=SHARDS)
    (folder / "model-00001-of-00002.safetensors").unlink()
    monkeypatch.setattr(module.Checkpoint, "get", lambda self, name: pytest.fail("read a tensor"))
    with pytest.raises(InputError, match=r"model-00001-of-00002\.safetensors: .*absent"):
        Unembedding.load(folder)


@pytest.mark.parametrize("keep", [0, 5, 40, -10])
def test_a_truncated_file_is_named(keep, write, tensors, config):
    path = write(tensors, config) / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match=r"model\.safetensors: .*(truncated|too short).*fetch"):
        Unembedding.load(path.parent)


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("text", [b'{"a": ', b"[1]", b"\xff\xfe", b'{"weight_map": {"a": 3}, "model": 4}'])
def test_corrupt_json_is_named(name, text, write, tensors, config):
    folder = write(tensors, config, tokens=12, shards=SHARDS)
    if name == "config.json" and text.startswith(b'{"weight_map"'):
        pytest.skip("a valid config of an unknown family")
    (folder / name).write_bytes(text)
    with pytest.raises(InputError) as error:
        Unembedding.load(folder)
    assert str(folder / name) in str(error.value)
    assert "\n" not in str(error.value)


def test_an_index_that_points_elsewhere_is_refused(write, tensors, config):
    folder = write(tensors, config, shards=SHARDS)
    index = {"weight_map": {"lm_head.weight": "../../etc/passwd"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match="not a plain file name"):
        Unembedding.load(folder)
    index = {"weight_map": {"lm_head.weight": "model-00001-of-00002.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(InputError, match=r"says it holds lm_head\.weight and it does not"):
        Unembedding.load(folder)


def test_a_header_that_is_no_header_is_refused(tmp_path):
    path = tmp_path / "a.safetensors"
    for header in (b"{}}", b'{"a": 3}', b'{"a": {"data_offsets": [0, "x"]}}'):
        path.write_bytes(len(header).to_bytes(8, "little") + header)
        with pytest.raises(InputError, match="not a safetensors file"):
            module.read_header(path)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(["config.json", "tokenizer.json", "model.safetensors"]),
    at=st.integers(0, 250),
    byte=st.integers(0, 255),
)
def test_a_damaged_file_is_read_or_refused_in_one_line(*, name, at, byte, write, tensors, config, tmp_path):
    folder = tmp_path / "model" if (tmp_path / "model").is_dir() else write(tensors, config, tokens=12)
    whole = (folder / name).read_bytes()
    data = bytearray(whole)
    data[at % len(data)] = byte
    (folder / name).write_bytes(data)
    said = ""
    try:
        Unembedding.load(folder)
    except InputError as error:
        said = str(error)
    finally:
        (folder / name).write_bytes(whole)
    assert "\n" not in said


def test_a_file_of_another_dtype_is_read(tmp_path):
    save_file({"a": torch.arange(4, dtype=torch.float16)}, tmp_path / "a.safetensors")
    checkpoint = module.Checkpoint.of_file(tmp_path / "a.safetensors")
    assert checkpoint.shape("a") == (4,)
    assert checkpoint.get("a").tolist() == [0, 1, 2, 3]
