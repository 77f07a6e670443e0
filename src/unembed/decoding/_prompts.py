"""Prompts as one tensor, shorter ones padded in front.

Shapes: B prompts, T tokens of the longest prompt.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence


def as_prompts(input_ids: Any, attention_mask: Any = None, *, vocabulary: int | None = None) -> Int[Tensor, "B T"]:
    """Prompts with -1 in front of shorter ones.

    Args:
        input_ids: Ids of one prompt or several; lists of any lengths, or a tensor [T] or [B, T].
        attention_mask: With as many rows and columns: 0 where there is padding, wherever it is.
        vocabulary: Number of ids, where it is known.

    Raises:
        ValueError: If these are no ids, a prompt is empty, or the mask has another shape.
    """
    rows = _rows(input_ids)
    if attention_mask is not None:
        rows = _kept(rows, attention_mask)
    if not rows:
        raise ValueError("`input_ids` must hold at least one prompt, got none.")
    for number, row in enumerate(rows):
        if row.ndim != 1 or row.is_floating_point() or row.is_complex() or row.dtype == torch.bool:
            raise ValueError(_wanted(input_ids))
        if not len(row):
            raise ValueError(f"Prompt {number} of `input_ids` is empty: a model needs a token to begin with.")
    padded = pad_sequence([row.long() for row in rows], batch_first=True, padding_value=-1, padding_side="left")
    lengths = torch.tensor([len(row) for row in rows], device=padded.device)
    real = torch.arange(padded.shape[1], device=padded.device) >= padded.shape[1] - lengths[:, None]
    wrong = real & ((padded < 0) | (padded >= (math.inf if vocabulary is None else vocabulary)))
    if bool(wrong.any()):
        number, place = wrong.nonzero()[0].tolist()
        wanted = "at least 0" if vocabulary is None else f"in [0, {vocabulary})"
        raise ValueError(f"`input_ids` must be {wanted}, got {int(padded[number, place])} in prompt {number}.")
    return padded


def _rows(input_ids: Any) -> list[Tensor]:
    """One tensor a prompt."""
    try:
        if not isinstance(input_ids, Tensor):
            several = len(input_ids) > 0 and all(hasattr(one, "__len__") for one in input_ids)
            if several:
                return [_row(one) for one in input_ids]
            input_ids = _row(input_ids) if len(input_ids) else torch.zeros(0, 0)
        return list(input_ids[None] if input_ids.ndim == 1 else input_ids)
    except (TypeError, ValueError, RuntimeError):  # what PyTorch raises for strings, ragged and odd ones
        raise ValueError(_wanted(input_ids)) from None


def _row(ids: Any) -> Tensor:
    """An empty list has no dtype of its own."""
    return torch.as_tensor(ids, dtype=None if len(ids) else torch.int64)


def _kept(rows: list[Tensor], attention_mask: Any) -> list[Tensor]:
    """Rows without their padding."""
    masks = _rows(attention_mask)
    wanted, came = [tuple(row.shape) for row in rows], [tuple(row.shape) for row in masks]
    if wanted != came:
        raise ValueError(f"`attention_mask` must have the shape of `input_ids`, {wanted!s:.60}, got {came!s:.60}.")
    for mask in masks:
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise ValueError(f"`attention_mask` must be 0 or 1, got {mask.tolist()!s:.60}.")
    return [row[mask.to(row.device) == 1] for row, mask in zip(rows, masks, strict=True)]


def _wanted(came: Any) -> str:
    shown = f"{came.dtype} {tuple(came.shape)}" if isinstance(came, Tensor) else f"{came!r:.60}"
    return f"`input_ids` must be whole numbers [B, T] or lists of them, got {shown}."
