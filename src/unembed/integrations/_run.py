"""Run a causal language model over documents and keep what enters its output layer.

Shapes: N predictions, D hidden size, B windows in a batch, T tokens in a window.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unembed.heads import Head
from unembed.integrations._errors import out_of_memory
from unembed.integrations._quiet import quiet
from unembed.integrations._windows import Window, check_ids, leading_ids, plan_windows
from unembed.results import InputError
from unembed.text import Document

_SORTED = 8  # batches whose windows are sorted by length together


@dataclass(frozen=True)
class Block:
    """Hidden states and what they should predict, all on the model's device.

    Args:
        hidden: Input of the head: after the final norm. float32, or float64 for a float64 model.
        targets: Token ids, int64.
        documents: Running number of the document, int64, in the order they were first met.
        windows: Running number of the window over the whole run, int64.
    """

    hidden: Float[Tensor, "N D"]
    targets: Int[Tensor, " N"]
    documents: Int[Tensor, " N"]
    windows: Int[Tensor, " N"]

    def __len__(self) -> int:
        return len(self.targets)


def hidden_states(
    model: Any,
    tokenizer: Any,
    documents: Iterable[Document],
    *,
    tokens: int,
    context: int = 512,
    seed: int = 0,
    batch_tokens: int = 1024,
    skip: int = 0,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[Block]:
    """The inputs of the model's head over `tokens` predictions; the head itself is never computed.

    Documents are cut into windows of `min(context, max(64, tokens // 32))` predictions: round `r` takes window `r` of
    every document until exactly `tokens` predictions are made (the rule in full: `_windows`). Documents with a length
    are shuffled by `seed`, streams keep their order. A token is predicted at most once, from its own window only.
    Windows of like length are run together, padded on the right, which a causal model cannot see. The model runs in
    eval mode and without gradients; between the blocks it is in the mode it came in.

    Args:
        model: A transformers causal language model.
        tokenizer: Its tokenizer.
        documents: Gives the same documents each time it is iterated; several passes are made over a short text.
        tokens: Predictions in all. Fewer, with a warning, when the text is exhausted.
        context: Most predictions in a window; the model's own limit on positions counts too.
        seed: Of the order of documents.
        batch_tokens: Most tokens in a batch, padding included; a longer window runs alone.
        skip: Leaves out the blocks that make up the first `skip` predictions, as an earlier run counted them.
        progress: Called with the predictions done and `tokens` after each block.

    Raises:
        InputError: If `documents` can be read only once or holds something else, no prediction can be made, the model
            sees later tokens, its head cannot be found, an id has no row, or memory runs out.
    """
    if tokens < 1 or context < 1 or batch_tokens < 1:
        raise InputError(
            f"`tokens`, `context` and `batch_tokens` must be at least 1, got {tokens}, {context}, {batch_tokens}."
        )
    head = find_head(model)
    classes = head.out_features if isinstance(head, Head) else head.weight.shape[0]
    rows = (model.get_input_embeddings().weight.shape[0], classes)
    check_causal(model)
    limit = min(context, position_limit(model) - len(leading_ids(tokenizer)))
    done = 0
    planned = plan_windows(tokenizer, documents, tokens=tokens, context=limit, seed=seed)
    for batch in _batches(planned, batch_tokens):
        if done < skip:
            done += sum(len(window.targets) for window in batch)
            continue
        for window in batch:
            check_ids(window.inputs, rows[0], "embedding")
            check_ids(window.targets, rows[1], "head")
        block = _run(model, batch)
        done += len(block)
        yield block
        if progress is not None:
            progress(done, tokens)
    if not done:
        raise InputError("The text gives no predictions: every document is shorter than two tokens.")
    if done < tokens:
        warnings.warn(f"The text is exhausted after {done} of {tokens} predictions.", stacklevel=2)


def _batches(windows: Iterable[Window], batch_tokens: int) -> Iterator[list[Window]]:
    """Windows of like length together; a batch holds at most `batch_tokens` tokens, padding included."""
    held: list[Window] = []
    size = 0
    for window in windows:
        held.append(window)
        size += len(window.inputs)
        if size >= _SORTED * batch_tokens:
            yield from _split(held, batch_tokens)
            held, size = [], 0
    yield from _split(held, batch_tokens)


def _split(windows: list[Window], batch_tokens: int) -> Iterator[list[Window]]:
    batch: list[Window] = []
    for window in sorted(windows, key=lambda window: (-len(window.inputs), window.window)):
        if batch and len(batch[0].inputs) * (len(batch) + 1) > batch_tokens:
            yield batch
            batch = []
        batch.append(window)
    if batch:
        yield batch


def _run(model: Any, batch: list[Window]) -> Block:
    """One forward up to the head; the rows that predict something, window after window."""
    longest = max(len(window.inputs) for window in batch)
    ids = np.zeros((len(batch), longest), dtype=np.int64)  # any id will do as padding: it is never looked back at
    keep = np.zeros(ids.shape, dtype=bool)
    for row, window in enumerate(batch):
        end = len(window.inputs)
        ids[row, :end] = window.inputs
        keep[row, end - len(window.targets) : end] = True
    hidden = head_input(model, torch.from_numpy(ids))
    head = find_head(model)
    if isinstance(head, Head):  # what it reads of several positions is gathered before they are picked
        flat, _, shape = head.flattened(hidden, torch.zeros(ids.shape, dtype=torch.int64))
        hidden = flat.reshape(*shape, *flat.shape[1:])
    lengths = [len(window.targets) for window in batch]
    device = hidden.device
    return Block(
        hidden=hidden[torch.from_numpy(keep).to(device)],
        targets=torch.from_numpy(np.concatenate([window.targets for window in batch])).to(device),
        documents=torch.from_numpy(np.repeat([window.document for window in batch], lengths)).to(device),
        windows=torch.from_numpy(np.repeat([window.window for window in batch], lengths)).to(device),
    )


@contextlib.contextmanager
def evaluating(model: nn.Module) -> Generator[None]:
    """Without dropout and gradients; afterwards every module is in the mode it was in.

    Only the flags are set: the `eval` of some modules does more, which setting the flag back would not undo.
    """
    training = [module for module in model.modules() if module.training]
    try:
        for module in training:
            module.training = False
        with torch.no_grad():
            yield
    finally:
        for module in training:
            module.training = True


class _HeadReached(Exception):  # noqa: N818 - not an error, it ends a forward early
    """Raised inside a forward by the hook on the head, never seen outside."""


def head_input(model: Any, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
    """What enters the head for each position, float32 or wider, without computing the head.

    No attention mask is given: padding on the right is invisible to a causal model, and a model without a mask takes
    its fastest path.

    Raises:
        InputError: If the forward never calls the head module, or memory runs out.
    """
    caught: list[Tensor] = []

    def stop(_module: nn.Module, inputs: tuple[Any, ...]) -> None:
        caught.append(inputs[0])
        raise _HeadReached

    hook = find_head(model).register_forward_pre_hook(stop)
    try:
        with evaluating(model), quiet(), out_of_memory("running the model", "use fewer `batch_tokens`"):
            model(input_ids=ids.to(model.device), use_cache=False)
    except _HeadReached:
        pass
    finally:
        hook.remove()
    if not caught or caught[0].shape[:2] != ids.shape:
        raise InputError(
            f"{type(model).__name__}: expected the forward to give its output layer one vector a token, "
            + (f"got shape {tuple(caught[0].shape)} for {tuple(ids.shape)} tokens." if caught else "it is not called.")
        )
    hidden = caught[0]
    return hidden.to(torch.promote_types(hidden.dtype, torch.float32))


def find_head(model: Any) -> Any:
    """The module that turns hidden states into scores.

    Raises:
        InputError: If the model names none.
    """
    head = model.get_output_embeddings()
    if head is None or not (hasattr(head, "weight") or isinstance(head, Head)):
        raise InputError(f"{type(model).__name__} has no output layer over the vocabulary; is it a language model?")
    return head


def position_limit(model: Any) -> int:
    """The most tokens the model can read at once; 2^31 when its configuration sets no limit."""
    config = model.config.get_text_config()
    limit = getattr(config, "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else 1 << 31


def check_causal(model: Any) -> None:
    """Refuse a model whose hidden states depend on later tokens, such as a masked language model.

    Raises:
        InputError: If changing the last of 4 tokens changes what comes before it by more than rounding: 1e-5 of its
            norm, or 4 units of roundoff in half precision (experts may then be computed in other groups).
    """
    rows = model.get_input_embeddings().weight.shape[0]
    before, after = (head_input(model, torch.tensor([[1, 2, 3, last]]) % rows)[0, :3] for last in (1, 4))
    allowed = max(1e-5, 2 * torch.finfo(model.dtype).eps)
    if (before - after).norm() > allowed * before.norm():
        raise InputError(
            f"{type(model).__name__} looks at later tokens (a masked language model?); expected a causal one."
        )
