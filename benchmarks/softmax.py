"""Sparsemax, entmax and the Entmax head's loss, beside torch.softmax, the package entmax 1.3 and our softmax loss.

`python benchmarks/softmax.py` writes the sections `entmax` and `entmax-loss` of RESULTS.md (`--only entmax` for one).
Times are medians of runs in turns in one process, ratios are within a round; memory is what a run adds to its input in
a fresh process. The rival comes with `pip install entmax==1.3`; without it the table says that it did not run.
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from _bench import in_turns, machine, median_ratio, peak_megabytes, write_section
from unembed import heads, losses, ops

SHAPE = (2048, 32768)
SPREADS = {"peaked, deviation 4": 4.0, "nearly flat, 0.01": 0.01}
Run = Callable[[], Any]


def _newton(x: Tensor) -> Tensor:
    """entmax15 by 12 steps of Newton's method, to be compiled: what one writes by hand."""
    half = (x - x.amax(1, keepdim=True)) / 2
    tau = torch.full_like(half[:, :1], -1.0)
    for _ in range(12):
        base = (half - tau).clamp(min=0)
        norm = torch.linalg.vector_norm(base, dim=1, keepdim=True)
        tau = tau + (norm - 1) * norm / base.sum(1, keepdim=True)
    return (half - tau).clamp(min=0).square()


_COMPILED = torch.compile(_newton)


def _rival(name: str, **options: Any) -> Callable[[Tensor], Tensor]:
    def call(x: Tensor) -> Tensor:
        import entmax

        return getattr(entmax, name)(x, dim=1, **options)

    return call


FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "torch.softmax": functools.partial(torch.softmax, dim=1),
    "ops.sparsemax": ops.sparsemax,
    "ops.entmax, 1.5": functools.partial(ops.entmax, alpha=1.5),
    "ops.entmax, 1.25": functools.partial(ops.entmax, alpha=1.25),
    "compiled Newton, 1.5": _COMPILED,
    "entmax 1.3 sparsemax": _rival("sparsemax"),
    "entmax 1.3 entmax15": _rival("entmax15"),
    "entmax 1.3 sparsemax, k=512": _rival("sparsemax", k=512),
    "entmax 1.3 entmax15, k=512": _rival("entmax15", k=512),
}


def contestant(name: str, spread: float, backward: bool, shape: tuple[int, int] = SHAPE) -> Run:
    """A run of one function on scores of a deviation, forward or with the gradient of a fixed upstream one."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*shape, generator=generator) * spread
    function = FUNCTIONS[name]
    if not backward:
        return lambda: function(x)
    x.requires_grad_()
    upstream = torch.randn(*shape, generator=generator)
    return lambda: torch.autograd.grad(function(x), x, upstream)


def _warm(name: str, spread: float, backward: bool) -> Run:
    """The same once its code is compiled and its libraries are loaded."""
    contestant(name, spread, backward, (4, 64))()
    run = contestant(name, spread, backward)
    if "compiled" in name:
        run()
    return run


def entmax_table(rounds: int, names: list[str]) -> list[str]:
    """A row for each function and each kind of scores."""
    rows = [
        "| scores | | forward | over softmax | forward and backward | over softmax | memory of both |",
        "|---|---|---|---|---|---|---|",
    ]
    for title, spread in SPREADS.items():
        found: dict[str, list[str]] = {name: [] for name in names}
        for backward in (False, True):
            runs = {name: contestant(name, spread, backward) for name in names}
            for run in runs.values():
                run()
            times = in_turns(runs, rounds=rounds)
            for name in names:
                ratio = median_ratio(times, name, "torch.softmax")
                found[name] += [f"{1000 * statistics.median(times[name]):.0f} ms", f"{ratio:.2f}"]
        for name in names:
            memory = peak_megabytes(_warm, name, spread, True)
            rows.append(f"| {title} | {name} | {' | '.join(found[name])} | {memory:.0f} MB |")
            print(rows[-1], flush=True)
    return rows


LOSS_SIZES = [((2048, 512, 32768), "fp32"), ((2048, 512, 32768), "bf16"), ((1024, 640, 262144), "fp32")]
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LOSSES = {
    "softmax, cross_entropy": ("linear", losses.cross_entropy),
    "entmax 1.5, fenchel_young": ("entmax:alpha=1.5", losses.fenchel_young),
    "sparsemax, fenchel_young": ("entmax:alpha=2.0", losses.fenchel_young),
    "entmax 1.2, fenchel_young": ("entmax:alpha=1.2", losses.fenchel_young),
}


class Step:
    """A training step of a head: loss and gradients of hidden states and matrix, scores of a deviation."""

    def __init__(self, name: str, size: tuple[int, int, int], dtype: str, spread: float) -> None:
        n, d, v = size
        spec, self._loss = LOSSES[name]
        torch.manual_seed(0)
        self._hidden = torch.randn(n, d).to(DTYPES[dtype]).requires_grad_()
        self._head = heads.build(spec, d, v, device="meta")
        self._head.weight = torch.nn.Parameter((torch.randn(v, d) * spread / d**0.5).to(DTYPES[dtype]))
        self._targets = torch.randint(0, v, (n,))

    def __call__(self) -> Tensor:
        """Gradients made anew."""
        self._hidden.grad = self._head.weight.grad = None
        loss = self._loss(self._head, self._hidden, self._targets)
        loss.backward()
        return loss.detach()


def _warm_step(name: str, size: tuple[int, int, int], dtype: str, spread: float) -> Run:
    Step(name, (8, size[1], 64), dtype, spread)()
    return Step(name, size, dtype, spread)


def loss_table(rounds: int, _names: list[str]) -> list[str]:
    """A row for each size, kind of scores and head."""
    rows = ["| N, D, V | scores | | time | over cross_entropy | memory added |", "|---|---|---|---|---|---|"]
    for size, dtype in LOSS_SIZES:
        for spread in (0.6, 4.0):  # a head as drawn, and one that has learnt to be sure
            runs: dict[str, Run] = {name: Step(name, size, dtype, spread) for name in LOSSES}
            for run in runs.values():
                run()
            times = in_turns(runs, rounds=rounds)
            for name in LOSSES:
                ratio = median_ratio(times, name, "softmax, cross_entropy")
                memory = peak_megabytes(_warm_step, name, size, dtype, spread)
                cells = f"{statistics.median(times[name]):.2f} s | {ratio:.2f} | {memory:.0f} MB"
                rows.append(f"| {size} {dtype} | deviation {spread} | {name} | {cells} |")
                print(rows[-1], flush=True)
    return rows


def main() -> None:
    """Run all tables and write them."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", choices=["entmax", "entmax-loss"])
    parser.add_argument("--skip", nargs="+", default=[], choices=FUNCTIONS, help="functions not to run")
    options = parser.parse_args()
    names, note = [name for name in FUNCTIONS if name not in options.skip], ""
    if options.skip:
        note = f" Not run: {', '.join(options.skip)}."
    try:
        import entmax  # noqa: F401
    except ImportError:
        names = [name for name in names if not name.startswith("entmax 1.3")]
        note += " entmax 1.3 is not installed."
    tables = {
        "entmax": (f"Sparsemax and entmax of scores {SHAPE}, float32", entmax_table),
        "entmax-loss": ("The loss of the Entmax head: forward and all gradients", loss_table),
    }
    for name, (title, make) in tables.items():
        if options.only not in (None, name):
            continue
        about = f"`python benchmarks/softmax.py`; {machine()}. Medians of {options.rounds} rounds in turns.{note}"
        write_section(name, "\n".join([f"## {title}", "", about, "", *make(options.rounds, names)]))


if __name__ == "__main__":
    main()
