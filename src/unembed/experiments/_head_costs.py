"""What a training step costs under each head, measured in a fresh process each.

Shapes: N tokens, T positions of a row, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import re
import signal
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from unembed import heads, losses
from unembed.results import InputError

# Variants beside the defaults of a head; every registered head has a row.
_VARIANTS = {
    "mos": ("mos:k=4", "mos:k=4,shared=False", "mos:k=4,sigsoftmax=True"),
    "hierarchical": ("hierarchical:tree=huffman", "hierarchical:tree=balanced", "hierarchical:tree=classes"),
    "mtp": ("mtp:mode=parallel", "mtp:mode=sequential"),
}
_ROW = 256  # positions of a row at most, for heads that look along it


@dataclass(frozen=True)
class HeadCosts:
    """What is measured.

    Args:
        tokens: N, in a step.
        dim: D.
        vocab: V.
        dtype: Of parameters and hidden states.
        device: Where.
        rounds: Steps that are timed, each beside one of the linear head.
        seed: Of parameters, hidden states and targets.
        imports: Modules to import first, that define heads of your own.
    """

    tokens: int = 2048
    dim: int = 512
    vocab: int = 32768
    dtype: Literal["float32", "bfloat16", "float16", "float64"] = "float32"
    device: str = "cpu"
    rounds: int = 5
    seed: int = 0
    imports: tuple[str, ...] = ()


def default_specs() -> list[str]:
    """One spec or more for every head there is, the linear one first."""
    kinds = dict.fromkeys(heads.HEADS.values())
    names = [kind.names[0] for kind in kinds]
    ordered = ["linear", *(name for name in names if name != "linear")]
    return [spec for name in ordered for spec in _VARIANTS.get(name, (name,))]


def check_specs(specs: list[str], costs: HeadCosts) -> None:
    """Refuse what cannot be built, before anything is measured.

    Raises:
        InputError: Names the head and what is wrong with it.
    """
    for place, spec in enumerate(specs):
        if spec in specs[:place]:
            raise InputError(f"{spec} is given twice; name each head once.")
        try:
            heads.build(spec, costs.dim, costs.vocab, device="meta")
        except (ValueError, RuntimeError, OverflowError, TypeError) as error:  # the last ones: a size no tensor has
            said = str(error).partition("\n")[0]
            raise InputError(said if spec in said else f"{spec}: {said}") from None


def import_heads(costs: HeadCosts) -> None:
    """Import the modules that define further heads.

    Raises:
        InputError: If there is no such module.
    """
    for name in costs.imports:
        try:
            importlib.import_module(name)
        except ImportError as error:
            raise InputError(f"{name} cannot be imported ({error}); is its folder on PYTHONPATH?") from None


def measure(spec: str, costs: HeadCosts) -> dict[str, Any]:
    """The row of one head, from a process of its own, so that memory is its own.

    `failed` says why there are no numbers. A `KeyboardInterrupt` here ends that process too.
    """
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_send, args=(sender, spec, costs), daemon=True)
    process.start()
    sender.close()
    try:
        with contextlib.suppress(EOFError):
            return receiver.recv()
        process.join()
        code = process.exitcode or 0
        why = f"ended by signal {-code}, out of memory?" if code < 0 else f"ended with exit code {code}"
        return {"head": spec, "failed": why}
    finally:
        if process.is_alive():
            process.terminate()
        process.join()


def _send(sender: Any, spec: str, costs: HeadCosts) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C too, and ends this process
    try:
        import_heads(costs)
        row = measure_here(spec, costs)
    except Exception as error:
        row = {"head": spec, "failed": f"{type(error).__name__}: {' '.join(str(error).split())}"[:200]}
    sender.send(row)


def measure_here(spec: str, costs: HeadCosts) -> dict[str, Any]:
    """As `measure`, in this process: memory is right only if it is a fresh one."""
    run, head, loss = _step(spec, costs)
    _step("linear", HeadCosts(tokens=8, dim=8, vocab=16, dtype=costs.dtype, device=costs.device))[0]()  # libraries
    peak = _added_bytes(run, costs.device)
    base = run if spec == "linear" else _step("linear", costs)[0]
    times = _in_turns(run, base, costs)
    ratios = sorted(mine / other for mine, other in times)
    cost = head.cost(costs.tokens)
    return {
        "head": spec,
        "kind": type(head).__name__,
        "parameters": cost.parameters,
        "forward_flops": cost.forward_flops,
        "backward_flops": cost.backward_flops,
        "rank_bound": head.rank_bound,
        "loss_at_init": loss(),
        "seconds": statistics.median(mine for mine, _ in times),
        "over_linear": statistics.median(ratios),
        "over_linear_range": [ratios[0], ratios[-1]],
        "added_bytes": peak,
    }


def entropy(vocab: int) -> float:
    """Entropy of the law that targets are drawn from, in nats: the loss of the best head that sees no context."""
    probabilities = _law(vocab)
    return float(-(probabilities * probabilities.log()).sum())


def _law(vocab: int) -> Tensor:
    """Zipf's law; token ids are ranks, as adaptive heads and Huffman trees take them to be."""
    weights = 1 / torch.arange(1, vocab + 1, dtype=torch.float64)
    return weights / weights.sum()


def _step(spec: str, costs: HeadCosts) -> tuple[Callable[[], Tensor], heads.Head, Callable[[], float]]:
    """A training step, the head, and its loss a token."""
    torch.manual_seed(costs.seed)
    dtype = getattr(torch, costs.dtype)
    with torch.device(costs.device):
        head = heads.build(spec, costs.dim, costs.vocab, device=costs.device, dtype=dtype)
    shape = _shape(costs.tokens)
    torch.manual_seed(costs.seed + 1)  # whatever the head has drawn, all see the same targets and like hidden states
    hidden = head.example_hidden(shape).to(costs.device, dtype).requires_grad_()
    generator = torch.Generator().manual_seed(costs.seed + 2)
    uniform = torch.rand(costs.tokens, generator=generator, dtype=torch.float64)
    drawn = torch.searchsorted(_law(costs.vocab).cumsum(0), uniform).clamp(max=costs.vocab - 1)
    targets = drawn.reshape(shape).to(costs.device)
    if isinstance(head, heads.MultiTokenPrediction):
        ahead = head.targets_of(targets)

        def loss() -> Tensor:
            return head.joint_loss(hidden, ahead)
    else:
        training = losses.fenchel_young if isinstance(head, heads.Entmax) else losses.cross_entropy

        def loss() -> Tensor:
            return training(head, hidden, targets)

    def run() -> Tensor:
        hidden.grad = None
        head.zero_grad()
        value = loss()
        value.backward()
        return value.detach()

    def at_init() -> float:
        with torch.no_grad():
            if isinstance(head, heads.Entmax):  # its negative log-likelihood is infinite outside the support
                return float(losses.fenchel_young(head, hidden, targets))
            return float(head.nll(hidden, targets).mean())

    return run, head, at_init


def _shape(tokens: int) -> tuple[int, int]:
    """Rows of like length that make up the tokens; a single row where their number has no fitting divisor."""
    length = max(size for size in range(1, min(tokens, _ROW) + 1) if tokens % size == 0)
    return (tokens // length, length) if length >= 16 else (1, tokens)


def _in_turns(run: Callable[[], Any], base: Callable[[], Any], costs: HeadCosts) -> list[tuple[float, float]]:
    """Seconds of a head and of the linear one, one after the other, so that a slow minute hits both."""
    for warm in (run, base):
        warm()
    return [(_seconds(run, costs.device), _seconds(base, costs.device)) for _ in range(costs.rounds)]


def _seconds(run: Callable[[], Any], device: str) -> float:
    _wait(device)
    start = time.perf_counter()
    run()
    _wait(device)
    return time.perf_counter() - start


def _wait(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)
    elif device.startswith("mps"):
        torch.mps.synchronize()


def _added_bytes(run: Callable[[], Any], device: str) -> int | None:
    """Memory that a step adds at its peak to parameters and input, gradients included; None where no one counts it."""
    if device.startswith("cuda"):
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run()
        return torch.cuda.max_memory_allocated(device) - before
    if device != "cpu":
        run()
        return None
    status, forget = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    try:
        forget.write_text("5")  # the highest of the past, which was that of the imports
    except OSError:
        run()
        return None

    def kilobytes(name: str) -> int:
        return int(re.findall(rf"{name}:\s*(\d+)", status.read_text())[0])

    before = kilobytes("VmRSS")
    run()
    return max(kilobytes("VmHWM") - before, 0) * 1024
