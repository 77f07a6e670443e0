"""The token that a position is to predict, some positions ahead and in its own document.

Shapes: T positions.
"""

from __future__ import annotations

import torch
from jaxtyping import Int
from torch import Tensor


def tokens_ahead(
    tokens: Int[Tensor, "*A"],
    ahead: int,
    *,
    document_ids: Int[Tensor, "*C"] | None = None,
    ignore_index: int = -100,
) -> Int[Tensor, "*B S"]:
    """At t the token at t + `ahead`, for the S = T - `ahead` positions that have one; ignored across documents.

    Args:
        tokens: A row of tokens, the last dimension.
        ahead: How far.
        document_ids: Of each token; an id may come back in a later document, which is another one then.
        ignore_index: Target of positions whose document ends before.

    Raises:
        ValueError: If the shapes do not fit.
    """
    if tokens.ndim < 1 or (document_ids is not None and document_ids.shape != tokens.shape):
        got = None if document_ids is None else tuple(document_ids.shape)
        raise ValueError(f"Expected `tokens` [*, T] and `document_ids` alike, got {tuple(tokens.shape)} and {got}.")
    length = tokens.shape[-1]
    inside = max(length - ahead, 0)
    later = tokens[..., length - inside :]
    if document_ids is None:
        return later
    borders = document_ids[..., 1:] != document_ids[..., :-1]
    runs = torch.nn.functional.pad(borders.long(), (1, 0)).cumsum(-1)[..., :length]
    return torch.where(runs[..., :inside] == runs[..., length - inside :], later, ignore_index)
