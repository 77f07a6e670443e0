"""Which hidden state predicts which token: shifts, packed documents, weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from unembed import ops
from unembed.heads import Head


def check_is_head(head: Any, *, name: str = "head") -> None:
    """Refuse what is no head; a compiled or wrapped one that passes on its methods is one.

    Raises:
        ValueError: Says how a linear layer becomes a head.
    """
    if isinstance(head, Head) or (hasattr(head, "flattened") and hasattr(head, "terms")):
        return
    mend = "wrap it: heads.Linear.from_linear(linear)" if isinstance(head, torch.nn.Linear) else "see unembed.heads"
    raise ValueError(f"`{name}` must be a head, got {type(head).__module__}.{type(head).__qualname__}; {mend}.")


@dataclass(frozen=True)
class Alignment:
    """Position t predicts the token at t + `shift`, along the last dimension of the tokens.

    Args:
        shape: Of the tokens.
        shift: How far ahead.
        document_ids: Of each token; none is predicted from another document.

    Raises:
        ValueError: If shapes do not fit, or documents are given without a shift.
    """

    shape: tuple[int, ...]
    shift: int
    document_ids: Tensor | None

    def __post_init__(self) -> None:
        self.check(document_ids=self.document_ids)
        if self.shift < 0:
            raise ValueError(f"`shift` must be at least 0, got {self.shift}.")
        if self.shift == 0 and self.document_ids is not None:
            raise ValueError("`document_ids` need `shift`: without it targets stand beside their hidden states.")
        if self.shift and not self.shape:
            raise ValueError("`shift` needs tokens in a row, got a single one.")

    def check(self, **tensors: Tensor | None) -> None:
        """Refuse a tensor that has not one number a token.

        Raises:
            ValueError: Names it.
        """
        for name, tensor in tensors.items():
            if tensor is not None and tuple(tensor.shape) != self.shape:
                raise ValueError(
                    f"Expected `{name}` {self.shape} like the tokens of `hidden`, got {tuple(tensor.shape)}."
                )

    @property
    def predictions(self) -> tuple[int, ...]:
        """Shape of the predictions: those positions that have a token `shift` ahead."""
        return self.shape if self.shift == 0 else (*self.shape[:-1], max(self.shape[-1] - self.shift, 0))

    @property
    def documents(self) -> Tensor | None:
        """Documents of the positions that predict."""
        return None if self.document_ids is None else self.origin(self.document_ids)

    def origin(self, tensor: Tensor) -> Tensor:
        """Of a tensor with tokens in front, the rows at the positions that predict."""
        return tensor if self.shift == 0 else tensor.narrow(len(self.shape) - 1, 0, self.predictions[-1])

    def ahead(self, tensor: Tensor) -> Tensor:
        """Of a tensor with tokens in front, the rows at the tokens that they predict."""
        if self.shift == 0:
            return tensor
        length = self.predictions[-1]
        return tensor.narrow(len(self.shape) - 1, self.shape[-1] - length, length)

    def targets(self, targets: Tensor, ignore_index: int) -> Tensor:
        """The token that each position predicts, ignored across a change of document."""
        if self.shift == 0:
            return targets
        return ops.tokens_ahead(targets, self.shift, document_ids=self.document_ids, ignore_index=ignore_index)

    def weight(self, token_weight: Tensor | None, counts: Tensor | None = None) -> Tensor | None:
        """Weights of the predictions: those of the tokens predicted, 0 across documents and where not `counts`.

        Args:
            token_weight: One a token; ones when None.
            counts: Predictions that count; all when None.
        """
        if self.document_ids is not None:
            inside = self.targets(torch.ones_like(self.document_ids), 0) == 1
            counts = inside if counts is None else counts & inside
        if token_weight is None or counts is None:
            return counts if token_weight is None else self.ahead(token_weight)
        return torch.where(counts, self.ahead(token_weight), 0)


def states_of(head: Head, hidden: Tensor, aligned: Alignment) -> Tensor:
    """Hidden states of the predictions with one token dimension, as `flattened` gives them."""
    none = torch.zeros(aligned.predictions, dtype=torch.int64, device=hidden.device)
    return head.flattened(aligned.origin(hidden), none, document_ids=aligned.documents)[0]
