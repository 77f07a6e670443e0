"""Draws of `decoding.sample` beside transformers' processors with torch.multinomial, and both beside torch.logsumexp.

`python benchmarks/decoding.py` writes the sections `decoding` and `beam-step` of RESULTS.md (`--only decoding`: one);
without numba, or with `UNEMBED_FAST=0` in the environment, `decoding-plain` and `beam-step-plain`.
Times are medians of calls in turns in one process, ratios are within a round; draws are included. Scores are float32:
Zipf-like ones fall with the logarithm of a shuffled rank, flat ones are normal with standard deviation 0.01.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from _bench import in_turns, machine, median_ratio, write_section
from unembed import decoding
from unembed.decoding._compiled import kernels

VOCABULARIES, BATCHES = (50_257, 151_936, 262_144), (1, 8, 64)
SPREADS = ("Zipf-like", "flat")
Run = Callable[[], Any]


def scores_of(spread: str, batch: int, vocabulary: int) -> Tensor:
    """Scores of one kind, float32."""
    generator = torch.Generator().manual_seed(0)
    if spread == "flat":
        return 0.01 * torch.randn(batch, vocabulary, generator=generator)
    ranks = torch.rand(batch, vocabulary, generator=generator).argsort(-1) + 1
    return -ranks.double().log().float()


def _theirs(scores: Tensor, *warpers: Any) -> Tensor:
    """What transformers does at a step: its processors, softmax, multinomial."""
    ids = torch.zeros(len(scores), 1, dtype=torch.long)
    for warp in warpers:
        scores = warp(ids, scores)
    return torch.multinomial(torch.softmax(scores, -1), 1)


def _pairs() -> dict[str, tuple[dict[str, Any], list[Any]]]:
    """What is asked, of ours as options and of transformers as processors."""
    from transformers.generation import logits_process

    heat = logits_process.TemperatureLogitsWarper(0.8)
    top_k, top_p = logits_process.TopKLogitsWarper(50), logits_process.TopPLogitsWarper(0.9)
    min_p = logits_process.MinPLogitsWarper(0.1)
    return {
        "temperature": ({"temperature": 0.8}, [heat]),
        "temperature, top-k 50, top-p 0.9": ({"temperature": 0.8, "top_k": 50, "top_p": 0.9}, [heat, top_k, top_p]),
        "top-p 0.9": ({"top_p": 0.9}, [top_p]),
        "min-p 0.1": ({"min_p": 0.1}, [min_p]),
    }


def rows(rounds: int, vocabularies: tuple[int, ...], batches: tuple[int, ...]) -> list[str]:
    """One line for each size, spread and request."""
    found = []
    for vocabulary in vocabularies:
        for batch in batches:
            for spread in SPREADS:
                scores = scores_of(spread, batch, vocabulary)
                runs: dict[str, Run] = {"lse": functools.partial(torch.logsumexp, scores, -1)}
                for name, (options, warpers) in _pairs().items():
                    runs[f"ours {name}"] = functools.partial(decoding.sample, scores, **options)
                    runs[f"theirs {name}"] = functools.partial(_theirs, scores, *warpers)
                in_turns(runs, rounds=1)
                times = in_turns(runs, rounds=rounds)
                for name in _pairs():
                    own, other = f"ours {name}", f"theirs {name}"
                    cells = (
                        f"{vocabulary:,} x {batch}, {spread}",
                        name,
                        f"{1e3 * statistics.median(times['lse']):.3g} ms",
                        f"{1e3 * statistics.median(times[other]):.3g} ms",
                        f"{1e3 * statistics.median(times[own]):.3g} ms",
                        f"{median_ratio(times, other, own):.1f}",
                        f"{median_ratio(times, own, 'lse'):.2f}",
                    )
                    found.append("| " + " | ".join(cells) + " |")
                    print(found[-1], flush=True)
    return found


def _versions() -> str:
    from importlib.metadata import version

    fast = f"numba {version('numba')}" if kernels() is not None else "without numba"
    return f"{fast}, transformers {version('transformers')}"


def _fixed_model(vocabulary: int) -> Any:
    """A model of transformers that costs nothing: its scores were made before, and its cache stays empty."""
    import transformers

    bank = scores_of("Zipf-like", 64, vocabulary)[:, None]
    bank[..., 1] = -30.0  # the end, which nobody comes to

    made: dict[tuple[int, int], Any] = {}  # what a call gives, but for the cache

    class Fixed(transformers.LlamaForCausalLM):
        calls = 0

        def forward(self, input_ids: Tensor, past_key_values: Any = None, **_: Any) -> Any:
            self.calls += 1
            key = (7 * self.calls % 32, len(input_ids))
            if key not in made:
                logits = bank[key[0] : sum(key)]
                made[key] = transformers.modeling_outputs.CausalLMOutputWithPast(logits=logits)
            cache = transformers.DynamicCache() if past_key_values is None else past_key_values
            if made[key].past_key_values is not cache:
                made[key].past_key_values = cache
            return made[key]

    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = transformers.LlamaConfig(vocab_size=vocabulary, **sizes, bos_token_id=None, eos_token_id=1, pad_token_id=0)
    return Fixed(config).eval()


STEPS = 64


def beam_rows(rounds: int, vocabularies: tuple[int, ...], batches: tuple[int, ...]) -> list[str]:
    """One line for each size: a step of a search with 4 beams, the model's own time being nothing."""
    found = []
    for vocabulary in vocabularies:
        model = _fixed_model(vocabulary)
        for batch in batches:
            prompts = torch.full((batch, 2), 5)
            plain = {"max_new_tokens": STEPS, "do_sample": False, "num_beams": 4}
            runs: dict[str, Run] = {
                "theirs": functools.partial(model.generate, prompts, **plain),
                "ours": functools.partial(
                    decoding.generate,
                    model,
                    prompts,
                    strategy=decoding.Beam(4),
                    max_new_tokens=STEPS,
                ),
            }
            in_turns(runs, rounds=1)
            times = in_turns(runs, rounds=rounds)
            each = {name: 1e3 * statistics.median(values) / STEPS for name, values in times.items()}
            cells = (f"{vocabulary:,} x {batch} x 4", f"{each['theirs']:.3g} ms", f"{each['ours']:.3g} ms")
            found.append("| " + " | ".join((*cells, f"{median_ratio(times, 'theirs', 'ours'):.1f}")) + " |")
            print(found[-1], flush=True)
    return found


def main() -> None:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--only", choices=["decoding", "beam-step"])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=VOCABULARIES)
    parser.add_argument("--batches", type=int, nargs="+", default=BATCHES)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    kind, title = ("", "") if kernels() is not None else ("-plain", ", without numba")
    if options.only in (None, "decoding"):
        lines = [
            f"## Draws{title}\n\n`python benchmarks/decoding.py --only decoding`; {machine()},",
            f"{_versions()}; medians of {options.rounds} rounds in turns. Last two columns: transformers over ours,",
            "and ours over torch.logsumexp.\n",
            "| scores | asked | logsumexp | transformers | `decoding.sample` | times faster | over logsumexp |",
            "| --- | --- | --- | --- | --- | --- | --- |",
            *rows(options.rounds, tuple(options.vocabularies), tuple(options.batches)),
        ]
        write_section(f"decoding{kind}", "\n".join(lines))
    if options.only in (None, "beam-step"):
        lines = [
            f"## A step of beam search{title}\n\n`python benchmarks/decoding.py --only beam-step`; {machine()},",
            f"{_versions()}; medians of {options.rounds} searches of {STEPS} steps in turns, with a model",
            "that costs nothing.\n",
            "| scores | transformers | `Beam(4)` | times faster |",
            "| --- | --- | --- | --- |",
            *beam_rows(options.rounds, tuple(options.vocabularies), tuple(one for one in options.batches if one < 64)),
        ]
        write_section(f"beam-step{kind}", "\n".join(lines))


if __name__ == "__main__":
    main()
