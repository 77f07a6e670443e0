"""UNE020 passes on every family and fails when anything between the last state and the scores is changed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from unembed.integrations import check_parity, open_model
from unembed.models import Unembedding

pytest.importorskip("transformers")


@pytest.fixture
def opened(family_folder):
    def opened(name, *, dtype="float32", **changes):
        folder = family_folder(name, **changes)
        return *open_model(folder, dtype=dtype), Unembedding.load(folder)

    return opened


def test_every_family_passes_with_its_norm_checked(family, opened, documents):
    check = check_parity(*opened(family), documents)
    assert (check.code, check.status) == ("UNE020", "ok"), check.message
    assert "same argmax in 64 of 64 positions" in check.message
    error = float(check.message.split("largest error ")[1].split()[0])
    assert error < 1e-5, "an order below the tolerance"


def test_a_head_taken_from_the_model_in_memory_passes(opened, documents):
    model, tokenizer, _ = opened("cohere")
    assert check_parity(model, tokenizer, Unembedding.load(model), documents).status == "ok"


def _identity(x):
    return x


def _gain_one_less(head):
    """Gemma's stored gain taken as it is, without its `1 +`."""
    return replace(head, norm=replace(head.norm, weight=head.norm.weight - 1))


@pytest.mark.parametrize(
    ("name", "change", "cause"),
    [
        ("gemma2", lambda head: replace(head, softcap=None), "the soft-cap 6 is missing"),
        ("llama", lambda head: replace(head, softcap=6.0), "the soft-cap 6 is applied and the model applies none"),
        ("cohere", lambda head: replace(head, scale=1.0), "the scale is 1 and should be 0.25"),
        ("granite", lambda head: replace(head, scale=4.0), "the scale is 4 and should be 0.25"),
        ("gemma2", lambda head: replace(head, scale=2.0), "the scale is 2 and should be 1"),
        ("phi", lambda head: replace(head, bias=None), "No single change"),
        ("llama", lambda head: replace(head, bias=torch.ones(264).cumsum(0)), "a bias is applied and the model"),
        ("gpt2", lambda head: replace(head, weight=head.weight.roll(1, 0)), "the rows are shifted by +1"),
        ("gpt2", lambda head: replace(head, weight=head.weight.roll(-1, 0)), "the rows are shifted by -1"),
        ("qwen3", lambda head: replace(head, weight=head.weight.flip(0)), "No single change"),
        ("llama", lambda head: replace(head, norm=_identity), "the final norm was left out or is another one"),
        ("gpt_neox", lambda head: replace(head, norm=_identity), "the final norm was left out or is another one"),
        ("gemma3_text", _gain_one_less, "the final norm was left out or is another one"),
        ("gpt2", lambda head: replace(head, norm=replace(head.norm, kind="rms")), "the final norm was left out"),
        ("mamba", lambda head: replace(head, norm=replace(head.norm, eps=0.1)), "the final norm was left out"),
    ],
)
def test_each_wrong_head_fails_and_the_cause_is_named(opened, documents, name, change, cause):
    model, tokenizer, head = opened(name)
    check = check_parity(model, tokenizer, change(head), documents)
    assert check.status == "failed"
    assert cause in check.message
    assert "Scores rebuilt from the weights are not the model's" in check.message
    assert "\n" not in check.message


def test_scores_to_100_under_a_cap_of_30(opened, documents):
    """Case M10: the cap leaves the argmax alone, so only the loss and the scores tell that it is missing."""
    model, tokenizer, head = opened("gemma2", final_logit_softcapping=30.0)
    factor = 12.0
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(factor)  # tied: the body is scaled too, and a norm takes it out
    head = replace(head, weight=head.weight * factor)
    assert check_parity(model, tokenizer, head, documents).status == "ok"
    check = check_parity(model, tokenizer, replace(head, softcap=None), documents)
    assert check.status == "failed"
    assert "the soft-cap 30 is missing" in check.message
    assert "same argmax in 6" in check.message


def test_an_unknown_norm_is_a_note_and_the_rest_is_checked(opened, documents):
    model, tokenizer, head = opened("cohere")
    check = check_parity(model, tokenizer, replace(head, norm=None), documents)
    assert check.status == "note"
    assert "the norm was not checked: the head's norm is not known" in check.message
    assert check_parity(model, tokenizer, replace(head, norm=None, scale=1.0), documents).status == "failed"


def test_heads_of_other_sizes_fail(opened, documents):
    model, tokenizer, head = opened("llama")
    check = check_parity(model, tokenizer, replace(head, weight=head.weight[:-3]), documents)
    assert check.status == "failed"
    assert "264 scores, the head has 261 rows" in check.message


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_passes_and_still_sees_a_wrong_head(family, opened, documents, dtype):
    model, tokenizer, head = opened(family, dtype=dtype)
    check = check_parity(model, tokenizer, head, documents)
    assert check.status == "ok", check.message
    assert check_parity(model, tokenizer, replace(head, scale=head.scale * 1.5), documents).status == "failed"
    assert check_parity(model, tokenizer, replace(head, weight=head.weight.roll(1, 0)), documents).status == "failed"


def test_a_small_change_under_a_soft_cap_is_seen_in_half_precision(opened, documents):
    """Scores to 11 under a cap of 30: without it the largest changes by 4 percent, the argmax nowhere."""
    model, tokenizer, head = opened("gemma2", dtype="bfloat16", final_logit_softcapping=30.0)
    factor = 0.3
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(factor)
    head = replace(head, weight=model.get_output_embeddings().weight.detach())
    assert check_parity(model, tokenizer, head, documents).status == "ok"
    check = check_parity(model, tokenizer, replace(head, softcap=None), documents)
    assert check.status == "failed"
    assert "the soft-cap 30 is missing" in check.message
    assert "same argmax in 64 of 64" in check.message
    check = check_parity(model, tokenizer, replace(head, scale=1.03), documents)
    assert "the scale is 1.03 and should be" in check.message


@pytest.mark.parametrize(("rows", "weight", "bias"), [(264, 0.0, 0.0), (264, 0.0, 7.0), (264, 0.1, 0.0), (1, 0.1, 2.0)])
def test_scores_without_a_spread_are_compared_in_nats(opened, documents, rows, weight, bias):
    model, tokenizer, head = opened("phi")
    layer = model.get_output_embeddings()
    layer.weight = torch.nn.Parameter(torch.full((rows, 16), weight), requires_grad=False)
    layer.bias = torch.nn.Parameter(torch.full((rows,), bias), requires_grad=False)
    head = replace(head, weight=layer.weight, bias=layer.bias)
    check = check_parity(model, tokenizer, head, documents)
    assert check.status == "ok", check.message
    assert "nats, no spread to compare with: all scores are equal (tolerance 0.0001" in check.message
    check = check_parity(model, tokenizer, replace(head, bias=layer.bias + 0.01), documents)
    assert check.status == "failed"
    assert "largest error 0.01 nats" in check.message


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("rows", [slice(3, 4), slice(None)])
def test_scores_that_are_not_finite_fail(opened, documents, number, rows):
    model, tokenizer, head = opened("llama")
    with torch.no_grad():
        model.get_output_embeddings().weight[rows] = number
    check = check_parity(model, tokenizer, head, documents)
    assert check.status == "failed"
    assert "The model's own scores hold NaN or infinity in float32; open it with another `dtype`" in check.message
    nothing = replace(head, weight=torch.full_like(head.weight, number))
    assert check_parity(opened("llama")[0], tokenizer, nothing, documents).status == "failed"


def test_rows_that_the_model_masks_say_nothing(opened, documents):
    model, tokenizer, head = opened("llama")
    masked = torch.zeros(264).index_fill(0, torch.tensor([5, 9]), -torch.inf)
    model.get_output_embeddings().register_forward_hook(lambda _module, _inputs, output: output + masked)
    assert check_parity(model, tokenizer, head, documents).status == "ok"
    assert check_parity(model, tokenizer, replace(head, scale=1.1), documents).status == "failed"


def test_hooks_are_gone_afterwards(opened, documents):
    model, tokenizer, head = opened("llama")
    check_parity(model, tokenizer, head, documents)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
