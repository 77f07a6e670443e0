"""Which tensor is the head, what it is tied to, and the public cases about both."""

import pytest
import torch

from unembed.models import Unembedding
from unembed.models._resolve import HEADS, NORMS, pick
from unembed.results import InputError, IntegrityError

ROWS, WIDTH = 12, 6


def checked(head, code):
    (check,) = (c for c in head.integrity if c.code == code)
    return check


def test_zero_padding_rows_never_win(write, tensors, config, draw):  # M1: mirage#751
    tensors["lm_head.weight"] = torch.cat([-draw(5, WIDTH).abs() - 0.1, torch.zeros(3, WIDTH)])
    head = Unembedding.load(write(tensors, {**config, "vocab_size": 8}, tokens=5))
    hidden = torch.ones(WIDTH)
    assert head.scores(hidden).max() < 0
    assert head.scores(hidden).shape == (5,)
    assert head.scores(hidden).argmax() < 5 <= head.scores(hidden, padding=True).argmax()
    assert head.padding == range(5, 8)
    assert head.describe()["padding_rows"] == 3
    assert "3 padding rows (5, 6, 7): all zero" in checked(head, "UNE007").message


@pytest.mark.parametrize(
    ("row", "said"),
    [("random", "0 zero, the others of their own"), ("identical", "all identical"), ("mixed", "2 zero")],
)
def test_random_rows_beyond_the_tokenizer_are_listed(*, row, said, write, tensors, config, draw):  # M2: mlx-vlm#1917
    head = {"random": draw(4, WIDTH), "identical": draw(1, WIDTH).repeat(4, 1)}.get(row, draw(4, WIDTH))
    if row == "mixed":
        head[1:3] = 0
    tensors["lm_head.weight"][8:] = head
    loaded = Unembedding.load(write(tensors, config, tokens=8))
    assert loaded.real_rows == 8
    assert loaded.vocab_rows == 12
    assert "4 padding rows (8, 9, 10, 11)" in checked(loaded, "UNE007").message
    assert said in checked(loaded, "UNE007").message
    assert torch.equal(loaded.scores(torch.eye(WIDTH), padding=True).T, tensors["lm_head.weight"])


def test_both_vocabulary_sizes_are_printed_and_the_tokenizers_used(write, tensors, config, draw):  # M3: pythia#65
    tensors["lm_head.weight"] = draw(50304, WIDTH)  # more than 50,000 rows: M16
    loaded = Unembedding.load(write(tensors, {**config, "vocab_size": 50304}, tokens=50257))
    assert loaded.real_rows == 50257
    assert checked(loaded, "UNE006").status == "note"
    assert checked(loaded, "UNE006").message == (
        "The head has 50304 rows, the config says vocab_size 50304, the tokenizer has 50257 ids and its count is used: "
        "47 padding rows, ids 50257 to 50303."
    )
    assert loaded.rank_bound == WIDTH + 1


def test_more_ids_than_rows_is_a_warning(write, tensors, config):
    loaded = Unembedding.load(write(tensors, config, tokens=14))
    assert (loaded.real_rows, loaded.vocab_tokens, loaded.padding) == (12, 14, range(12, 12))
    assert checked(loaded, "UNE006").status == "warning"


def test_a_tied_model_without_head_tensor_uses_its_embedding(write, tensors, config):  # M4: transformers#30202
    del tensors["lm_head.weight"]
    loaded = Unembedding.load(write(tensors, {**config, "tie_word_embeddings": True}))
    assert torch.equal(loaded.weight, tensors["model.embed_tokens.weight"])
    assert loaded.tied
    assert checked(loaded, "UNE002").message.startswith("The head is tied: model.embed_tokens.weight is used")


@pytest.mark.parametrize("said", [False, None])
def test_an_untied_model_without_head_tensor_is_refused(said, write, tensors, config):  # M5: Qwen3-VL-Embedding#89
    del tensors["lm_head.weight"]
    if said is None:
        del config["tie_word_embeddings"]  # the default of llama
    folder = write(tensors, config)
    with pytest.raises(IntegrityError) as error:
        Unembedding.load(folder)
    message = str(error.value)
    assert "\n" not in message
    for part in ("lm_head.weight", "model.embed_tokens.weight", "tie_word_embeddings", str(folder / "config.json")):
        assert part in message


def test_tied_and_both_stored_and_equal_is_a_note(write, tensors, config):  # M6: vllm PR#6758
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    loaded = Unembedding.load(write(tensors, {**config, "tie_word_embeddings": True}))
    assert loaded.tied
    assert checked(loaded, "UNE002").status == "note"


def test_tied_and_both_stored_and_different_uses_the_head(write, tensors, config):
    loaded = Unembedding.load(write(tensors, {**config, "tie_word_embeddings": True}))
    assert torch.equal(loaded.weight, tensors["lm_head.weight"])
    assert not loaded.tied
    assert checked(loaded, "UNE002").status == "warning"


def test_transformers_too_uses_the_head_where_both_differ(write, tensors, config):
    transformers = pytest.importorskip("transformers")
    full = {**config, "num_hidden_layers": 0, "num_attention_heads": 1, "intermediate_size": 8}
    folder = write(tensors, {**full, "tie_word_embeddings": True})
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(model.lm_head.weight, Unembedding.load(folder).weight)


def test_tied_and_only_the_head_stored(write, tensors, config):
    del tensors["model.embed_tokens.weight"]
    loaded = Unembedding.load(write(tensors, {**config, "tie_word_embeddings": True}))
    assert loaded.tied
    assert "serves as both" in checked(loaded, "UNE002").message


def test_the_heads_rows_are_used_where_the_embedding_has_more(write, tensors, config, draw):  # M7: transformers#33819
    tensors["model.embed_tokens.weight"] = draw(15, WIDTH)
    loaded = Unembedding.load(write(tensors, config))
    assert loaded.vocab_rows == 12
    assert "12 rows; the embedding has 15" in checked(loaded, "UNE002").message


def test_the_gain_is_part_of_the_norm(write, tensors, config, draw):  # M8: keys_values#139
    tensors["model.norm.weight"] = 30 + draw(WIDTH)
    loaded = Unembedding.load(write(tensors, config))
    x = draw(4, WIDTH).double()
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * tensors["model.norm.weight"]
    torch.testing.assert_close(loaded.norm(x), expected)


def test_an_unknown_family_leaves_the_norm_out_and_says_so(write, tensors, config):  # M9: tuned-lens#56
    folder = write(tensors, {**config, "model_type": "novel"})
    loaded = Unembedding.load(folder)
    assert loaded.norm is None
    assert checked(loaded, "UNE009").status == "warning"
    assert "novel" in checked(loaded, "UNE009").message
    assert "norm=rms" in checked(loaded, "UNE009").message
    assert checked(loaded, "UNE010").status == "warning"
    gain = tensors["model.norm.weight"]
    for option, kind, weight in [("rms", "rms", gain), ("rms1p", "rms", gain + 1), ("layer", "layer", gain)]:
        norm = Unembedding.load(folder, norm=option).norm
        assert (norm.kind, norm.eps) == (kind, 1e-5)
        assert torch.equal(norm.weight, weight)
    assert Unembedding.load(folder, norm="none").norm is None
    with pytest.raises(InputError, match="`norm` must be"):
        Unembedding.load(folder, norm="batch")


def test_an_unknown_family_may_be_tied_by_the_lack_of_a_head(write, tensors, config):
    del tensors["lm_head.weight"], config["tie_word_embeddings"]
    loaded = Unembedding.load(write(tensors, {**config, "model_type": "novel"}))
    assert loaded.tied
    assert "novel is not known" in checked(loaded, "UNE002").message


@pytest.mark.parametrize("cap", [3.0, None])
def test_the_soft_cap_is_applied_once(cap, write, tensors, config):  # M10: Megatron-Bridge#4610
    extra = {} if cap is None else {"final_logit_softcapping": cap}
    loaded = Unembedding.load(write(tensors, {**config, "model_type": "gemma2", **extra}))
    cap = cap or 30.0  # gemma2's default where the field is absent
    hidden = 3 * torch.eye(WIDTH)
    plain = hidden @ tensors["lm_head.weight"].T
    assert torch.equal(loaded.scores(hidden).argmax(-1), plain.argmax(-1))
    torch.testing.assert_close(loaded.scores(hidden), cap * torch.tanh(plain / cap))
    assert loaded.rank_bound is None


def test_null_switches_the_families_soft_cap_off(write, tensors, config):
    loaded = Unembedding.load(write(tensors, {**config, "model_type": "gemma2", "final_logit_softcapping": None}))
    assert loaded.softcap is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_stored_dtypes_are_kept_and_scored_wide(dtype, write, tensors, config, draw):  # M14: mergekit#304
    tensors = {name: tensor.to(dtype) for name, tensor in tensors.items()}
    loaded = Unembedding.load(write(tensors, config))
    assert loaded.weight.dtype == dtype
    assert loaded.dtype == str(dtype).removeprefix("torch.")
    hidden = draw(3, WIDTH).to(dtype)
    scores = loaded.scores(loaded.norm(hidden))
    assert scores.dtype == torch.promote_types(dtype, torch.float32)
    exact = loaded.norm(hidden).double() @ tensors["lm_head.weight"].double().T
    torch.testing.assert_close(scores.double(), exact, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_8_bit_floats_are_widened_without_loss(dtype, write, tensors, config):
    tensors["lm_head.weight"] = tensors["lm_head.weight"].to(dtype)
    loaded = Unembedding.load(write(tensors, config))
    assert loaded.dtype == str(dtype).removeprefix("torch.")
    assert loaded.noise_eps == torch.finfo(dtype).eps
    assert torch.equal(loaded.weight.float(), tensors["lm_head.weight"].float())
    assert loaded.scores(torch.eye(WIDTH)).dtype == torch.float32


def test_a_quantised_head_is_refused(write, tensors, config):
    tensors["lm_head.weight_scale_inv"] = torch.ones(1, 1)
    with pytest.raises(InputError, match=r"quantised with lm_head\.weight_scale_inv"):
        Unembedding.load(write(tensors, config, name="scaled"))
    del tensors["lm_head.weight_scale_inv"]
    tensors["lm_head.weight"] = torch.zeros(ROWS, WIDTH, dtype=torch.uint8)
    with pytest.raises(InputError, match="uint8 is a packed quantisation"):
        Unembedding.load(write(tensors, config, name="packed"))
    tensors["lm_head.qweight"] = tensors.pop("lm_head.weight")
    with pytest.raises(InputError, match=r"lm_head\.qweight is packed"):
        Unembedding.load(write(tensors, config, name="gptq"))


def test_a_body_without_head_is_named(write, tensors, config):
    del tensors["lm_head.weight"]
    with pytest.raises(InputError, match=r"LlamaModel is a body without a head.*ForCausalLM"):
        Unembedding.load(write(tensors, {**config, "architectures": ["LlamaModel"]}))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"model_type": "bert", "architectures": ["BertForMaskedLM"]}, "masked tokens"),
        ({"model_type": "novel", "architectures": ["NovelForMaskedLM"]}, "masked tokens"),
        ({"model_type": "modernbert-decoder", "architectures": ["ModernBertDecoderForCausalLM"]}, "transforms"),
        ({"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]}, "encoder-decoder"),
        ({"is_encoder_decoder": True}, "encoder-decoder"),
        ({"architectures": ["LlamaForSequenceClassification"]}, "no unembedding"),
    ],
)
def test_what_has_no_next_token_head_is_refused_in_one_line(fields, said, write, tensors, config):
    folder = write(tensors, {**config, **fields})
    with pytest.raises(InputError, match=said) as error:
        Unembedding.load(folder)
    assert "\n" not in str(error.value)
    assert str(folder / "config.json") in str(error.value)


def test_a_width_of_another_model_is_refused(write, tensors, config):
    with pytest.raises(IntegrityError, match=r"width 6, but .*config\.json says hidden_size 8"):
        Unembedding.load(write(tensors, {**config, "hidden_size": 8}))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_counted(value, write, tensors, config):
    tensors["lm_head.weight"][[3, 7], 2] = value
    with pytest.raises(IntegrityError, match=r"lm_head\.weight in .*2 rows with NaN or infinity, first 3, 7"):
        Unembedding.load(write(tensors, config))


def test_a_norm_that_is_not_finite_is_refused(write, tensors, config):
    tensors["model.norm.weight"][0] = float("nan")
    with pytest.raises(IntegrityError, match="the norm weight holds NaN"):
        Unembedding.load(write(tensors, config))


def test_a_norm_of_another_width_is_refused(write, tensors, config, draw):
    tensors["model.norm.weight"] = draw(WIDTH + 1)
    with pytest.raises(IntegrityError, match=r"the norm weight has shape \(7,\), expected \(6,\)"):
        Unembedding.load(write(tensors, config))


def test_an_all_zero_head_is_refused(write, tensors, config):
    tensors["lm_head.weight"].zero_()
    with pytest.raises(IntegrityError, match="all 12 rows are zero"):
        Unembedding.load(write(tensors, config))


def test_zero_rows_among_the_tokens_are_a_warning(write, tensors, config):
    tensors["lm_head.weight"][4] = 0
    loaded = Unembedding.load(write(tensors, config))
    assert checked(loaded, "UNE005").status == "warning"


def test_a_bias_is_read_and_its_length_checked(write, tensors, config, draw):
    tensors["lm_head.bias"] = draw(ROWS)
    loaded = Unembedding.load(write(tensors, config))
    assert torch.equal(loaded.scores(torch.zeros(WIDTH)), tensors["lm_head.bias"])
    assert loaded.rank_bound == WIDTH + 2
    tensors["lm_head.bias"] = draw(ROWS + 1)
    with pytest.raises(InputError, match=r"lm_head\.bias .*expected shape \(12,\), got \(13,\)"):
        Unembedding.load(write(tensors, config, name="long"))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rms_norm_eps", "small"),
        ("final_logit_softcapping", -1.0),
        ("tie_word_embeddings", "yes"),
        ("hidden_size", [6]),
        ("hidden_size", float("inf")),
        ("vocab_size", 10**400),
    ],
)
def test_fields_of_the_wrong_type_are_named(field, value, write, tensors, config):
    with pytest.raises(InputError, match=f"`{field}` must be"):
        Unembedding.load(write(tensors, {**config, field: value}))


def test_the_text_part_of_a_multimodal_model_is_read(write, tensors, config, draw):
    text = {**config, "model_type": "gemma3_text", "rms_norm_eps": 0.5}
    del text["tie_word_embeddings"], text["architectures"]
    names = {"model.embed_tokens.weight": "model.language_model.embed_tokens.weight"}
    names["model.norm.weight"] = "model.language_model.norm.weight"
    tensors = {names.get(name, name): tensor for name, tensor in tensors.items() if name != "lm_head.weight"}
    tensors["model.vision_tower.norm.weight"] = draw(WIDTH)
    tensors["model.vision_tower.embeddings.weight"] = draw(20, WIDTH)
    loaded = Unembedding.load(write(tensors, {"model_type": "gemma3", "vision_config": {}, "text_config": text}))
    assert torch.equal(loaded.weight, tensors["model.language_model.embed_tokens.weight"])
    assert torch.equal(loaded.norm.weight, 1 + tensors["model.language_model.norm.weight"])
    assert (loaded.norm.eps, loaded.architecture, loaded.tied) == (0.5, "gemma3_text", True)


def test_true_in_the_text_part_ties_too(write, tensors, config):
    # Older saves wrote it there; transformers forwards it to the outer config.
    del tensors["lm_head.weight"]
    outer = {
        "model_type": "llava",
        "tie_word_embeddings": False,
        "text_config": {**config, "tie_word_embeddings": True},
    }
    assert Unembedding.load(write(tensors, outer)).tied


def test_a_projection_between_norm_and_head_leaves_the_norm_out(write, tensors, config):
    tensors["model.decoder.project_out.weight"] = torch.eye(WIDTH)
    loaded = Unembedding.load(write(tensors, {**config, "model_type": "opt"}))
    assert loaded.norm is None
    assert "project_out" in checked(loaded, "UNE009").message


def test_pick_prefers_the_body_the_tensor_lies_in():
    names = ["model.layers.0.norm.weight", "visual.norm.weight", "model.decoder.norm.weight", "norm.weight"]
    assert pick(names, NORMS, near="model.decoder.embed_tokens.weight") == "model.decoder.norm"
    assert pick(names, NORMS, near="embed_tokens.weight") == "norm"
    assert pick(names, HEADS) is None
    assert pick(["model.layers.61.shared_head.head.weight"], HEADS) is None
    assert (
        pick(["model.layers.61.shared_head.head.weight", "talker.lm_head.weight", "x.lm_head.weight"], HEADS)
        == "x.lm_head"
    )
