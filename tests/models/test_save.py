"""Saved heads come back bit-equal, and whole or not at all."""

import json
from dataclasses import replace

import pytest
import torch

from unembed.models import FinalNorm, Unembedding
from unembed.results import InputError

ROWS, WIDTH = 12, 6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("full", [True, False])
def test_everything_comes_back(full, dtype, draw, tmp_path):  # M15
    head = Unembedding(weight=draw(ROWS, WIDTH).to(dtype), architecture="gemma2")
    if full:
        head = replace(
            head,
            bias=draw(ROWS),
            softcap=30.0,
            scale=1 / 3,
            norm=FinalNorm("layer", draw(WIDTH), draw(WIDTH), 1e-6 / 3),
            tied=True,
            vocab_tokens=8,
            holes=(2, 5),
            tokens=["a", "b", "", "\ud800", "", "", "g", "h"],
            dtype="Q8_0",
            noise_eps=0.017,
        )
    folder = head.save(tmp_path / "deep" / "head")
    again = Unembedding.load(folder)
    for name in ("softcap", "scale", "tied", "vocab_tokens", "holes", "tokens", "dtype", "noise_eps", "architecture"):
        assert getattr(again, name) == getattr(head, name)
    assert torch.equal(again.weight, head.weight)
    assert again.weight.dtype == dtype
    assert (again.bias is None) == (head.bias is None)
    assert again.describe() == head.describe()
    if full:
        assert torch.equal(again.bias, head.bias)
        assert (again.norm.kind, again.norm.eps) == (head.norm.kind, head.norm.eps)
        assert torch.equal(again.norm.weight, head.norm.weight)
        assert torch.equal(again.norm.bias, head.norm.bias)
    assert again.hash == Unembedding.load(again.save(tmp_path / "twice")).hash
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_an_occupied_folder_is_not_touched(draw, tmp_path):
    head = Unembedding(weight=draw(ROWS, WIDTH))
    (tmp_path / "mine").mkdir()
    head.save(tmp_path / "mine")  # empty: fine
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(InputError, match="exists and is not an empty folder"):
        head.save(tmp_path / "mine")
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failed_write_leaves_nothing(draw, tmp_path, monkeypatch):
    def full(*args, **kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr("safetensors.torch.save_file", full)
    with pytest.raises(OSError, match="no space"):
        Unembedding(weight=draw(ROWS, WIDTH)).save(tmp_path / "head")
    assert list(tmp_path.iterdir()) == []


def test_a_saved_head_that_was_damaged_is_refused(draw, tmp_path):
    head = Unembedding(weight=draw(ROWS, WIDTH), vocab_tokens=2, tokens=["a", "b"])
    folder = head.save(tmp_path / "head")
    with pytest.raises(InputError, match="norm=rms"):
        Unembedding.load(folder, norm="rms")
    content = json.loads((folder / "config.json").read_text())
    (folder / "tokens.json").write_text('["a"]')
    with pytest.raises(InputError, match=r"1 tokens, but config\.json says 2"):
        Unembedding.load(folder)
    del content["unembed_head"]["softcap"]
    (folder / "config.json").write_text(json.dumps(content))
    (folder / "tokens.json").write_text('["a", "b"]')
    with pytest.raises(InputError, match="a saved head without 'softcap'"):
        Unembedding.load(folder)
    content["unembed_head"]["format"] = 99
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(InputError, match="a format this version does not read"):
        Unembedding.load(folder)
