"""The demonstration model in the package: what its recipe says is what it does; and the recipe's own arithmetic."""

import json
import math
from dataclasses import asdict, replace
from importlib.resources import files
from pathlib import Path

import pytest
import torch

import unembed.experiments.demonstration as module
from unembed.experiments import TrainConfig, held_out_documents, text_sha256
from unembed.experiments.demonstration import build, demonstration, main, measure, train_tokenizer, unigram
from unembed.models._llama import Llama, LlamaConfig, load_llama
from unembed.results import InputError

pytest.importorskip("tokenizers")

SHIPPED = Path(str(files("unembed"))) / "assets" / "demonstration"
RECIPE = json.loads((SHIPPED / "recipe.json").read_text(encoding="utf-8"))
STRINGS = [
    "Plain words.",
    "  def f(x):\n\treturn x\n\n",
    "naïve 🤖👩‍🚀 日本語",
    "\r\n\0 1234567",
    "<|endoftext|>tail",
    "",
]


@pytest.fixture(scope="module")
def tokenizer():
    return pytest.importorskip("transformers").AutoTokenizer.from_pretrained(SHIPPED)


def test_the_folder_is_small_complete_and_made_by_the_recipe():
    names = {"config.json", "model.safetensors", "recipe.json", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in SHIPPED.iterdir()} == names
    assert sum(path.stat().st_size for path in SHIPPED.iterdir()) < 6e6
    assert RECIPE["config"] == json.loads(json.dumps(asdict(demonstration())))
    assert RECIPE["parameters"] == sum(weight.numel() for weight in load_llama(SHIPPED).parameters())


def test_the_recorded_loss_is_what_transformers_measures(tokenizer):
    transformers = pytest.importorskip("transformers")
    expected = RECIPE["held_out_excerpt"]
    documents = held_out_documents()[: expected["documents"]]
    if text_sha256(documents) != expected["sha256"]:
        pytest.skip(f"this Python's topics are not those of Python {RECIPE['python']}")
    model = transformers.AutoModelForCausalLM.from_pretrained(SHIPPED)
    nats, tokens, context = 0.0, 0, model.config.max_position_embeddings
    for document in documents:
        ids = torch.tensor([tokenizer.bos_token_id, *tokenizer(document, verbose=False)["input_ids"]])
        for start in range(0, len(ids) - 1, context):
            window = ids[None, start : start + context + 1]
            with torch.inference_mode():
                nats += model(window, labels=window).loss.item() * (window.shape[1] - 1)
            tokens += window.shape[1] - 1
    assert tokens == expected["tokens"]
    assert nats / tokens == pytest.approx(expected["nats_per_token"], rel=1e-4)
    size = sum(len(document.encode()) for document in documents)
    assert nats / math.log(2) / size == pytest.approx(expected["bits_per_byte"], rel=1e-4)


def test_the_model_uses_its_context():
    """At least one nat under the best that any model without context could do on the same tokens."""
    assert RECIPE["held_out"]["nats_per_token"] < RECIPE["unigram"]["entropy"] - 1
    assert RECIPE["unigram"]["entropy"] < RECIPE["unigram"]["loss"] < math.log(RECIPE["config"]["model"]["vocab_size"])


@pytest.mark.parametrize("text", STRINGS)
def test_the_packaged_tokenizer_gives_every_text_back(text, tokenizer):
    from tokenizers import Tokenizer

    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    assert ids == Tokenizer.from_file(str(SHIPPED / "tokenizer.json")).encode(text).ids
    assert max(ids, default=0) < RECIPE["config"]["model"]["vocab_size"] == len(tokenizer)


def test_the_special_token_begins_and_ends_documents(tokenizer):
    config = json.loads((SHIPPED / "config.json").read_text(encoding="utf-8"))
    assert tokenizer.convert_ids_to_tokens(0) == tokenizer.bos_token == tokenizer.eos_token == "<|endoftext|>"
    assert config["bos_token_id"] == config["eos_token_id"] == tokenizer.eos_token_id == 0


TINY = TrainConfig(
    model=LlamaConfig(
        vocab_size=270,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        max_position_embeddings=16,
    ),
    steps=6,
    batch_size=2,
    checkpoint_every=2,
)
TRAINING = ["the cat sat on the mat and the dog sat on the cat\n" * 4, "a dog and a cat and a mat\n" * 4]
HELD_OUT = ["the dog sat on a mat\n" * 2, "é", "a cat"]


def test_a_stopped_build_goes_on_and_writes_the_same_folder(tmp_path):
    def stop(step: int, loss: float) -> None:
        if step == 5:
            raise KeyboardInterrupt

    whole = build(tmp_path / "whole", config=TINY, training=TRAINING, held_out=HELD_OUT)
    with pytest.raises(KeyboardInterrupt):
        build(tmp_path / "stopped", config=TINY, training=TRAINING, held_out=HELD_OUT, progress=stop)
    resumed = build(tmp_path / "stopped", config=TINY, training=TRAINING, held_out=HELD_OUT)
    for recipe in (whole, resumed):
        assert recipe.pop("wall_seconds") >= 0
    assert resumed == whole
    assert whole["tokens_seen"] == 6 * 2 * 16
    assert whole["text"]["bytes"] == 4 * 50 + 4 * 26
    names = sorted(path.name for path in (tmp_path / "whole").iterdir())
    assert names == sorted(path.name for path in SHIPPED.iterdir())
    for name in set(names) - {"recipe.json"}:
        assert (tmp_path / "whole" / name).read_bytes() == (tmp_path / "stopped" / name).read_bytes(), name


def test_a_model_that_knows_nothing_costs_the_logarithm_of_the_vocabulary():
    tokenizer = train_tokenizer(TRAINING, vocab_size=270)
    model = Llama(TINY.model)
    torch.nn.init.zeros_(model.model.embed_tokens.weight)
    result = measure(model, tokenizer, HELD_OUT)
    tokens = sum(len(tokenizer.encode(document).ids) for document in HELD_OUT)
    assert result["tokens"] == tokens > 16
    assert result["bytes"] == 2 * 21 + 2 + 5
    assert result["nats_per_token"] == pytest.approx(math.log(270), rel=1e-6)
    assert result["bits_per_byte"] == pytest.approx(tokens * math.log2(270) / 49, rel=1e-6)


def test_windows_are_scored_from_their_own_first_token():
    """A document of two windows costs what its halves cost, the second begun by the last token of the first."""
    tokenizer = train_tokenizer(TRAINING, vocab_size=270)
    model = Llama(TINY.model, generator=torch.Generator().manual_seed(3)).double()
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(30)
    ids = [0, *tokenizer.encode(HELD_OUT[0]).ids]
    assert 16 < len(ids) - 1 < 32
    expected = 0.0
    for window in (ids[:17], ids[16:]):
        log_prob = model.scores(model(torch.tensor([window[:-1]])))[0].log_softmax(-1)
        expected -= log_prob[range(len(window) - 1), window[1:]].sum().item()
    result = measure(model, tokenizer, HELD_OUT[:1])
    assert result["nats_per_token"] * result["tokens"] == pytest.approx(expected, rel=1e-5)


def test_unigram_baselines_by_hand():
    # Held out: 1 twice, 2 and 3 once. Training with one added to each: 3, 2, 4, 1 of 10 for 0 to 3.
    result = unigram(torch.tensor([0, 0, 1, 2, 2, 2]), [[0, 1, 2], [0, 1, 3]], vocab_size=4)
    assert result["entropy"] == pytest.approx(1.5 * math.log(2))
    assert result["loss"] == pytest.approx(-(2 * math.log(0.2) + math.log(0.4) + math.log(0.1)) / 4)


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [(KeyboardInterrupt(), 130, "same command goes on"), (InputError("not this run"), 2, "not this run")],
)
def test_the_command_says_what_stopped_it(error, code, said, *, monkeypatch, capsys, tmp_path):
    def fail(out, *, config, progress):
        assert config == replace(demonstration(), steps=7)
        raise error

    monkeypatch.setattr(module, "build", fail)
    threads = torch.get_num_threads()
    assert main(["--out", str(tmp_path), "--steps", "7", "--threads", str(threads)]) == code
    assert said in capsys.readouterr().err
