"""A chunk of predictions and what several measurements need of it, computed once.

Shapes: n predictions of the chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unembed import ops
from unembed.diagnostics._head import LinearHead
from unembed.results import InputError

_SCORE_ELEMENTS = 1 << 25  # scores alive in a chunk: 128 MiB in float32


class Workspace:
    """Memory for matrices of scores that one chunk after another uses.

    Fresh memory of this size costs more than what is computed in it. A chunk made with a workspace is good until the
    next one is.
    """

    def __init__(self) -> None:
        self._held: dict[tuple[str, torch.dtype], Tensor] = {}

    def room(self, name: str, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> Tensor:
        """Uninitialised memory; the same one for the same name."""
        count = shape[0] * shape[1]
        held = self._held.get((name, dtype))
        if held is None or held.numel() < count or held.device != device:
            held = self._held[name, dtype] = torch.empty(count, dtype=dtype, device=device)
        return held[:count].view(shape)


class Chunk:
    """Hidden states, targets and the softmax of their scores.

    `q` below is the softmax with the target's entry set to zero, so `G = q - s e_y` with `s = sum q`: written as
    `p_y - 1`, the target's entry would cancel in float32 once `p_y` is near 1.

    Args:
        head: The head under measurement.
        hidden: Hidden states after the final norm, [n, D].
        targets: Next tokens, [n].
        documents: Document number of each prediction, the unit of the bootstrap, [n].
        index: Running number of each prediction in the whole stream; decides which ones a sampling measurement takes.
        workspace: Memory to compute in; fresh memory when None.
    """

    def __init__(
        self,
        head: LinearHead,
        hidden: Float[Tensor, "n D"],
        targets: Int[Tensor, " n"],
        documents: Int[Tensor, " n"],
        index: Int[Tensor, " n"],
        *,
        workspace: Workspace | None = None,
    ) -> None:
        self.head, self.hidden, self.targets = head, hidden.detach(), targets
        self.documents, self.index = documents, index
        self._workspace = workspace

    def __len__(self) -> int:
        return len(self.targets)

    @cached_property
    def scores(self) -> Float[Tensor, "n V"]:
        """Scores after the soft-cap. Not to be written to."""
        cap = self.head.softcap
        return self.uncapped if cap is None else self.room("scores").copy_(self.uncapped).div_(cap).tanh_().mul_(cap)

    @cached_property
    def uncapped(self) -> Float[Tensor, "n V"]:
        """Scores before the soft-cap. Not to be written to."""
        head = self.head
        return ops.linear_scores(self.hidden, head.weight, bias=head.bias, scale=head.scale, out=self.room("uncapped"))

    def room(self, name: str) -> Float[Tensor, "n V"]:
        """Uninitialised memory of the shape and dtype of the scores."""
        weight = self.head.weight
        dtype = torch.promote_types(torch.promote_types(self.hidden.dtype, weight.dtype), torch.float32)
        shape = (len(self), self.head.vocab)
        if self._workspace is None:
            return torch.empty(shape, dtype=dtype, device=weight.device)
        return self._workspace.room(name, shape, dtype, weight.device)

    @cached_property
    def peak(self) -> Float[Tensor, " n"]:
        """Largest score of each row; 0 for a row of only `-inf`."""
        return self.scores.amax(-1).nan_to_num(neginf=0.0)

    @cached_property
    def _others(self) -> tuple[Tensor, Tensor, Tensor]:
        exponentials = torch.sub(self.scores, self.peak[:, None], out=self.room("exponentials")).exp_()
        own = exponentials.gather(1, self.targets[:, None]).squeeze(1)
        exponentials.scatter_(1, self.targets[:, None], 0.0)
        return exponentials, own, exponentials.sum(-1)

    @cached_property
    def total(self) -> Float[Tensor, " n"]:
        """`sum_v exp(z_v - peak)`, the target's term included."""
        _, own, rest = self._others
        return own + rest

    @property
    def unnormalised(self) -> Float[Tensor, "n V"]:
        """`q * total`: exponentials with the target's entry zero. Not to be written to."""
        return self._others[0]

    @cached_property
    def missing(self) -> Float[Tensor, " n"]:
        """`s = 1 - p_y`, to full relative precision."""
        return self._others[2] / self.total

    @cached_property
    def target_probability(self) -> Float[Tensor, " n"]:
        """`p_y`."""
        return self._others[1] / self.total

    @cached_property
    def entropy(self) -> Float[Tensor, " n"]:
        """Entropy in nats; `-inf` scores count nothing."""
        # exp(-200) is 0 in float32 and nothing beside 1 in float64, so the clamp only keeps 0 * -inf away.
        shifted = torch.sub(self.scores, self.peak[:, None], out=self.room("entropy")).clamp_(min=-200)
        own = shifted.gather(1, self.targets[:, None]).squeeze(1) * self._others[1]
        inside = (shifted.mul_(self.unnormalised).sum(-1) + own) / self.total
        return (self.total.log() - inside).clamp(min=0)

    @cached_property
    def correct(self) -> Bool[Tensor, " n"]:
        """Whether the target is the argmax, ties going to the lowest id."""
        found = self.scores.gather(1, self.targets[:, None]).squeeze(1) == self.peak
        best = found.nonzero().squeeze(1)
        found[best] = self.scores[best].argmax(-1) == self.targets[best]
        return found

    @cached_property
    def nll(self) -> Float[Tensor, " n"]:
        """Negative log-likelihood in nats; exact near 0 and in the far tail."""
        own = self.scores.gather(1, self.targets[:, None]).squeeze(1) - self.peak
        return torch.where(own == 0, torch.log1p(self._others[2]), self.total.log() - own)


@contextmanager
def full_precision() -> Generator[None]:
    """Products of float32 matrices in float32, whatever the user allows elsewhere (TF32 keeps three digits)."""
    stubs: Any = torch.backends  # which do not know of mkldnn.matmul
    backends = (stubs.cuda.matmul, stubs.mkldnn.matmul)
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision


def chunks(
    head: LinearHead,
    hidden: Float[Tensor, "n D"],
    targets: Int[Tensor, " n"],
    *,
    documents: Int[Tensor, " n"] | None = None,
    index: Int[Tensor, " n"] | None = None,
    ignore_index: int = -100,
    rows: int | None = None,
    workspace: Workspace | None = None,
) -> Iterator[Chunk]:
    """Cut a block of predictions into chunks whose scores fit in memory; ignored targets are dropped.

    Args:
        head: The head under measurement.
        hidden: Hidden states after the final norm.
        targets: Next tokens; `ignore_index` where there is none.
        documents: Document of each prediction; one document when None.
        index: Running numbers; counted from 0 when None.
        ignore_index: Target of positions that do not count.
        rows: Predictions a chunk; chosen from V when None.
        workspace: Memory that the chunks share; each is good until the next one then.

    Raises:
        ValueError: If shapes do not fit or a target is not a row of the head.
        InputError: If a hidden state holds NaN or infinity.
    """
    if hidden.ndim != 2 or hidden.shape[1] != head.width or targets.shape != hidden.shape[:1]:
        raise ValueError(
            f"Expected `hidden` [n, {head.width}] and `targets` [n], "
            f"got {tuple(hidden.shape)} and {tuple(targets.shape)}."
        )
    for name, given in (("documents", documents), ("index", index)):
        if given is not None and given.shape != targets.shape:
            raise ValueError(f"Expected `{name}` {tuple(targets.shape)} like `targets`, got {tuple(given.shape)}.")
    device = head.weight.device
    targets = targets.to(device, torch.int64)
    counts = targets != ignore_index
    wrong = counts & ((targets < 0) | (targets >= head.vocab))
    if bool(wrong.any()):
        raise ValueError(
            f"`targets` must be {ignore_index} or lie in [0, {head.vocab}), got {int(targets[wrong][0])}: "
            "does the tokenizer belong to this head?"
        )
    everything = torch.arange(len(targets), device=device)
    documents = torch.zeros_like(everything) if documents is None else documents.to(device)
    index = everything if index is None else index.to(device)
    kept = everything[counts]
    bad = int((~torch.isfinite(hidden).all(-1)).to(device)[kept].sum())
    if bad:
        raise InputError(f"`hidden` holds NaN or infinity in {bad} of {len(kept)} predictions: a wider dtype may help.")
    if len(kept) == 0:
        return
    for part in kept.split(max(1, _SCORE_ELEMENTS // head.rows) if rows is None else rows):
        inside = hidden[part.to(hidden.device)].to(device)
        yield Chunk(head, inside, targets[part], documents[part], index[part], workspace=workspace)
