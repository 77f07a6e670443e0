"""The recipe of the demonstration model in the package; `python -m unembed.experiments.demonstration --out DIR`.

It trains a byte-level BPE tokenizer and a small Llama on the standard library's docstrings, and measures the result
on the language reference, which the training text shares no twelve words in a row with. Nothing is downloaded. A run
that was stopped goes on where it was.
"""

import argparse
import json
import math
import platform
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy

from unembed.experiments._text import docstring_documents, held_out_documents, text_sha256
from unembed.experiments._train import TrainConfig, TrainRun, train
from unembed.models._llama import Llama, LlamaConfig, save_llama
from unembed.results import InputError, write_whole

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_END_OF_TEXT = "<|endoftext|>"
_END_OF_TEXT_ID = 0
_EXCERPT_DOCUMENTS = 5
_AVERAGED_STEPS = 50


def demonstration() -> TrainConfig:
    """The run behind the folder in the package."""
    model = LlamaConfig(
        vocab_size=4096,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
    )
    return TrainConfig(model=model, steps=1800, batch_size=8, learning_rate=3e-3, warmup_steps=100)


def build(
    out: str | Path,
    *,
    config: TrainConfig | None = None,
    training: Sequence[str] | None = None,
    held_out: Sequence[str] | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> dict[str, object]:
    """Train tokenizer and model, measure them, and write a folder that transformers loads.

    Args:
        out: The folder. Checkpoints lie in its `checkpoint` until the end.
        config: The run; `demonstration()` when None.
        training: Documents to train on; the standard library's docstrings when None.
        held_out: Documents to measure on; the topics of the language reference when None.
        progress: Called after each step with the number of steps done and the loss in nats per token.

    Returns:
        What `recipe.json` holds.

    Raises:
        ImportError: If tokenizers is not installed.
        InputError: If `out` holds a checkpoint of another run.
        ValueError: If the training text is too short.
    """
    out = Path(out)
    config = demonstration() if config is None else config
    held_out = held_out_documents() if held_out is None else held_out
    training = docstring_documents(held_out=held_out) if training is None else training
    tokenizer = train_tokenizer(training, vocab_size=config.model.vocab_size)
    stream = torch.tensor([token for ids in _encode(tokenizer, training) for token in ids], dtype=torch.int32)
    run = train(config, stream, folder=out / "checkpoint", progress=progress)
    save_llama(run.model, out)
    _save_tokenizer(tokenizer, out, context=config.model.max_position_embeddings)
    recipe = {
        **_circumstances(config, run),
        "text": {
            "sha256": text_sha256(training),
            "documents": len(training),
            "bytes": _bytes(training),
            "tokens": len(stream),
        },
        "training_loss": sum(run.losses[-_AVERAGED_STEPS:]) / len(run.losses[-_AVERAGED_STEPS:]),
        "held_out": measure(run.model, tokenizer, held_out),
        "held_out_excerpt": measure(run.model, tokenizer, held_out[:_EXCERPT_DOCUMENTS]),
        "unigram": unigram(stream, _encode(tokenizer, held_out), vocab_size=config.model.vocab_size),
    }
    with write_whole(out / "recipe.json") as file:
        file.write(json.dumps(recipe, indent=2) + "\n")
    shutil.rmtree(out / "checkpoint")
    return recipe


def train_tokenizer(documents: Sequence[str], *, vocab_size: int) -> "Tokenizer":
    """A byte-level BPE tokenizer (Sennrich et al., 2016, arXiv:1508.07909) with one special token, whose id is 0.

    Raises:
        ImportError: If tokenizers is not installed.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError as error:
        raise ImportError('Training a tokenizer needs tokenizers: pip install "unembed[hf]"') from error
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[_END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


@torch.inference_mode()
def measure(model: Llama, tokenizer: "Tokenizer", documents: Sequence[str]) -> dict[str, object]:
    """The model's loss on documents, each read from an end-of-text token on in windows of the training length.

    Every token of the text is scored once and no other is, so bits per byte is the length of a lossless code.

    Returns:
        `sha256`, `documents`, `bytes`, `tokens` of the text, `nats_per_token` and `bits_per_byte`.
    """
    nats = 0.0
    tokens = 0
    for ids in _encode(tokenizer, documents):
        for start in range(0, len(ids) - 1, model.config.max_position_embeddings):
            window = torch.tensor(ids[start : start + model.config.max_position_embeddings + 1])
            scores = model.scores(model(window[None, :-1]))[0]
            nats += cross_entropy(scores.float(), window[1:], reduction="sum").item()
            tokens += len(window) - 1
    return {
        "sha256": text_sha256(documents),
        "documents": len(documents),
        "bytes": _bytes(documents),
        "tokens": tokens,
        "nats_per_token": nats / tokens,
        "bits_per_byte": nats / math.log(2) / _bytes(documents),
    }


def unigram(stream: Int[Tensor, " N"], held_out: Sequence[Sequence[int]], *, vocab_size: int) -> dict[str, float]:
    """Two baselines that know no context, in nats per held-out token.

    Returns:
        `entropy`: of the held-out frequencies, below which no unigram model can be. `loss`: of the training
        frequencies, each count plus one.
    """
    # The first id of each document is the end-of-text token, which is never scored.
    scored = torch.tensor([token for ids in held_out for token in ids[1:]])
    share = torch.bincount(scored, minlength=vocab_size).double() / len(scored)
    counts = torch.bincount(stream, minlength=vocab_size).double() + 1
    return {
        "entropy": -torch.special.xlogy(share, share).sum().item(),
        "loss": -(share * (counts / counts.sum()).log()).sum().item(),
    }


def _encode(tokenizer: "Tokenizer", documents: Sequence[str]) -> list[list[int]]:
    """The ids of each document after an end-of-text token."""
    return [[_END_OF_TEXT_ID, *encoding.ids] for encoding in tokenizer.encode_batch(list(documents))]


def _bytes(documents: Sequence[str]) -> int:
    return sum(len(document.encode("utf-8")) for document in documents)


def _circumstances(config: TrainConfig, run: TrainRun) -> dict[str, object]:
    """What was run, on what, and what it took."""
    return {
        "config": asdict(config),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "date": datetime.now(UTC).date().isoformat(),
        "wall_seconds": round(run.seconds, 1),
        "parameters": sum(parameter.numel() for parameter in run.model.parameters()),
        "tokens_seen": config.steps * config.batch_size * config.model.max_position_embeddings,
    }


def _save_tokenizer(tokenizer: "Tokenizer", out: Path, *, context: int) -> None:
    """Write the two files from which `AutoTokenizer.from_pretrained` makes the same tokenizer."""
    settings = {
        "bos_token": _END_OF_TEXT,
        "clean_up_tokenization_spaces": False,
        "eos_token": _END_OF_TEXT,
        "model_max_length": context,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    with write_whole(out / "tokenizer.json") as file:
        file.write(tokenizer.to_str() + "\n")
    with write_whole(out / "tokenizer_config.json") as file:
        file.write(json.dumps(settings, indent=2) + "\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the recipe from the command line; returns the exit code, 130 when interrupted."""
    parser = argparse.ArgumentParser(
        prog="python -m unembed.experiments.demonstration", description="Build the demonstration model."
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to write; a stopped run there goes on")
    parser.add_argument("--steps", type=int, help="fewer or more steps than the recipe's")
    parser.add_argument("--threads", type=int, default=1, help="threads of PyTorch (default: %(default)s)")
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    config = demonstration()
    if options.steps is not None:
        config = replace(config, steps=options.steps)

    def progress(step: int, loss: float) -> None:
        if step % 20 == 0 or step == config.steps:
            print(f"step {step:5d} of {config.steps}   loss {loss:.3f} nats per token", flush=True)

    try:
        recipe = build(options.out, config=config, progress=progress)
    except KeyboardInterrupt:
        print(f"interrupted; the same command goes on from {options.out / 'checkpoint'}", file=sys.stderr)
        return 130
    except InputError as error:
        print(error, file=sys.stderr)
        return 2
    for name in ("parameters", "tokens_seen", "wall_seconds", "training_loss", "held_out", "unigram"):
        print(f"{name}: {recipe[name]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
