"""What each model family does after its last layer: final norm, tying, scale and soft-cap of the scores.

Every row was read from the modeling and configuration files of transformers 5.24, or from llama.cpp for GGUF; a family
that is not here has no known final norm, which `load` says. Names are `model_type` of config.json.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

NormRule = Literal["rms", "rms1p", "layer", "layer1p", "none"]


@dataclass(frozen=True)
class NormSpec:
    """A final norm as a config states it.

    Args:
        rule: `rms1p` and `layer1p` store the gain minus one.
        eps_field: Field of config.json; None where the code fixes the number.
        eps: Value when the field is absent.
    """

    rule: NormRule
    eps_field: str | None
    eps: float


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


def _table(*rows: tuple[NormRule, str | None, float, str]) -> dict[str, NormSpec]:
    return {name: NormSpec(rule, field, eps) for rule, field, eps, names in rows for name in names.split()}


NORMS = _table(
    (
        "rms",
        "rms_norm_eps",
        1e-6,
        "llama mistral qwen2 qwen2_moe qwen3 qwen3_moe smollm3 granite granitemoe granitemoehybrid granitemoeshared "
        "granitemoe_swa hyperclovax deepseek_v2 deepseek_v3 deepseek_v32 dots1 jamba jetmoe lara_mini mellum "
        "minimax_m2 ministral seed_oss youtu aria_text axk1 axk2 bailing_hybrid doge flex_olmo olmo_hybrid kolibri1 "
        "laguna nanochat sarvam_mla sarvam_moe gemma3n_text gemma4_text gemma4_unified_text qwen3_vl_text "
        "qwen3_vl_moe_text",
    ),
    (
        "rms",
        "rms_norm_eps",
        1e-5,
        "mixtral olmo2 olmo3 olmoe phi3 phi4_multimodal ministral3 gpt_oss llama4_text exaone exaone4 exaone_moe "
        "ernie4_5 ernie4_5_moe glm4_moe glm4_moe_lite glm_moe_dsa hunyuan_v1_dense hunyuan_v1_moe apertus arcee afmoe "
        "bamba bitnet cwm diffllama falcon_h1 granite_swa internlm3 iquestcoder kimi_linear longcat_flash "
        "mimo_v2_flash minicpm3 minimax solar_open zamba zamba2 zaya hy_v3 mllama_text_model glm4v_text "
        "qwen2_vl qwen2_vl_text qwen2_5_vl qwen2_5_vl_text",
    ),
    ("rms", "rms_norm_eps", 1.5625e-07, "glm glm4"),
    ("rms", "rms_norm_eps", 1e-8, "helium moshi"),
    ("rms", "layer_norm_epsilon", 1e-5, "mamba mamba2 falcon_mamba nemotron_h"),
    ("rms", "norm_eps", 1e-5, "lfm2 lfm2_moe lfm3"),
    (
        "rms1p",
        "rms_norm_eps",
        1e-6,
        "gemma gemma2 gemma3 gemma3_text recurrent_gemma vaultgemma qwen3_next qwen3_5 qwen3_5_text qwen3_5_moe "
        "qwen3_5_moe_text minimax_m3_vl_text",
    ),
    ("layer", "layer_norm_epsilon", 1e-5, "gpt2 gpt-sw3 gpt_neo gptj gpt_bigcode codegen bloom falcon mpt"),
    ("layer", "layer_norm_epsilon", 1e-6, "ctrl"),
    ("layer", "layer_norm_eps", 1e-5, "gpt_neox gpt_neox_japanese cohere cohere2 phi persimmon stablelm jais2"),
    ("layer", "norm_epsilon", 1e-5, "starcoder2"),
    ("layer", "rms_norm_eps", 1e-5, "phimoe"),
    ("layer1p", "norm_eps", 1e-5, "nemotron"),
    # torch's own default: the modeling code gives no eps, whatever the config says.
    ("layer", None, 1e-5, "opt biogpt xglm rwkv dbrx olmo"),
)

# Families whose final norm has neither gain nor bias.
BARE_NORMS = frozenset({"olmo", "nanochat"})

# `tie_word_embeddings` where config.json does not say: the class default. Families not here default to false.
TIED = _names(
    "gpt2 gpt-sw3 gpt_neo gpt_bigcode gpt_neox_japanese bloom falcon mpt opt xglm biogpt ctrl openai-gpt "
    "cohere cohere2 cohere2_moe ernie4_5 ernie4_5_moe falcon_mamba mamba gemma gemma2 gemma3 gemma3_text gemma3n "
    "gemma3n_text gemma4 gemma4_text gemma4_unified gemma4_unified_text recurrent_gemma vaultgemma granite_swa jetmoe "
    "lara_mini lfm2 lfm2_moe lfm3 minicpm3 smollm3 starcoder2 youtu zamba zamba2 zaya mistral3 internvl got_ocr2 "
    "qwen3_vl_moe_text"
)

# Soft-cap: model_type -> (field, value when the field is absent). Every other family: `final_logit_softcapping`, none.
SOFTCAPS: dict[str, tuple[str, float | None]] = {
    "gemma2": ("final_logit_softcapping", 30.0),
    "gemma3n_text": ("final_logit_softcapping", 30.0),
    "vaultgemma": ("final_logit_softcapping", 30.0),
    "nanochat": ("final_logit_softcapping", 15.0),
    "recurrent_gemma": ("logits_soft_cap", 30.0),
}

# Factor on the scores: model_type -> (field, power of the field's value, value when the field is absent).
SCALES: dict[str, tuple[str, int, float]] = {
    **dict.fromkeys(_names("cohere cohere2 cohere2_moe"), ("logit_scale", 1, 0.0625)),
    **dict.fromkeys(
        _names("granite granite_swa granitemoe granitemoe_swa granitemoehybrid granitemoeshared"),
        ("logits_scaling", -1, 1.0),
    ),
    "hyperclovax": ("logits_scaling", 1, 1.0),
    "falcon_h1": ("lm_head_multiplier", 1, 1.0),
}

# Here the hidden state is divided by `hidden_size / dim_model_base` before the head.
BASE_WIDTH: dict[str, tuple[str, int]] = {"minicpm3": ("dim_model_base", 256)}

# transformers reads these fields and never applies them to the scores.
UNUSED_SCALES: dict[str, str] = {"mpt": "logit_scale"}

EPS_FIELDS = ("rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon", "norm_eps", "layernorm_epsilon")
WIDTH_FIELDS = ("word_embed_proj_dim", "hidden_size", "n_embd", "d_model", "dim", "model_dim")
VOCAB_FIELDS = ("vocab_size", "n_vocab", "padded_vocab_size")
TEXT_CONFIGS = ("text_config", "llm_config", "language_config", "thinker_config", "language_model_config")

# The BERT line: its heads predict masked tokens, or transform the hidden state before the matrix.
ENCODERS = _names(
    "bert roberta xlm-roberta xlm-roberta-xl camembert distilbert albert electra deberta deberta-v2 mpnet modernbert "
    "ernie big_bird longformer nomic_bert esm layoutlm layoutlmv3 megatron-bert mobilebert roc_bert roformer rembert "
    "roberta-prelayernorm data2vec-text convbert fnet funnel ibert luke nystromformer squeezebert tapas xmod yoso "
    "eurobert clip siglip vit bert-generation modernbert-decoder xlm xlnet flaubert reformer"
)
ENCODER_DECODERS = _names(
    "t5 mt5 umt5 bart mbart pegasus pegasus_x bigbird_pegasus blenderbot blenderbot-small marian m2m_100 prophetnet "
    "led longt5 switch_transformers plbart mvp fsmt whisper speech_to_text t5gemma t5gemma2 seamless_m4t udop"
)

# GGUF, by `general.architecture`.
GGUF_SCALES: dict[str, tuple[int, float]] = {
    **dict.fromkeys(("command-r", "cohere2"), (1, 1.0)),
    **dict.fromkeys(("granite", "granitemoe", "granitehybrid", "minicpm"), (-1, 1.0)),
    "grok": (1, 0.5773502691896257),
}
GGUF_BASE_WIDTH: dict[str, int] = {"minicpm3": 256}
GGUF_SOFTCAPS: dict[str, float] = {"gemma2": 30.0}
GGUF_BARE_NORMS = frozenset({"olmo"})
GGUF_ENCODERS = _names(
    "bert nomic-bert nomic-bert-moe modern-bert neo-bert jina-bert-v2 jina-bert-v3 eurobert gemma-embedding "
    "llama-embed t5encoder clip wavtokenizer-dec"
)
GGUF_ENCODER_DECODERS = frozenset({"t5"})
