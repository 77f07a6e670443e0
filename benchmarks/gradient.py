"""The destroyed fraction: ours, the published way (a V x V basis), and one pass of computing the scores.

The scores pass comes in two forms: as `hidden @ weight.T` in a loop, and into memory that is used again, which is the
fastest that this machine does.

`python benchmarks/gradient.py` writes the section `gradient` of RESULTS.md. Inputs are random: the time does not depend
on the values. Every run of ours starts from the weights, so the spectrum and the basis are paid for each time.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

from _bench import in_turns, machine, median_ratio, peak_megabytes, write_section
from unembed import heads
from unembed.diagnostics import Gradient, HeadGradient, LinearHead

WIDTH = 512
CHUNK = 1 << 25  # scores alive at once, the same for all


def inputs(vocab: int, tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Weights, hidden states and targets."""
    torch.manual_seed(0)
    return torch.randn(vocab, WIDTH) * 0.05, torch.randn(tokens, WIDTH) * 2, torch.randint(0, vocab, (tokens,))


def scores_pass(vocab: int, tokens: int) -> Callable[[], float]:
    """Scores of all tokens, a chunk alive at a time."""
    weight, hidden, _ = inputs(vocab, tokens)

    def run() -> float:
        return sum(float((part @ weight.T)[0, 0]) for part in hidden.split(max(1, CHUNK // vocab)))

    return run


def scores_pass_reused(vocab: int, tokens: int) -> Callable[[], float]:
    """The same into one piece of memory; fresh memory costs page faults."""
    weight, hidden, _ = inputs(vocab, tokens)
    rows = max(1, CHUNK // vocab)

    def run() -> float:
        room, total = torch.empty(rows, vocab), 0.0
        for part in hidden.split(rows):
            total += float(torch.mm(part, weight.T, out=room[: len(part)])[0, 0])
        return total

    return run


def ours(vocab: int, tokens: int) -> Callable[[], float]:
    """`Gradient`, both conventions, from the weights on."""
    weight, hidden, targets = inputs(vocab, tokens)

    def run() -> float:
        gradient = Gradient(LinearHead(weight))
        gradient.update(hidden, targets)
        return gradient.result().values["raw"]["destroyed"]

    return run


def published(vocab: int, tokens: int) -> Callable[[], float]:
    """Eq. 10 by its text: a full QR, the last V - D columns as a basis of the kernel, one convention.

    The tokens go through in chunks like ours; the published text does not say.
    """
    weight, hidden, targets = inputs(vocab, tokens)

    def run() -> float:
        kernel = torch.linalg.qr(weight, mode="complete").Q[:, WIDTH:]
        lost = total = 0.0
        rows = max(1, CHUNK // vocab)
        for part, target in zip(hidden.split(rows), targets.split(rows), strict=True):
            gradient = torch.softmax(part @ weight.T, -1)
            gradient[torch.arange(len(target)), target] -= 1
            lost += float((gradient @ kernel).double().square().sum())
            total += float(gradient.double().square().sum())
        return (lost / total) ** 0.5

    return run


def row(vocab: int, tokens: int, rounds: int, *, with_published: bool) -> str:
    """One line of the table."""
    makers = {"scores": scores_pass, "reused": scores_pass_reused, "ours": ours} | (
        {"published": published} if with_published else {}
    )
    runs = {name: maker(vocab, tokens) for name, maker in makers.items()}
    if with_published:
        assert abs(runs["ours"]() - runs["published"]()) < 1e-4
    times = in_turns(runs, rounds=rounds)
    peaks = {name: peak_megabytes(maker, vocab, tokens) for name, maker in makers.items()}
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    cells = [f"{vocab:,}", f"{tokens:,}", f"{medians['scores']:.2f}", f"{medians['reused']:.2f}"]
    for name in ("ours", "published"):
        if name in times:
            plain, reused = (median_ratio(times, name, base) for base in ("scores", "reused"))
            cells.append(f"{medians[name]:.2f} s, {plain:.2f} x, {reused:.2f} x, {peaks[name]:.0f} MB")
        else:
            cells.append(f"not run: the basis alone is {vocab**2 * 4 / 1e9:.0f} GB")
    return f"| {' | '.join(cells)} |"


def of_head(spec: str, vocab: int) -> Callable[[], float]:
    """`HeadGradient` of one more token."""
    torch.manual_seed(0)
    gradient = HeadGradient(heads.build(spec, WIDTH, vocab))

    def run() -> float:
        gradient.update(torch.randn(1, WIDTH), torch.randint(0, vocab, (1,)))
        return gradient.result().values["centred"]["kept"]

    return run


def heads_table(rounds: int) -> str:
    """Seconds and memory of one token's Jacobian."""
    rows = []
    for vocab in (4096, 50304):
        for spec in ("linear", "sigsoftmax", "mos:k=4", "mixtape"):
            run = of_head(spec, vocab)
            run()
            seconds = statistics.median(in_turns({spec: run}, rounds=rounds)[spec])
            rows.append(f"| {vocab:,} | {spec} | {seconds:.2f} s | {peak_megabytes(of_head, spec, vocab):.0f} MB |")
            print(rows[-1], flush=True)
    lines = [
        "## The same through the Jacobian of a head, a token",
        "",
        f"`python benchmarks/gradient.py --only heads`, D = {WIDTH}, float64; {machine()}.",
        f"Medians of {rounds} rounds; memory is what a token adds to the head and its copy in float64.",
        "",
        "| V | head | a token | memory added |",
        "|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def main() -> None:
    """Run all sizes and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["linear", "heads"])
    options = parser.parse_args()
    if options.only != "linear":
        write_section("gradient-heads", heads_table(options.rounds))
    if options.only == "heads":
        return
    sizes = [(4096, True), (16384, True), (50304, False), (262144, False)]
    rows = [row(vocab, options.tokens, options.rounds, with_published=fits) for vocab, fits in sizes]
    lines = [
        "## The destroyed fraction of the gradient",
        "",
        f"`python benchmarks/gradient.py`, D = {WIDTH}, float32; {machine()}.",
        f"Medians of {options.rounds} rounds in turns in one process; the two `x` are the median ratios to the two",
        "forms of the scores pass in the same round; memory is what the run adds to its inputs, in a fresh process.",
        "Ours starts from the weights: spectrum and basis are paid for each time, whatever the number of tokens.",
        "",
        "| V | tokens | scores pass, s | in used memory, s | ours, both conventions | published way, one convention |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    write_section("gradient", "\n".join(lines))


if __name__ == "__main__":
    main()
