"""Hub ids through the real `huggingface_hub`, against a cache in the layout it writes; never the network."""

import shutil

import pytest
import torch

from unembed.models import Unembedding, resolve_revision
from unembed.models._hub import is_hub_id
from unembed.results import InputError

hub = pytest.importorskip("huggingface_hub")
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An offline hub whose cache is empty."""
    monkeypatch.setattr(hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


def fill(cache, repo, folder, *, without=(), revision="main"):
    root = cache / f"models--{repo.replace('/', '--')}"
    (root / "refs").mkdir(parents=True)
    (root / "refs" / revision).write_text(COMMIT)
    snapshot = root / "snapshots" / COMMIT
    shutil.copytree(folder, snapshot)
    for name in without:
        (snapshot / name).unlink()


def test_a_cached_model_is_read_by_its_id(cache, write, tensors, config):
    folder = write(tensors, config, tokens=9)
    fill(cache, "owner/model", folder)
    head, local = Unembedding.load("owner/model"), Unembedding.load(folder)
    assert (head.hash, head.source, head.vocab_tokens) == (local.hash, "owner/model", 9)
    assert torch.equal(head.weight, tensors["lm_head.weight"])


def test_only_the_shards_with_the_head_are_needed(cache, write, tensors, config):
    shards = {
        "a.safetensors": ["model.layers.0.mlp.up_proj.weight", "model.embed_tokens.weight"],
        "b.safetensors": ["lm_head.weight", "model.norm.weight"],
    }
    fill(cache, "owner/model", write(tensors, config, shards=shards), without=["a.safetensors"], revision="v1")
    head = Unembedding.load("owner/model", revision="v1")
    assert torch.equal(head.weight, tensors["lm_head.weight"])
    with pytest.raises(InputError, match="owner/model is no file or folder here"):
        Unembedding.load("owner/model")  # only v1 is in the cache


@pytest.mark.parametrize("repo", ["owner/absent", "gpt2"])
def test_offline_and_not_cached_is_one_line(cache, repo):
    with pytest.raises(
        InputError, match=f"{repo} is no file or folder here, and as a hub id it gave no config.json"
    ) as error:
        Unembedding.load(repo)
    assert "\n" not in str(error.value)


def test_a_missing_shard_is_named(cache, write, tensors, config):
    shards = {"a.safetensors": ["model.norm.weight"], "b.safetensors": ["lm_head.weight"]}
    fill(cache, "owner/model", write(tensors, config, shards=shards), without=["b.safetensors"])
    with pytest.raises(InputError, match=r"owner/model: could not get b\.safetensors from the hub"):
        Unembedding.load("owner/model")


def test_a_model_without_safetensors_says_what_to_do(cache, write, tensors, config):
    fill(cache, "owner/model", write(tensors, config), without=["model.safetensors"])
    with pytest.raises(InputError, match=r"no model\.safetensors.*GGUF"):
        Unembedding.load("owner/model")


def test_the_kind_of_model_is_refused_before_weights_are_fetched(cache, write, tensors, config, monkeypatch):
    config |= {"model_type": "t5", "is_encoder_decoder": True}
    fill(cache, "owner/model", write(tensors, config))
    asked = []
    download = hub.hf_hub_download
    monkeypatch.setattr(
        hub, "hf_hub_download", lambda repo, name, **kw: asked.append(name) or download(repo, name, **kw)
    )
    with pytest.raises(InputError, match="encoder-decoder"):
        Unembedding.load("owner/model")
    assert asked == ["config.json"]


def test_no_more_is_asked_for_than_needed(cache, write, tensors, config, monkeypatch):
    fill(cache, "owner/model", write(tensors, config, tokens=12))
    asked = []
    download = hub.hf_hub_download
    monkeypatch.setattr(
        hub, "hf_hub_download", lambda repo, name, **kw: asked.append(name) or download(repo, name, **kw)
    )
    Unembedding.load("owner/model")
    assert set(asked) == {"config.json", "model.safetensors.index.json", "model.safetensors", "tokenizer.json"}


@pytest.mark.parametrize(
    ("source", "yes"),
    [
        ("gpt2", True),
        ("owner/model-1.5B", True),
        ("a/b/c", False),
        ("./x", False),
        ("/x", False),
        ("x.gguf", False),
        ("", False),
    ],
)
def test_what_looks_like_an_id(source, yes):
    assert is_hub_id(source) == yes


def test_a_revision_becomes_the_commit_in_the_cache(cache, write, tensors, config):
    fill(cache, "owner/model", write(tensors, config), revision="v1")
    assert resolve_revision("owner/model", "v1") == COMMIT
    assert resolve_revision("owner/model", COMMIT) == COMMIT
    with pytest.raises(InputError, match="owner/model is no file or folder here"):
        resolve_revision("owner/model", None)  # main is not in the cache
    head = Unembedding.load("owner/model", revision=resolve_revision("owner/model", "v1"))
    assert torch.equal(head.weight, tensors["lm_head.weight"])


def test_what_is_here_already_has_no_revision(cache, write, tensors, config, monkeypatch):
    folder = write(tensors, config)
    assert resolve_revision(folder, None) is None
    assert resolve_revision(str(folder), None) is None
    assert resolve_revision(torch.nn.Linear(1, 1), None) is None
    monkeypatch.chdir(folder.parent)
    assert resolve_revision(folder.name, None) is None, "a folder that looks like an id"


def test_a_hub_that_does_not_answer_is_asked_twice_and_in_silence(cache, monkeypatch, capfd):
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr("unembed.models._hub.time.sleep", lambda _seconds: None)
    asked = []

    def no_answer(url, **_options):
        asked.append(url)
        raise ConnectionError("Name or service not known")

    monkeypatch.setattr(hub, "get_hf_file_metadata", no_answer)
    monkeypatch.setattr(hub, "hf_hub_download", lambda *_a, **_k: pytest.fail("no download without an answer"))
    with pytest.raises(InputError, match=r"no config\.json \(ConnectionError: Name or service not known\)"):
        Unembedding.load("owner/absent")
    assert asked == ["https://huggingface.co/owner/absent/resolve/main/config.json"] * 2
    assert capfd.readouterr() == ("", "")
