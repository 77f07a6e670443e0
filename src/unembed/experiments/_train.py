"""A train loop for small language models that stops and resumes without a trace.

Batches are a function of the seed and the step, and nothing else is drawn once the weights are, so the step is the
whole state of the random numbers: a resumed run has bit for bit the losses of one that was never stopped, on the
same machine with the same number of threads.
"""

import hashlib
import json
import math
import signal
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from jaxtyping import Int
from safetensors.torch import load_file, save
from torch import Tensor
from torch.nn.functional import cross_entropy

from unembed.models._llama import Llama, LlamaConfig
from unembed.results import InputError, write_whole

_STATE = "state.json"


@dataclass(frozen=True)
class TrainConfig:
    """A run. The model's `max_position_embeddings` is the length of a training window, in tokens.

    Attributes:
        steps: Updates of the weights, each on `batch_size` windows.
        learning_rate: The peak, reached after `warmup_steps` and followed by half a cosine down to zero.
        weight_decay: AdamW's, on matrices only (Loshchilov and Hutter, 2019, arXiv:1711.05101).
        clip_norm: Largest norm of the whole gradient.
        checkpoint_every: Steps between checkpoints.
        seed: Of the initial weights and of the order of the windows.
    """

    model: LlamaConfig
    steps: int
    batch_size: int = 16
    learning_rate: float = 3e-3
    warmup_steps: int = 50
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    clip_norm: float = 1.0
    checkpoint_every: int = 100
    seed: int = 0


@dataclass
class TrainRun:
    """A model with the loss of every step so far, in nats per token, and the seconds they took."""

    model: Llama
    losses: list[float]
    seconds: float


def train(
    config: TrainConfig,
    tokens: Int[Tensor, " N"],
    *,
    folder: Path | None = None,
    progress: Callable[[int, float], None] | None = None,
) -> TrainRun:
    """Train from the start, or on from the checkpoint in `folder`.

    Ctrl-C waits for the step to end, writes a checkpoint and raises `KeyboardInterrupt`; a second one does not wait.

    Args:
        config: The run.
        tokens: The training text as one stream of ids.
        folder: Where checkpoints go. None keeps none.
        progress: Called after each step with the number of steps done and the step's loss in nats per token.

    Raises:
        InputError: If the checkpoint is of another run.
        ValueError: If `tokens` are too few for a batch.
    """
    model = Llama(config.model, generator=torch.Generator().manual_seed(config.seed))
    optimizer = _optimizer(model, config)
    identity: dict[str, object] = {
        "config": asdict(config),
        "tokens": hashlib.sha256(tokens.numpy().tobytes()).hexdigest(),
    }
    run = TrainRun(model, losses=[], seconds=0.0)
    if folder is not None and (folder / _STATE).exists():
        _resume(folder, run, optimizer, identity)
    started = time.perf_counter() - run.seconds
    with _interrupt_held() as interrupted:
        for step in range(len(run.losses), config.steps):
            windows = batch(config, tokens, step=step)
            run.losses.append(_update(model, optimizer, windows, config, step=step))
            run.seconds = time.perf_counter() - started
            if progress is not None:
                progress(step + 1, run.losses[-1])
            due = (step + 1) % config.checkpoint_every == 0 or step + 1 == config.steps
            if folder is not None and (due or interrupted.is_set()):
                _checkpoint(folder, run, optimizer, identity)
            if interrupted.is_set():
                raise KeyboardInterrupt
    return run


def batch(config: TrainConfig, tokens: Int[Tensor, " N"], *, step: int) -> Int[Tensor, "B T+1"]:
    """The windows of a step: each epoch shifts the grid of windows at random and visits it in a random order.

    Raises:
        ValueError: If `tokens` are too few for a batch.
    """
    length = config.model.max_position_embeddings
    windows = (len(tokens) - length) // length
    batches = windows // config.batch_size
    if batches < 1:
        raise ValueError(
            f"`tokens` must hold a batch of {config.batch_size} windows of {length} tokens and one window to spare, "
            f"got {len(tokens)} tokens."
        )
    epoch, index = divmod(step, batches)
    generator = torch.Generator().manual_seed(1_000_003 * (config.seed + 1) + epoch)
    offset = int(torch.randint(length, (), generator=generator))
    order = torch.randperm(windows, generator=generator)
    starts = offset + length * order[index * config.batch_size : (index + 1) * config.batch_size]
    return tokens[starts[:, None] + torch.arange(length + 1)].long()


def learning_rate(config: TrainConfig, *, step: int) -> float:
    """The rate of a step: linear up to the peak, then half a cosine that would reach zero at `steps`."""
    if step < config.warmup_steps:
        return config.learning_rate * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    return config.learning_rate * 0.5 * (1 + math.cos(math.pi * done))


def _optimizer(model: Llama, config: TrainConfig) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() == 2]
    vectors = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas)


def _update(
    model: Llama, optimizer: torch.optim.AdamW, windows: Int[Tensor, "B T+1"], config: TrainConfig, *, step: int
) -> float:
    """One step; returns the loss before it."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, step=step)
    scores = model.scores(model(windows[:, :-1]))
    loss = cross_entropy(scores.flatten(0, 1), windows[:, 1:].flatten())
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
    optimizer.step()
    return loss.item()


def _checkpoint(folder: Path, run: TrainRun, optimizer: torch.optim.AdamW, identity: dict[str, object]) -> None:
    """Write the tensors under a new name, then the state that names them: a crash between leaves the old pair."""
    tensors = {f"model.{name}": tensor for name, tensor in run.model.state_dict().items()}
    for name, parameter in run.model.named_parameters():
        for key, tensor in optimizer.state[parameter].items():
            tensors[f"optimizer.{key}.{name}"] = tensor
    file_name = f"step-{len(run.losses):07d}.safetensors"
    with write_whole(folder / file_name, "wb") as file:
        file.write(save(tensors))
    state = {"tensors": file_name, "seconds": run.seconds, "losses": run.losses, **identity}
    with write_whole(folder / _STATE) as file:
        file.write(json.dumps(state) + "\n")
    for path in folder.glob("step-*.safetensors"):
        if path.name != file_name:
            path.unlink()


def _resume(folder: Path, run: TrainRun, optimizer: torch.optim.AdamW, identity: dict[str, object]) -> None:
    """Fill model, optimizer, losses and seconds from the checkpoint."""
    state = json.loads((folder / _STATE).read_text(encoding="utf-8"))
    for part, expected in json.loads(json.dumps(identity)).items():
        if state[part] != expected:
            raise InputError(f"{folder} holds a checkpoint of a run with other {part}; remove it to start anew.")
    tensors = load_file(folder / state["tensors"])
    run.model.load_state_dict({name: tensors[f"model.{name}"] for name in run.model.state_dict()})
    for name, parameter in run.model.named_parameters():
        optimizer.state[parameter] = {
            key: tensors[f"optimizer.{key}.{name}"] for key in ("step", "exp_avg", "exp_avg_sq")
        }
    run.losses = state["losses"]
    run.seconds = state["seconds"]


@contextmanager
def _interrupt_held() -> Generator[threading.Event]:
    """An event that the first Ctrl-C sets instead of breaking off; the second breaks off.

    Only the main thread may do this; elsewhere Ctrl-C does not arrive and the event stays clear.
    """
    event = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield event
        return
    previous = signal.getsignal(signal.SIGINT)

    def hold(*_: object) -> None:
        event.set()
        signal.signal(signal.SIGINT, previous)

    signal.signal(signal.SIGINT, hold)
    try:
        yield event
    finally:
        signal.signal(signal.SIGINT, previous)
