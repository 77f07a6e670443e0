"""Sums per document and the bootstrap over documents.

Tokens of one document depend on each other, so the document is what is drawn again.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.results import bootstrap_interval


class DocumentSums:
    """Sums of a few columns per document: some hundred bytes a document, nothing a token.

    Args:
        columns: Number of quantities summed; the count of predictions comes as one more, in front.
    """

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._sums: dict[int, np.ndarray] = {}

    def add(self, documents: Int[Tensor, " n"], values: Float[Tensor, "n c"]) -> None:
        """Add one row of `values` to the document of each prediction."""
        ids, where = torch.unique(documents.cpu(), return_inverse=True)
        table = torch.zeros(len(ids), self._columns + 1, dtype=torch.float64)
        values = values.detach().cpu().to(torch.float64)
        table.index_add_(0, where, torch.cat([torch.ones(len(values), 1, dtype=torch.float64), values], dim=1))
        for document, row in zip(ids.tolist(), table.numpy(), strict=True):
            self._sums[document] = self._sums[document] + row if document in self._sums else row.copy()

    def __add__(self, other: DocumentSums) -> DocumentSums:
        total = DocumentSums(self._columns)
        total._sums = dict(self._sums)
        for document, row in other._sums.items():
            total._sums[document] = total._sums[document] + row if document in total._sums else row
        return total

    def state(self) -> tuple[Int[Tensor, " d"], Float[Tensor, "d c"]]:
        """Document numbers and their sums."""
        return torch.tensor(sorted(self._sums), dtype=torch.int64), torch.from_numpy(self.table())

    def load_state(self, ids: Int[Tensor, " d"], table: Float[Tensor, "d c"]) -> None:
        """Take the sums of a `state`."""
        self._sums = dict(zip(ids.tolist(), table.numpy(), strict=True))

    def __len__(self) -> int:
        return len(self._sums)

    def table(self) -> np.ndarray:
        """[documents, 1 + columns], in the order of document numbers: count, then the sums."""
        if not self._sums:
            return np.zeros((0, self._columns + 1))
        return np.stack([self._sums[document] for document in sorted(self._sums)])

    def total(self) -> np.ndarray:
        """[1 + columns]: sums over all documents."""
        return self.table().sum(0)


def interval(
    sums: DocumentSums, statistic: Callable[[np.ndarray], np.ndarray], *, seed: int = 0, level: float = 0.95
) -> list[float] | None:
    """`results.bootstrap_interval` of the table of documents."""
    return bootstrap_interval(sums.table(), statistic, seed=seed, level=level)
