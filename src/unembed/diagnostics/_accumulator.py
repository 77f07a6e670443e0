"""What all measurements share: `update`, `merge`, `result`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Self

from jaxtyping import Float, Int
from torch import Tensor

from unembed.diagnostics._chunk import Chunk, chunks
from unembed.diagnostics._head import LinearHead
from unembed.results import Result


class Accumulator(ABC):
    """A measurement as a running sum: memory does not grow with tokens, and two halves merge to the whole.

    Args:
        head: The head under measurement.
    """

    name: ClassVar[str]
    code: ClassVar[str]
    title: ClassVar[str]
    needs_text: ClassVar[bool] = True

    def __init__(self, head: LinearHead) -> None:
        self.head = head

    def update(
        self,
        hidden: Float[Tensor, "n D"],
        targets: Int[Tensor, " n"],
        *,
        documents: Int[Tensor, " n"] | None = None,
        index: Int[Tensor, " n"] | None = None,
    ) -> None:
        """Add predictions: hidden states after the final norm and the tokens that followed; -100 is ignored."""
        for chunk in chunks(self.head, hidden, targets, documents=documents, index=index):
            self.add(chunk)

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Add one chunk; several measurements share what it holds."""

    @abstractmethod
    def merge(self, other: Self) -> None:
        """Take over what `other` accumulated on other predictions of the same head."""

    @abstractmethod
    def result(self) -> Result:
        """The numbers so far; can be asked at any time."""

    def _nothing(self, reason: str) -> Result:
        return Result(self.name, self.code, self.title, None, reason=reason)
