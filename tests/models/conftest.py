"""Tiny checkpoints for the tests of `models`."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

ROWS, WIDTH = 12, 6


@pytest.fixture
def draw():
    """Random tensors, the same in every run."""
    generator = torch.Generator().manual_seed(0)
    return lambda *shape: torch.randn(*shape, generator=generator)


@pytest.fixture
def tensors(draw):
    """Head, embedding and final norm of a Llama without layers, and one tensor of its body."""
    return {
        "lm_head.weight": draw(ROWS, WIDTH),
        "model.embed_tokens.weight": draw(ROWS, WIDTH),
        "model.norm.weight": 1 + draw(WIDTH),
        "model.layers.0.mlp.up_proj.weight": draw(8, WIDTH),
    }


@pytest.fixture
def config():
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "vocab_size": ROWS,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    }


@pytest.fixture
def write(tmp_path):
    """Write a model folder: one file, or several with an index; a tokenizer of `tokens` ids."""

    def write(tensors, config, *, tokens=None, shards=None, name="model"):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        if shards is None:
            save_file(tensors, folder / "model.safetensors")
        else:
            for file, names in shards.items():
                save_file({n: tensors[n] for n in names}, folder / file)
            index = {"weight_map": {n: file for file, names in shards.items() for n in names}}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        if tokens is not None:
            vocab = {f"t{i}": i for i in range(tokens)}
            (folder / "tokenizer.json").write_text(json.dumps({"model": {"type": "BPE", "vocab": vocab}}))
        return folder

    return write
