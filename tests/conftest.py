"""Shared fixtures: tiny checkpoints of many model families, written once a session.

- `family` runs a test once for each name in `FAMILIES`.
- `family_folder(name, **changes)` gives the folder of a tiny random model of that family: config.json, safetensors and
  tokenizer, as `save_pretrained` writes them. `changes` go to the config (`vocab_size=300`). Norm gains, norm biases
  and head biases are far from 1 and 0, and scores have a deviation of a few nats, so that leaving one out shows.
  The folder is shared by all tests: copy it (`shutil.copytree`) before changing a file.
- `byte_tokenizer(bos=True)` gives a tokenizer of 256 bytes and three special tokens, 259 ids; the models have 264 rows,
  so five are padding. Ids 0 to 2 are `<bos>`, `<eos>`, `<pad>`; byte `b` is some id from 3 on.
- `documents` are ten short texts of different lengths, `Document`s in a list.

Everything is seeded; nothing is downloaded. Torch gets one thread: the work is tiny, and two test runs on one machine
would wait for each other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")
# A change must not land or fail by the draw of an example: in CI the examples are always the same ones.
hypothesis.settings.register_profile("ci", derandomize=True)
if os.environ.get("CI"):
    hypothesis.settings.load_profile("ci")

# A shell starts what it puts in the background with Ctrl-C ignored, and children inherit that; some tests press it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

_LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
}
# Family -> class of its config, and what the config is told beside `vocab_size`.
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 128, "initializer_range": 0.3}),
    "gpt_neox": ("GPTNeoXConfig", {**_LLAMA, "tie_word_embeddings": False}),
    "llama": ("LlamaConfig", {**_LLAMA, "tie_word_embeddings": False}),
    "qwen3": ("Qwen3Config", {**_LLAMA, "tie_word_embeddings": True}),
    "gemma2": ("Gemma2Config", {**_LLAMA, "final_logit_softcapping": 6.0}),
    "gemma3_text": ("Gemma3TextConfig", {**_LLAMA, "sliding_window": 16}),
    "olmo2": ("Olmo2Config", {**_LLAMA, "tie_word_embeddings": False}),
    "phi": ("PhiConfig", {**_LLAMA, "num_key_value_heads": 2}),
    "mistral": ("MistralConfig", {**_LLAMA, "sliding_window": 16, "tie_word_embeddings": False}),
    "cohere": ("CohereConfig", {**_LLAMA, "logit_scale": 0.25}),
    "granite": ("GraniteConfig", {**_LLAMA, "logits_scaling": 4.0, "tie_word_embeddings": True}),
    "mamba": ("MambaConfig", {"hidden_size": 16, "num_hidden_layers": 2, "state_size": 4, "initializer_range": 0.3}),
}
VOCAB_ROWS = 264
_WITH_BOS = {"llama", "gemma2", "gemma3_text", "mistral", "cohere"}


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="session")
def byte_tokenizer() -> Callable[..., Any]:
    return _byte_tokenizer


@pytest.fixture(scope="session")
def family_folder(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    written: dict[str, Path] = {}

    def folder(name: str, **changes: Any) -> Path:
        key = f"{name} {sorted(changes.items())}"
        if key not in written:
            written[key] = _write_family(tmp_path_factory.mktemp(name), name, changes)
        return written[key]

    return folder


@pytest.fixture(scope="session")
def documents() -> list[Any]:
    from unembed.text import Document

    text = "the head of a model maps a hidden state to a score for each word it may say next"
    words = text.split()
    return [
        Document(f"text {i}", " ".join(words[(i * 5 + j * (i + 1)) % len(words)] for j in range(3 + 7 * i)))
        for i in range(10)
    ]


def _byte_tokenizer(*, bos: bool = False) -> Any:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    special = ["<bos>", "<eos>", "<pad>"]
    vocab = {token: i for i, token in enumerate(special + sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    if bos:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", 0)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>", pad_token="<pad>", model_max_length=128
    )


def _write_family(folder: Path, name: str, changes: dict[str, Any]) -> Path:
    import torch
    import transformers

    kind, options = FAMILIES[name]
    special = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = getattr(transformers, kind)(**{"vocab_size": VOCAB_ROWS, **special, **options, **changes})
    generator = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if parameter.dim() == 1 and any(part in key for part in ("norm", "ln_")):
                parameter.uniform_(0.3, 2.0, generator=generator)
        head = model.get_output_embeddings()
        if head.bias is not None:
            head.bias.normal_(generator=generator)
        head.weight.normal_(std=0.8, generator=generator)
    model.eval().save_pretrained(folder)
    _byte_tokenizer(bos=name in _WITH_BOS).save_pretrained(folder)
    return folder
