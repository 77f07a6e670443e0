"""Terms and losses of any head out of its `forward`, a chunk of scores alive at a time."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from unembed.ops import Rows, Summed, token_terms, weighted


class HeadTerms(Rows):
    """`token_terms` of the scores of a head; tokens `(hidden, targets)`, shared its parameters and the spread."""

    def __init__(self, head: Any, chunk: int, ignore_index: int, *, spread: bool) -> None:
        super().__init__(chunk, 2 + spread, 0)
        self._head, self._ignore_index, self._spread = head, ignore_index, spread
        self._names = [name for name, _ in head.named_parameters()]

    def __call__(self, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> tuple[Any, tuple[()]]:
        """The definition."""
        hidden, targets = tokens
        parameters = dict(zip(self._names, shared, strict=False))
        spread = shared[-1] if self._spread else None
        scores = torch.func.functional_call(self._head, parameters, (hidden,))
        nll, lse, *rest = token_terms(scores, targets, ignore_index=self._ignore_index, spread=spread)
        return (nll, torch.zeros_like(lse) if self._head.normalised else lse, *rest), ()


class HeadLoss(Summed):
    """The weighted sum of `HeadTerms`, with its gradients made in the same pass."""

    def __init__(self, head: Any, chunk: int, ignore_index: int, asked: Any, *, spread: bool) -> None:
        super().__init__(chunk, asked)
        self._terms = HeadTerms(head, chunk, ignore_index, spread=spread)

    def __call__(self, tokens: tuple[Tensor, ...], shared: tuple[Tensor, ...]) -> tuple[tuple[()], tuple[Tensor]]:
        """The definition."""
        hidden, targets, coefficients = tokens
        (nll, lse, *spread), _ = self._terms((hidden, targets), shared)
        return (), (weighted((nll, lse, lse.square(), *spread), coefficients),)


def refuse_random(head: nn.Module) -> None:
    """Refuse dropout inside a head: a backward pass makes the scores again, and would draw another mask.

    Raises:
        ValueError: If it is in training mode with a dropout that drops.
    """
    for name, part in head.named_modules():
        if part.training and isinstance(part, nn.modules.dropout._DropoutNd) and part.p > 0:
            raise ValueError(
                f"`{name}` of {type(head).__name__} drops at random, so its scores cannot be made twice; "
                "apply dropout to the hidden states before the head."
            )
