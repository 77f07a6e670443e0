"""The small Llama against transformers' own, in both directions of the folder, values and gradients."""

import math

import pytest
import torch
from torch.nn.functional import cross_entropy

from unembed.models._llama import Llama, LlamaConfig, load_llama, save_llama
from unembed.results import InputError

CONFIGS = [
    LlamaConfig(vocab_size=31, hidden_size=24, intermediate_size=20, num_hidden_layers=3, num_attention_heads=3),
    LlamaConfig(
        vocab_size=17,
        hidden_size=32,
        intermediate_size=12,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        rms_norm_eps=1e-2,
        rope_theta=50.0,
        bos_token_id=3,
        eos_token_id=5,
    ),
    LlamaConfig(
        vocab_size=9,
        hidden_size=8,
        intermediate_size=40,
        num_hidden_layers=1,
        num_attention_heads=4,
        num_key_value_heads=1,
    ),
]


def _random(config: LlamaConfig) -> Llama:
    """Weights large enough that a wrong angle, order or epsilon moves every score."""
    generator = torch.Generator().manual_seed(0)
    model = Llama(config).double()
    with torch.no_grad():
        for weight in model.parameters():
            weight.copy_(
                0.4 * torch.randn(weight.shape, generator=generator, dtype=torch.float64) + (weight.dim() == 1)
            )
    return model


@pytest.mark.parametrize("config", CONFIGS)
def test_a_saved_folder_loads_in_transformers_with_equal_scores_and_gradients(config, tmp_path):
    transformers = pytest.importorskip("transformers")
    model = _random(config)
    save_llama(model, tmp_path)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float64, output_loading_info=True
    )
    assert not any(info.values())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
    assert (theirs.config.bos_token_id, theirs.config.eos_token_id) == (config.bos_token_id, config.eos_token_id)

    ids = torch.randint(config.vocab_size, (2, 13), generator=torch.Generator().manual_seed(1))
    scores = model.scores(model(ids))
    expected = theirs(ids).logits
    assert expected.std() > 0.5
    torch.testing.assert_close(scores, expected, rtol=1e-5, atol=1e-5)

    for logits in (scores, expected):
        cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()).backward()
    gradients = {name: weight.grad for name, weight in theirs.named_parameters()}
    assert gradients.keys() == dict(model.named_parameters()).keys()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, gradients[name], rtol=1e-4, atol=1e-6, msg=name)


def test_a_folder_of_transformers_loads_here_with_equal_scores(tmp_path):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=23,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            rms_norm_eps=1e-3,
            rope_parameters={"rope_type": "default", "rope_theta": 77.0},
            tie_word_embeddings=True,
            initializer_range=0.3,
        )
    )
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(23, (2, 11))
    model = load_llama(tmp_path)
    torch.testing.assert_close(model.scores(model(ids)), theirs(ids).logits, rtol=1e-5, atol=1e-5)


def test_what_is_saved_comes_back_bit_for_bit_and_replaces_what_was_there(tmp_path):
    save_llama(_random(CONFIGS[0]), tmp_path)
    model = _random(CONFIGS[1]).bfloat16()
    save_llama(model, tmp_path)
    again = load_llama(tmp_path)
    assert again.config == CONFIGS[1]
    for (name, weight), other in zip(model.state_dict().items(), again.state_dict().values(), strict=True):
        assert other.dtype == torch.bfloat16
        assert torch.equal(weight, other), name


def test_an_untied_config_is_refused_by_name(tmp_path):
    save_llama(_random(CONFIGS[2]), tmp_path)
    config = tmp_path / "config.json"
    config.write_text(config.read_text().replace('"tie_word_embeddings": true', '"tie_word_embeddings": false'))
    with pytest.raises(InputError, match=r"config\.json: expected .* got 'llama' and False"):
        load_llama(tmp_path)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [({"num_attention_heads": 5}, "hidden_size"), ({"num_attention_heads": 4, "num_key_value_heads": 3}, "num_key")],
)
def test_sizes_that_do_not_divide_are_refused_by_name(sizes, name):
    with pytest.raises(ValueError, match=name):
        LlamaConfig(vocab_size=8, hidden_size=16, intermediate_size=8, num_hidden_layers=1, **sizes)


def test_initial_weights_follow_the_seed_and_shrink_on_the_residual_stream():
    config = LlamaConfig(
        vocab_size=500, hidden_size=64, intermediate_size=200, num_hidden_layers=8, num_attention_heads=2
    )
    first, same, other = (Llama(config, generator=torch.Generator().manual_seed(seed)) for seed in (1, 1, 2))
    for name, weight in first.named_parameters():
        assert torch.equal(weight, same.get_parameter(name))
        if weight.dim() == 1:
            assert torch.equal(weight, torch.ones_like(weight))
            continue
        assert not torch.equal(weight, other.get_parameter(name))
        expected = 0.02 / math.sqrt(16) if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
        assert weight.std().item() == pytest.approx(expected, rel=0.06)
