r"""Attention: ours, PyTorch's kernel and softmax(Q K^T) V; linear attention and where it overtakes; how near maps come.

`python benchmarks/attention.py` writes the sections `attention` and `linear-attention` of RESULTS.md, and the table of
the study into docs/linear-attention.md. `--only softmax,linear,study` picks tables. `--quick` runs tiny sizes, to see
that the script works, and writes nothing of the study. The study is no timing: it does not depend on the machine.
"""

from __future__ import annotations

import argparse
import functools
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from _bench import in_turns, machine, median_ratio, peak_megabytes, write_section
from unembed.ops._attention import attention
from unembed.ops._feature_maps import Favor, FeatureMap, build_map
from unembed.ops._linear_attention import linear_attention

DOCS = Path(__file__).parents[1] / "docs" / "linear-attention.md"
HEADS, WIDTH, FAVOR_FEATURES = 8, 64, 256
STUDIED = ("elu", "relu", "exp", "polynomial", "taylor", "favor")


def naive(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """As the formula reads."""
    return torch.softmax(query @ key.mT / math.sqrt(WIDTH), -1) @ value


def a_map(name: str, width: int, seed: int = 0) -> FeatureMap:
    """The map of that name; random features get a seed."""
    return Favor(width, FAVOR_FEATURES, seed=seed) if name == "favor" else build_map(name)


def function_of(name: str, causal: bool) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """What the tables call `name`."""
    if name == "naive":
        return naive
    if name == "sdpa":
        return functools.partial(scaled_dot_product_attention, is_causal=causal)
    if name == "ours":
        return functools.partial(attention, causal=causal)
    return functools.partial(linear_attention, feature_map=a_map(name, WIDTH), causal=causal)


def call(name: str, length: int, backward: bool, causal: bool) -> Callable[[], None]:
    """One call on inputs of that length, with the gradients of all three if `backward`."""
    torch.manual_seed(0)
    inputs = [torch.randn(1, HEADS, length, WIDTH, requires_grad=backward) for _ in range(3)]
    function = function_of(name, causal)

    def run() -> None:
        out = function(*inputs)
        if backward:
            torch.autograd.grad(out.sum(), inputs)

    return run


def measured(
    names: list[str], length: int, *, backward: bool, causal: bool, rounds: int
) -> tuple[dict[str, list[float]], dict[str, float]]:
    """Seconds in turns after a warm-up call of each, and megabytes in fresh processes."""
    runs = {name: call(name, length, backward, causal) for name in names}
    in_turns(runs, rounds=1)
    times = in_turns(runs, rounds=rounds)
    return times, {name: peak_megabytes(call, name, length, backward, causal) for name in names}


def softmax_table(lengths: list[int], rounds: int) -> str:
    """`attention` beside PyTorch's kernel called directly, and the formula."""
    rows = []
    for length in lengths:
        for backward in (False, True):
            times, peaks = measured(["ours", "sdpa", "naive"], length, backward=backward, causal=False, rounds=rounds)
            cells = [f"{length:,}", "forward and backward" if backward else "forward"]
            for name in times:
                ratio = "" if name == "sdpa" else f", {median_ratio(times, name, 'sdpa'):.2f} x"
                cells.append(f"{statistics.median(times[name]) * 1e3:.2f} ms{ratio}, {peaks[name]:.0f} MB")
            rows.append(f"| {' | '.join(cells)} |")
            print(rows[-1], flush=True)
    lines = [
        "## Attention",
        "",
        f"`python benchmarks/attention.py --only softmax`, B x H = {HEADS}, E = {WIDTH}, float32; {machine()}.",
        f"Medians of {rounds} rounds in turns; `x` is the median ratio to PyTorch's kernel in the same round; memory",
        "is what a call adds to its inputs, in a fresh process.",
        "",
        "| L = S | | `attention` | PyTorch's kernel | softmax(Q K^T) V |",
        "|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def crossover(ratios: dict[int, float]) -> str:
    """The length from which on the ratio stays below 1, between two measured ones on a log scale."""
    lengths = sorted(ratios)
    slow = [length for length in lengths if ratios[length] >= 1]
    if not slow:
        return f"below {lengths[0]:,}"
    if slow[-1] == lengths[-1]:
        return f"beyond {lengths[-1]:,}"
    low, high = slow[-1], lengths[lengths.index(slow[-1]) + 1]
    before, after = math.log(ratios[low]), math.log(ratios[high])
    share = before / (before - after)
    return f"{math.exp(math.log(low) + share * (math.log(high) - math.log(low))):,.0f}"


def linear_table(lengths: list[int], maps_at: int, rounds: int) -> str:
    """Linear attention over PyTorch's kernel at each length, and the other maps at one."""
    rows, found = [], {}
    for causal in (False, True):
        for backward in (False, True):
            ratios = {}
            what = f"{'causal' if causal else 'all keys'}, {'forward and backward' if backward else 'forward'}"
            for length in lengths:
                names = ["elu", "sdpa"] + ([n for n in STUDIED if n != "elu"] if length == maps_at else [])
                times, peaks = measured(names, length, backward=backward, causal=causal, rounds=rounds)
                ratios[length] = median_ratio(times, "elu", "sdpa")
                for name in names:
                    ratio = f"{median_ratio(times, name, 'sdpa'):.2f} x"
                    median = statistics.median(times[name]) * 1e3
                    rows.append(f"| {what} | {length:,} | {name} | {median:.2f} ms | {ratio} | {peaks[name]:.0f} MB |")
                    print(rows[-1], flush=True)
            found[what] = crossover(ratios)
    lines = [
        "## Linear attention",
        "",
        f"`python benchmarks/attention.py --only linear`, B x H = {HEADS}, E = {WIDTH}, float32, {FAVOR_FEATURES}",
        f"random features for favor; {machine()}. Medians of {rounds} rounds in turns; `x` is the median ratio to",
        "PyTorch's softmax kernel (sdpa) in the same round. What the maps get wrong: docs/linear-attention.md.",
        "",
        "Length from which on elu is faster than sdpa, between measured lengths on a log scale: "
        + "; ".join(f"{what}: {length}" for what, length in found.items())
        + ".",
        "",
        "| | L = S | map | time | over sdpa | memory added |",
        "|---|---|---|---|---|---|",
        *rows,
    ]
    return "\n".join(lines)


def weights_of(name: str, query: Tensor, key: Tensor, seed: int) -> Tensor:
    """Rows of weights, each with sum 1, in float64."""
    width = query.shape[-1]
    if name == "uniform":
        return torch.full((len(query), len(key)), 1 / len(key), dtype=torch.float64)
    if name == "softmax":
        return torch.softmax(query @ key.T / math.sqrt(width), -1)
    kind = a_map(name, width, seed)
    scale = kind.check(width, None)
    queries, keys = kind(query, scale), kind(key, scale)
    if kind.exponential:
        queries, keys = (queries - queries.amax(-1, keepdim=True)).exp(), (keys - keys.max()).exp()
    weights = queries @ keys.T
    total = weights.sum(-1, keepdim=True)
    return torch.where(total == 0, 0.0, weights / total)  # relu: a query that sees nothing gives zeros, as the op does


def errors(length: int, width: int, seed: int) -> dict[str, tuple[float, float]]:
    """Relative error of the output and mean total variation of the rows, each map against softmax."""
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(length, width, generator=generator, dtype=torch.float64) for _ in range(3))
    right = weights_of("softmax", query, key, seed)
    found = {}
    for name in (*STUDIED, "uniform"):
        weights = weights_of(name, query, key, seed)
        error = torch.linalg.norm((weights - right) @ value) / torch.linalg.norm(right @ value)
        found[name] = float(error), float((weights - right).abs().sum(-1).mean() / 2)
    return found


def study_table(lengths: list[int], widths: list[int], seeds: int) -> str:
    """Errors of the maps on normal queries and keys, with the null: the mean of the values."""

    def cell(values: list[float]) -> str:
        low, middle, high = torch.tensor(values).quantile(torch.tensor([0.025, 0.5, 0.975])).tolist()
        return f"{middle:.3f} ({low:.3f} to {high:.3f})"

    tables: dict[str, list[str]] = {"output": [], "weights": []}
    for width in widths:
        for length in lengths:
            drawn = [errors(length, width, seed) for seed in range(seeds)]
            for measure, (title, rows) in enumerate(tables.items()):
                cells = [cell([one[name][measure] for one in drawn]) for name in (*STUDIED, "uniform")]
                rows.append(f"| {title} | {width} | {length:,} | {' | '.join(cells)} |")
                print(rows[-1], flush=True)
    names = " | ".join((*STUDIED, "null: uniform"))
    lines = [
        "`python benchmarks/attention.py --only study`, float64; queries, keys and values standard normal,",
        f"{seeds} seeds: median (95 % range over seeds). `favor` has {FAVOR_FEATURES} orthogonal features, drawn",
        "anew with each seed.",
        "",
        f"| error of | E | L = S | {names} |",
        f"|{'---|' * (4 + len(STUDIED))}",
        *tables["output"],
        *tables["weights"],
    ]
    return "\n".join(lines)


def _show(_name: str, table: str) -> None:
    """A table of tiny sizes is not for the results."""
    print(table)


def main() -> None:
    """Write the tables asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="softmax,linear,study", help="tables, with commas between")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--quick", action="store_true", help="tiny sizes")
    options = parser.parse_args()
    tables = options.only.split(",")
    if unknown := set(tables) - {"softmax", "linear", "study"}:
        parser.error(f"--only takes softmax, linear and study, got {', '.join(sorted(unknown))}")
    keep = _show if options.quick else write_section
    rounds, seeds = (2, 3) if options.quick else (options.rounds, options.seeds)
    if "softmax" in tables:
        keep("attention", softmax_table([32, 64] if options.quick else [256, 1024, 4096], rounds))
    if "linear" in tables:
        lengths = [32, 64] if options.quick else [64 << i for i in range(8)]
        keep("linear-attention", linear_table(lengths, 64 if options.quick else 1024, rounds))
    if "study" in tables:
        lengths, widths = ([16], [4]) if options.quick else ([64, 256, 1024], [16, 64, 128])
        table = study_table(lengths, widths, seeds)
        if not options.quick:
            text = DOCS.read_text(encoding="utf-8")
            head, rest = text.split("<!-- study -->\n", 1)
            text = f"{head}<!-- study -->\n{table}\n<!-- /study -->" + rest.split("<!-- /study -->", 1)[1]
            DOCS.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
