"""Which hidden state predicts which target: shifts, packed documents, weights."""

from __future__ import annotations

from torch import Tensor

from unembed import ops
from unembed.heads import Head


def aligned(
    head: Head,
    hidden: Tensor,
    targets: Tensor,
    token_weight: Tensor | None,
    *,
    shift: int,
    document_ids: Tensor | None,
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, targets and weights of the predictions to be made, position by position.

    Raises:
        ValueError: If shapes do not fit, or documents are given without a shift.
    """
    shape = head.tokens_shape(hidden)
    for name, tensor in (("targets", targets), ("token_weight", token_weight), ("document_ids", document_ids)):
        if tensor is not None and tuple(tensor.shape) != shape:
            raise ValueError(f"Expected `{name}` {shape} like the tokens of `hidden`, got {tuple(tensor.shape)}.")
    if shift < 0:
        raise ValueError(f"`shift` must be at least 0, got {shift}.")
    if shift == 0:
        if document_ids is not None:
            raise ValueError("`document_ids` need `shift`: without it targets stand beside their hidden states.")
        return hidden, targets, token_weight
    if not shape:
        raise ValueError("`shift` needs tokens in a row, got a single one.")
    place = len(shape) - 1
    length = max(shape[-1] - shift, 0)
    later = ops.tokens_ahead(targets, shift, document_ids=document_ids, ignore_index=ignore_index)
    weight = None if token_weight is None else token_weight.narrow(place, shape[-1] - length, length)
    return hidden.narrow(place, 0, length), later, weight
