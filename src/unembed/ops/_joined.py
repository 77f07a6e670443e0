"""Outputs of one chunk after another, put together or added up."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from unembed.ops._scores import widened


class Joined:
    """Outputs of the tokens of all chunks, put together.

    Where nothing is recorded they are written into place at once: small tensors that stay, between large ones that go,
    would leave the allocator with holes that nothing fits in (2.8 GB of them were seen).

    Args:
        tokens: Tokens in all.
    """

    def __init__(self, tokens: int) -> None:
        self._tokens, self._start = tokens, 0
        self._whole: list[Tensor] = []
        self._pieces: list[Sequence[Tensor]] = []

    def add(self, pieces: Sequence[Tensor]) -> None:
        """Of the next chunk."""
        if not is_unrecorded(pieces) or not pieces:
            self._pieces.append(pieces)
            return
        self._whole = self._whole or [piece.new_empty(self._tokens, *piece.shape[1:]) for piece in pieces]
        end = self._start + len(pieces[0])
        for whole, piece in zip(self._whole, pieces, strict=True):
            whole[self._start : end] = piece
        self._start = end

    def whole(self) -> tuple[Tensor, ...]:
        """Of all tokens."""
        if self._whole:
            return tuple(self._whole)
        return tuple(parts[0] if len(parts) == 1 else torch.cat(parts) for parts in zip(*self._pieces, strict=True))


def is_unrecorded(pieces: Sequence[Tensor]) -> bool:
    """Whether no derivative of these is recorded, so that memory may be written to."""
    return not torch.is_grad_enabled() and not torch.compiler.is_compiling() and not any(map(is_batch, pieces))


def added(totals: list[Tensor], pieces: Sequence[Tensor]) -> list[Tensor]:
    """Running totals with `pieces` added, held in float32 or wider; the pieces can go."""
    plain = is_unrecorded(pieces)
    if not totals:  # a piece may be an input itself, which is not to be added to
        return [piece.to(widened(piece.dtype), copy=plain) if piece.is_floating_point() else piece for piece in pieces]
    pairs = zip(totals, pieces, strict=True)
    return [total.add_(piece) if plain else total + piece for total, piece in pairs]


def is_batch(tensor: Tensor) -> bool:
    """Whether this is a batch of gradients (`is_grads_batched`): nothing may be done to it in place."""
    return torch._C._functorch.is_legacy_batchedtensor(tensor)
