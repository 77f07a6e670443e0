"""Every family's rule for norm, tying, scale and soft-cap against the model's own logits."""

import pytest
import torch

from unembed.models import Unembedding
from unembed.models import _families as families

transformers = pytest.importorskip("transformers")

SMALL = {"vocab_size": 37, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
KEYS = {**SMALL, "num_key_value_heads": 1, "head_dim": 8}
MODELS = {
    "gpt2": ({"vocab_size": 37, "n_embd": 16, "n_layer": 1, "n_head": 2}, "transformer.ln_f"),
    "gpt_neox": ({**SMALL, "layer_norm_eps": 1e-3}, "gpt_neox.final_layer_norm"),
    "llama": ({**KEYS, "rms_norm_eps": 1e-3}, "model.norm"),
    "qwen3": ({**KEYS, "tie_word_embeddings": True}, "model.norm"),
    "gemma2": ({**KEYS, "final_logit_softcapping": 0.5}, "model.norm"),
    "gemma3_text": (KEYS, "model.norm"),
    "olmo": (SMALL, "model.norm"),
    "olmo2": (KEYS, "model.norm"),
    "phi": (SMALL, "model.final_layernorm"),
    "mistral": (KEYS, "model.norm"),
    "cohere": ({**SMALL, "logit_scale": 0.3}, "model.norm"),
    "granite": ({**KEYS, "logits_scaling": 7.0}, "model.norm"),
    "mamba": ({"vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4}, "backbone.norm_f"),
    "nemotron": ({**KEYS, "norm_eps": 1e-4}, "model.norm"),
    "opt": ({**SMALL, "ffn_dim": 24, "word_embed_proj_dim": 16}, "model.decoder.final_layer_norm"),
    "starcoder2": (KEYS, "model.norm"),
    "falcon_h1": ({**KEYS, "lm_head_multiplier": 0.4, "mamba_d_ssm": 16, "mamba_n_heads": 2}, "model.final_layernorm"),
    "minicpm3": ({**SMALL, "dim_model_base": 4}, "model.norm"),
}


def _build(family):
    options, norm = MODELS[family]
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(family, **options)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    # The initial weights are so small and so regular that a wrong gain, bias or eps would not show.
    with torch.no_grad():
        for parameter in [*model.get_submodule(norm).parameters(), *model.get_output_embeddings().parameters()]:
            parameter.add_(torch.randn_like(parameter) * 0.4)
    return model, model.get_submodule(norm)


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.filterwarnings("ignore")
def test_scores_from_weights_are_the_logits_of_the_model(family, tmp_path):
    model, norm = _build(family)
    seen = []
    norm.register_forward_hook(lambda module, inputs, output: seen.append(inputs[0]))
    with torch.no_grad():
        logits = model(torch.arange(12).reshape(2, 6) + 3, use_cache=False).logits
    model.save_pretrained(tmp_path)
    from_folder = Unembedding.load(tmp_path)
    from_object = Unembedding.load(model)
    for head in (from_folder, from_object):
        assert head.norm is not None
        torch.testing.assert_close(head.scores(head.norm(seen[0])), logits, rtol=1e-5, atol=1e-5)
        assert head.tied == model.config.tie_word_embeddings
        assert {check.status for check in head.integrity} <= {"ok", "note", "skipped"}
    assert from_folder.hash == from_object.hash
    assert from_object.weight.data_ptr() == model.get_output_embeddings().weight.data_ptr()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", sorted(families.NORMS))
def test_defaults_are_those_of_the_config_class(family):
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    if family not in CONFIG_MAPPING:
        pytest.skip("a text part, or a name of other versions")
    default = CONFIG_MAPPING[family]()
    spec = families.NORMS[family]
    assert getattr(default, "tie_word_embeddings", False) == (family in families.TIED)
    if spec.eps_field is not None and default.__class__.model_type == family and hasattr(default, spec.eps_field):
        assert getattr(default, spec.eps_field) == spec.eps
    field, softcap = families.SOFTCAPS.get(family, ("final_logit_softcapping", None))
    assert (getattr(default, field, None) or None) == softcap
    if family in families.SCALES:
        field, _, value = families.SCALES[family]
        assert getattr(default, field) == value
