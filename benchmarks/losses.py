"""Losses forward and backward: ours, PyTorch's, and the floor of three matrix products of the same shapes.

`python benchmarks/losses.py` writes the section `losses` of RESULTS.md (`--only linear` and so on for one table).
Times are CPU seconds' ratios within a round, of runs in turns in one process; memory is what a run adds to its inputs
in a fresh process, gradients included. Errors are against float64.

cut-cross-entropy has no path of its own on a CPU: it takes `torch.compile` of the materialised form there (its
`torch_compile.py`), and imports Triton before it gets so far. That contestant stands for it.
"""

from __future__ import annotations

import argparse
import functools
import heapq
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from _bench import in_turns, machine, median_ratio, peak_megabytes, write_section
from unembed import heads, losses, ops

F = torch.nn.functional
SIZES = [(2048, 512, 32768), (2048, 768, 50304), (1024, 640, 262144)]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
Run = Callable[[], Tensor]


def inputs(n: int, d: int, v: int, dtype: str) -> tuple[Tensor, torch.nn.Parameter, Tensor]:
    """Hidden states, weights and targets; scores have a deviation of about 2."""
    torch.manual_seed(0)
    hidden = torch.randn(n, d).to(DTYPES[dtype]).requires_grad_()
    weight = torch.nn.Parameter((torch.randn(v, d) * 2 / d**0.5).to(DTYPES[dtype]))
    return hidden, weight, torch.randint(0, v, (n,))


def floor(n: int, d: int, v: int, dtype: str) -> Run:
    """The three products that any exact way must make, and nothing else."""
    hidden, weight, _ = (tensor.detach() for tensor in inputs(n, d, v, dtype))
    scores = hidden @ weight.T

    def run() -> Tensor:
        torch.mm(hidden, weight.T, out=scores)
        return (scores @ weight)[0, 0] + (scores.T @ hidden)[0, 0]

    return run


class Step:
    """A contestant's loss and gradients of hidden states and weight; called, it is one step of training."""

    def __init__(self, loss_of: Callable[..., Tensor], n: int, d: int, v: int, dtype: str) -> None:
        self._loss_of = loss_of
        self.hidden, self.weight, self._targets = inputs(n, d, v, dtype)

    def __call__(self) -> Tensor:
        """Gradients made anew."""
        self.hidden.grad = self.weight.grad = None
        loss = self._loss_of(self.hidden, self.weight, self._targets)
        loss.backward()
        return loss.detach()


def _step(loss_of: Callable[..., Tensor]) -> Callable[..., Step]:
    return functools.partial(Step, loss_of)


def _materialised(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight), targets)


def _compiled(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return _COMPILED(hidden, weight, targets)


def _torch_chunked(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, targets, options=options)


def _torch_chunked_512(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    options = torch.nn.LinearCrossEntropyOptions(batch_chunk_size=512)
    return F.linear_cross_entropy(hidden, weight, targets, options=options)


def _plain_loop(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """A loop over chunks under a checkpoint: what one writes by hand."""
    parts = [
        torch.utils.checkpoint.checkpoint(_chunk_sum, h, weight, t, use_reentrant=False)
        for h, t in zip(hidden.split(256), targets.split(256), strict=True)
    ]
    return torch.stack(parts).sum() / len(targets)


def _chunk_sum(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(hidden, weight).float(), targets, reduction="sum")


def _ours(hidden: Tensor, weight: torch.nn.Parameter, targets: Tensor) -> Tensor:
    head = heads.Linear(weight.shape[1], weight.shape[0], device="meta")
    head.weight = weight  # as a head is tied
    return losses.cross_entropy(head, hidden, targets)


def _ours_per_token(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    return (ops.linear_nll(hidden, weight, targets) * _UPSTREAM[: len(targets)]).sum()


_COMPILED = torch.compile(_materialised)
_UPSTREAM = torch.rand(4096, generator=torch.Generator().manual_seed(3)) / 1024
CONTESTANTS: dict[str, Callable[..., Run]] = {
    "floor: three products": floor,
    "materialised": _step(_materialised),
    "torch.compile of it (and cut-cross-entropy)": _step(_compiled),
    "torch chunked, default": _step(_torch_chunked),
    "torch chunked, 512": _step(_torch_chunked_512),
    "loop of 256 by hand": _step(_plain_loop),
    "unembed cross_entropy": _step(_ours),
    "unembed linear_nll per token": _step(_ours_per_token),
}


def errors(run: Step, upstream: Tensor, size: tuple[int, int, int], dtype: str) -> str:
    """Relative errors of the loss and of both gradients against float64, `upstream` being the weight of each token."""
    hidden, weight, targets = inputs(*size, dtype)
    loss = run()
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight)]
    exact = torch.zeros((), dtype=torch.float64)
    for h, t, u in zip(wide[0].split(128), targets.split(128), upstream.double().split(128), strict=True):
        part = F.cross_entropy(F.linear(h, wide[1]), t, reduction="none") @ u
        part.backward(retain_graph=True)
        exact += part.detach()
    gaps = [
        float((mine.grad.double() - right.grad).norm() / right.grad.norm())
        for mine, right in zip((run.hidden, run.weight), wide, strict=True)
    ]
    return f"{abs(float(loss) - float(exact)) / float(exact):.0e}, {gaps[0]:.1e}, {gaps[1]:.1e}"


def linear_table(rounds: int, size: tuple[int, int, int], skip: list[str]) -> list[str]:
    """One row a contestant, for every dtype."""
    rows = []
    contestants = {name: make for name, make in CONTESTANTS.items() if name not in skip}
    for dtype in DTYPES:
        runs = {name: make(*size, dtype) for name, make in contestants.items()}
        for run in runs.values():
            run()
        times = in_turns(runs, rounds=rounds)
        for name, make in contestants.items():
            ratio = median_ratio(times, name, "floor: three products")
            memory = "" if make is floor else f"{peak_megabytes(_warm, name, *size, dtype):.0f} MB"
            run = runs[name]
            upstream = _UPSTREAM[: size[0]] if "per token" in name else torch.full((size[0],), 1 / size[0])
            exact = size == SIZES[0] and isinstance(run, Step)
            error = errors(run, upstream, size, dtype) if exact else ""
            rows.append(
                f"| {dtype} | {name} | {statistics.median(times[name]):.2f} s | {ratio:.2f} | {memory} | {error} |"
            )
            print(rows[-1], flush=True)
    head = ["| dtype | | time | over the floor | memory added | errors: loss, dH, dW |", "|---|---|---|---|---|---|"]
    missing = ["", f"Not run: {', '.join(skip)}."] if skip else []
    return [*head, *rows, *missing]


def _warm(name: str, n: int, d: int, v: int, dtype: str) -> Run:
    """A contestant whose code is compiled and whose libraries are loaded, on a tiny input of the same dtype."""
    CONTESTANTS[name](8, d, 64, dtype)()
    run = CONTESTANTS[name](n, d, v, dtype)
    if "compile" in name:
        run()
    return run


def _mixture(kind: str) -> Callable[[int, int, int], Run]:
    def make(n: int, d: int, v: int) -> Run:
        torch.manual_seed(0)
        hidden, targets = torch.randn(n, d).requires_grad_(), torch.randint(0, v, (n,))
        head = heads.Linear(d, v) if kind in ("linear", "plain") else heads.MixtureOfSoftmaxes(d, v, k=4)

        def run() -> Tensor:
            hidden.grad = None
            head.zero_grad()
            if kind == "plain":
                loss = F.cross_entropy(head(hidden), targets)
            elif kind == "naive":
                loss = F.nll_loss(head.log_prob(hidden), targets)
            else:
                loss = losses.cross_entropy(head, hidden, targets)
            loss.backward()
            return loss.detach()

        return run

    return make


MIXTURES = {
    "linear, materialised": "plain",
    "linear, ours": "linear",
    "mixture, naive": "naive",
    "mixture, ours": "ours",
}


def _mixture_named(name: str, n: int, d: int, v: int) -> Run:
    return _mixture(MIXTURES[name])(n, d, v)


def mixture_table(rounds: int) -> list[str]:
    """K = 4 over one matrix, N = 512 and 2,048."""
    rows = []
    for size in ((512, 512, 50304), (2048, 512, 32768)):
        runs = {name: _mixture_named(name, *size) for name in MIXTURES if (name, size[0]) != ("mixture, naive", 2048)}
        for run in runs.values():
            run()
        times = in_turns(runs, rounds=rounds)
        for name in runs:
            ratio = median_ratio(times, name, "linear, ours")
            memory = peak_megabytes(_mixture_named, name, *size)
            rows.append(f"| {size} | {name} | {statistics.median(times[name]):.2f} s | {ratio:.2f} | {memory:.0f} MB |")
            print(rows[-1], flush=True)
    return ["| N, D, V | K = 4 | time | over our linear loss | memory added |", "|---|---|---|---|---|", *rows]


class _NaiveTree(torch.nn.Module):
    """A Huffman tree as one writes it by hand: paths padded to the longest, the rows of their nodes gathered."""

    def __init__(self, d: int, counts: list[float]) -> None:
        super().__init__()
        heap = [(count, token) for token, count in enumerate(counts)]
        heapq.heapify(heap)
        above: dict[int, tuple[int, float]] = {}
        for node in range(len(counts), 2 * len(counts) - 1):
            children = [heapq.heappop(heap) for _ in range(2)]
            for (_, child), sign in zip(children, (1.0, -1.0), strict=True):
                above[child] = (node, sign)
            heapq.heappush(heap, (children[0][0] + children[1][0], node))
        paths = [_path(above, token) for token in range(len(counts))]
        longest = max(map(len, paths))
        padded = [path + [(len(counts), 0.0)] * (longest - len(path)) for path in paths]
        self.nodes = torch.tensor([[node - len(counts) for node, _ in path] for path in padded])
        self.signs = torch.tensor([[sign for _, sign in path] for path in padded])
        self.weight = torch.nn.Parameter(torch.randn(len(counts) - 1, d) / d**0.5)

    def forward(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Mean loss."""
        signs = self.signs[targets]
        scores = torch.einsum("nd,nld->nl", hidden, self.weight[self.nodes[targets]]) * signs
        return -(F.logsigmoid(scores) * (signs != 0)).sum(-1).mean()


def _path(above: dict[int, tuple[int, float]], token: int) -> list[tuple[int, float]]:
    path, at = [], token
    while at in above:
        path.append(above[at])
        at = above[at][0]
    return path


def _structured(name: str, n: int, d: int, v: int) -> Run:
    torch.manual_seed(0)
    hidden = torch.randn(n, d).requires_grad_()
    weights = 1 / torch.arange(1, v + 1.0)
    targets = torch.multinomial(weights, n, replacement=True)
    cutoffs = [v // 20, v // 5]
    if name == "torch adaptive":
        module: Any = torch.nn.AdaptiveLogSoftmaxWithLoss(d, v, cutoffs)
    elif name == "adaptive":
        module = heads.AdaptiveSoftmax(d, v, cutoffs=tuple(cutoffs))
    elif name == "linear, materialised":
        module = heads.Linear(d, v)
    elif name == "huffman, naive":
        module = _NaiveTree(d, weights.tolist())
    else:
        module = heads.HierarchicalSoftmax(d, v, counts=(weights * 1e9).long())

    def run() -> Tensor:
        hidden.grad = None
        module.zero_grad()
        if name == "torch adaptive":
            loss = module(hidden, targets).loss
        elif name == "huffman, naive":
            loss = module(hidden, targets)
        elif name == "linear, materialised":
            loss = F.cross_entropy(module(hidden), targets)
        else:
            loss = losses.cross_entropy(module, hidden, targets)
        loss.backward()
        return loss.detach()

    return run


def structured_table(rounds: int) -> list[str]:
    """Adaptive and Huffman on Zipf targets."""
    rows = []
    for size in ((2048, 512, 50304), (2048, 512, 262144)):
        names = ["linear, materialised", "torch adaptive", "adaptive", "huffman, naive", "huffman"]
        runs = {name: _structured(name, *size) for name in names if (name, size[2]) != (names[0], 262144)}
        for run in runs.values():
            run()
        times = in_turns(runs, rounds=rounds)
        for name in runs:
            full = f"{median_ratio(times, name, names[0]):.3f}" if names[0] in runs else ""
            adaptive = f"{median_ratio(times, name, 'torch adaptive'):.2f}"
            memory = peak_megabytes(_structured, name, *size)
            rows.append(
                f"| {size} | {name} | {statistics.median(times[name]) * 1e3:.0f} ms | {full} | {adaptive} "
                f"| {memory:.0f} MB |"
            )
            print(rows[-1], flush=True)
    head = [
        "| N, D, V | | time | over the full loss | over torch's adaptive | memory added |",
        "|---|---|---|---|---|---|",
    ]
    return [*head, *rows]


def _statistics(name: str, n: int, d: int, v: int) -> Run:
    """Log-probability, entropy and KL to a frozen reference with the same matrix, and the gradients of all three."""
    hidden, weight, targets = inputs(n, d, v, "fp32")
    reference = hidden.detach() + 0.1 * torch.randn(n, d)

    def materialised() -> list[Tensor]:
        log_p = torch.log_softmax(hidden @ weight.T, -1)
        log_q = torch.log_softmax(reference @ weight.detach().T, -1)
        p = log_p.exp()
        own = log_p.gather(1, targets[:, None])
        return [own, -(p * log_p).sum(-1), (p * (log_p - log_q)).sum(-1)]

    def ours() -> list[Tensor]:
        options = {"reference_hidden": reference, "reference_weight": weight.detach()}
        found = ops.token_statistics(hidden, weight, targets, **options)
        return [found.log_prob, found.entropy, found.kl]

    def run() -> Tensor:
        hidden.grad = weight.grad = None
        loss = sum(part.mean() for part in (materialised() if name == "materialised" else ours()))
        loss.backward()
        return loss.detach()

    return run


def statistics_table(rounds: int) -> list[str]:
    """What reinforcement and preference learning ask of a head."""
    size, rows = SIZES[0], []
    runs = {name: _statistics(name, *size) for name in ("materialised", "ops.token_statistics")}
    for run in runs.values():
        run()
    runs["floor: three products"] = floor(*size, "fp32")
    times = in_turns(runs, rounds=rounds)
    for name in ("materialised", "ops.token_statistics"):
        ratio = median_ratio(times, name, "floor: three products")
        memory = peak_megabytes(_statistics, name, *size)
        rows.append(f"| {size} | {name} | {statistics.median(times[name]):.2f} s | {ratio:.2f} | {memory:.0f} MB |")
        print(rows[-1], flush=True)
    return [
        "| N, D, V | fp32 | time | over the floor | memory added |",
        "|---|---|---|---|---|",
        *rows,
    ]


def main() -> None:
    """Run all tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["linear", "mixture", "structured", "statistics"])
    parser.add_argument("--sizes", type=int, nargs="+", default=[1, 2, 3], help="which sizes of the linear table")
    parser.add_argument("--skip", nargs="+", default=[], choices=CONTESTANTS, help="contestants of the linear table")
    options = parser.parse_args()
    tables = {
        "mixture": ("Mixture of softmaxes: loss and all gradients", mixture_table),
        "structured": ("Adaptive and Huffman heads: loss and all gradients, targets by Zipf's law", structured_table),
        "statistics": ("Log-probability, entropy, KL to a reference and argmax, and gradients", statistics_table),
    }
    for number in options.sizes:
        size = SIZES[number - 1]
        title = f"Linear head: loss and both gradients, N, D, V = {size}"
        tables[f"linear-{number}"] = (title, functools.partial(linear_table, size=size, skip=options.skip))
    for name, (title, make) in tables.items():
        if options.only not in (None, name.partition("-")[0]):
            continue
        about = f"`python benchmarks/losses.py`; {machine()}. Medians of {options.rounds} rounds in turns."
        write_section(f"losses-{name}", "\n".join([f"## {title}", "", about, "", *make(options.rounds)]))


if __name__ == "__main__":
    main()
