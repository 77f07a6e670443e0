"""Heads that decode without all V scores: topk(50) and one draw, beside all log-probabilities and PyTorch.

`python benchmarks/head_decoding.py` writes the section `head-decoding` of RESULTS.md. Times are medians of runs in
turns in one process, ratios are within a round. The rival of a head is its own `log_prob` with torch.topk, or with
torch.multinomial of the probabilities. Scores of a choice have a deviation: 0.6 is a head as drawn, 3 one that is sure.
"""

from __future__ import annotations

import argparse
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch

from _bench import in_turns, machine, median_ratio, write_section
from unembed import heads

D, V, K = 512, 262_144, 50
BATCHES = (1, 8, 64)
SPREADS = (0.6, 3.0)
SPECS = (
    "hierarchical:tree=huffman",
    "hierarchical:tree=balanced",
    "hierarchical:tree=classes",
    "adaptive",
    "mos:k=4",
    "linear",
)
_LAST = ("weight", "class_weight", "clusters", "tails")  # the parameters that scores are made with
Run = Callable[[], Any]


def head_of(spec: str, spread: float, width: int = D, vocab: int = V) -> heads.Head:
    """A head whose scores have a deviation, for hidden states of deviation one."""
    torch.manual_seed(0)
    head = heads.build(spec, width, vocab)
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            parameter.normal_().div_(math.sqrt(parameter.shape[-1]))
            if name.split(".")[0] in _LAST:
                parameter.mul_(spread)
    return head


@torch.no_grad()
def runs_of(head: heads.Head, batch: int, k: int = K) -> dict[str, Run]:
    """What is measured, on one batch of hidden states."""
    hidden = torch.randn(batch, head.in_features, generator=torch.Generator().manual_seed(1))
    seeds, generator = torch.arange(batch), torch.Generator().manual_seed(2)

    @torch.no_grad()
    def largest() -> Any:
        return head.log_prob(hidden).topk(k)

    @torch.no_grad()
    def drawn() -> Any:
        return torch.multinomial(head.log_prob(hidden).exp(), 1, generator=generator)

    return {
        "topk": lambda: head.topk(hidden, k),
        "all, torch.topk": largest,
        "sample": lambda: head.sample(hidden, seeds=seeds),
        "all, multinomial": drawn,
    }


def table(rounds: int, specs: list[str]) -> list[str]:
    """A row for each head, deviation and batch."""
    rows = [
        "| head | deviation | batch | topk(50) | over all and torch.topk | sample | over all and multinomial |",
        "|---|---|---|---|---|---|---|",
    ]
    for spec in specs:
        for spread in SPREADS:
            head = head_of(spec, spread)
            for batch in BATCHES:
                runs = runs_of(head, batch)
                for run in runs.values():
                    run()
                times = in_turns(runs, rounds=rounds)
                cells = []
                for name, base in (("topk", "all, torch.topk"), ("sample", "all, multinomial")):
                    time = f"{1000 * statistics.median(times[name]):.1f} ms"
                    cells += [time, f"{median_ratio(times, name, base):.3f}"]
                rows.append(f"| {spec} | {spread} | {batch} | {' | '.join(cells)} |")
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Run the table and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", nargs="+", choices=SPECS, help="heads to run")
    options = parser.parse_args()
    about = (
        f"`python benchmarks/head_decoding.py`, D = {D}, V = {V:,}, float32; {machine()}. "
        f"Medians of {options.rounds} rounds in turns."
    )
    lines = table(options.rounds, options.only or list(SPECS))
    write_section("head-decoding", "\n".join(["## Heads that decode without all scores", "", about, "", *lines]))


if __name__ == "__main__":
    main()
