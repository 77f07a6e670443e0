"""What all measurements share: `update`, `merge`, `result`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.diagnostics._bootstrap import DocumentSums
from unembed.diagnostics._chunk import Chunk, Workspace, chunks, full_precision
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
    needs_basis: ClassVar[bool] = False  # whether `head.columns` will be asked for
    sums: ClassVar[tuple[str, ...]] = ()  # attributes that add up when two halves merge
    settings: ClassVar[tuple[str, ...]] = ()  # attributes that must be equal for that

    def __init__(self, head: LinearHead) -> None:
        self.head = head

    @property
    def device(self) -> torch.device:
        """Where it is measured."""
        return self.head.weight.device

    def update(
        self,
        hidden: Float[Tensor, "n D"],
        targets: Int[Tensor, " n"],
        *,
        documents: Int[Tensor, " n"] | None = None,
        index: Int[Tensor, " n"] | None = None,
    ) -> None:
        """Add predictions.

        Args:
            hidden: Hidden states after the final norm.
            targets: The tokens that followed; -100 is ignored.
            documents: Number of each prediction's document, unique over all that will be merged.
            index: Running number of each prediction, likewise; decides which ones a sampling measurement takes.
        """
        with full_precision():
            for chunk in chunks(self.head, hidden, targets, documents=documents, index=index, workspace=Workspace()):
                self.add(chunk)

    @abstractmethod
    def add(self, chunk: Chunk) -> None:
        """Add one chunk; several measurements share what it holds."""

    def merge(self, other: Accumulator) -> None:
        """Take over what `other` accumulated on other predictions of the same head.

        Raises:
            ValueError: If `other` measures something else, another head, or with other settings.
        """
        if type(other) is not type(self):
            raise ValueError(f"`other` must be a {type(self).__name__}, got {type(other).__name__}.")
        for name in self.settings:
            if getattr(self, name) != getattr(other, name):
                raise ValueError(
                    f"`other` must have the same `{name.lstrip('_')}`: "
                    f"expected {getattr(self, name)}, got {getattr(other, name)}."
                )
        if other.head is not self.head and not self._same_head(other):
            raise ValueError("`other` must measure the same head; its weight differs.")
        for name in self.sums:
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def _same_head(self, other: Accumulator) -> bool:
        return torch.equal(other.head.weight, self.head.weight)

    def state(self) -> dict[str, Tensor]:
        """The sums as tensors, for a file; `load_state` goes on from them."""
        state: dict[str, Tensor] = {}
        for name in self.sums:
            value = getattr(self, name)
            if isinstance(value, DocumentSums):
                state[f"{name}.documents"], state[f"{name}.table"] = value.state()
            else:
                state[name] = torch.as_tensor(value, dtype=torch.float64).clone()
        return state

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Replace the sums by those of a `state`."""
        for name in self.sums:
            value = getattr(self, name)
            if isinstance(value, DocumentSums):
                value.load_state(state[f"{name}.documents"], state[f"{name}.table"])
            elif isinstance(value, Tensor):
                setattr(self, name, state[name].clone())
            else:
                setattr(self, name, type(value)(state[name].item()))

    @abstractmethod
    def result(self) -> Result:
        """The numbers so far; can be asked at any time."""

    def _nothing(self, reason: str) -> Result:
        return Result(self.name, self.code, self.title, None, reason=reason)
