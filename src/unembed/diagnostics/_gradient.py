"""UNE103 `gradient`: what part of the logit gradient the head lets through, against its null.

Definition and conventions: Eq. 10 of (Godey and Artzi, 2026, arXiv:2603.10145) is `destroyed`. Two conventions are
printed: raw `W`, and row-centred `W`, which does not change when a constant is added to all scores.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from unembed import ops
from unembed.diagnostics._accumulator import Accumulator
from unembed.diagnostics._bootstrap import DocumentSums, interval
from unembed.diagnostics._chunk import Chunk
from unembed.diagnostics._gradient_parts import (
    CENTRED,
    CODE,
    DIRECTIONS,
    FULL,
    RAW,
    alignment,
    bands,
    findings,
    interval_words,
    target_sums,
)
from unembed.diagnostics._head import LinearHead
from unembed.diagnostics._logit_gradient import LogitGradient, kept_energy, kept_null, kept_null_sd
from unembed.results import Result, Table


class Gradient(Accumulator):
    r"""Kept and destroyed share of the norm of the logit gradient.

    $$\text{kept} = \|G\Pi\|_F / \|G\|_F, \quad \text{destroyed} = \sqrt{1 - \text{kept}^2}, \quad
    \text{null} = \sqrt{r / V}$$

    The null is a mean over random subspaces. One of them keeps more or less, the more so the fewer directions the
    gradients go in; that spread is estimated too, from random directions.

    Args:
        head: The head under measurement.
        seed: Seed of the bootstrap and of the directions.
    """

    name = "gradient"
    code = CODE
    title = "Logit gradient that passes the head"
    needs_basis = True
    sums = ("_documents", "_targets", "_seen_along")
    settings = ("_seed",)

    def __init__(self, head: LinearHead, *, seed: int = 0) -> None:
        super().__init__(head)
        self._seed = seed
        self._documents = DocumentSums(3)
        self._targets = torch.zeros(head.vocab, 9, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        directions = torch.randn(head.vocab, DIRECTIONS, generator=generator)
        self._directions = directions.to(head.weight.device, torch.promote_types(head.weight.dtype, torch.float32))
        self._seen_along = torch.zeros(DIRECTIONS, DIRECTIONS, dtype=torch.float64)

    def add(self, chunk: Chunk) -> None:
        """Add the energies of one chunk."""
        gradient = LogitGradient(chunk)
        full = gradient.energy()
        raw, centred = kept_energy(self.head, gradient.coordinates())
        energies = torch.stack([full, raw, torch.zeros_like(raw) if centred is None else centred], dim=1)
        self._documents.add(chunk.documents, energies)
        seen = gradient.along(self._directions).cpu().to(torch.float64)
        self._seen_along += seen.T @ seen
        self._targets.index_add_(0, chunk.targets.cpu(), target_sums(energies))

    def result(self) -> Result:
        """Both conventions with null, ratio and interval; kept share by how often the target occurs."""
        if self.head.masked:
            return self._nothing("the bias masks ids with -inf: leave their rows out of the weight")
        total = self._documents.total()
        if not total[FULL] > 0:
            return self._nothing("no prediction with a gradient was seen")
        values: dict[str, Any] = {
            "tokens": int(total[0]),
            "documents": len(self._documents),
            "raw": self._convention(RAW),
            "centred": self._convention(CENTRED) if self.head.softcap is None else None,
            "interval": interval_words(self._documents),
            "mean_squared_norm": float(total[FULL] / total[0]),
            "before_softcap": self.head.softcap is not None,
        }
        said = tuple(findings(values, self.head.vocab))
        return Result(self.name, self.code, self.title, values, (self._bands(),), said)

    def _convention(self, column: int) -> dict[str, Any]:
        centre = column == CENTRED
        null = kept_null(self.head, centre=centre)
        total = self._documents.total()
        kept_squared = min(float(total[column] / total[FULL]), 1.0)
        ends = interval(self._documents, lambda sums: np.sqrt(sums[:, column] / sums[:, FULL]), seed=self._seed)
        return {
            "rank": self.head.svd.rank if centre else self.head.svd.rank_raw,
            "kept": math.sqrt(kept_squared),
            "destroyed": math.sqrt(1 - kept_squared),
            "kept_null": null,
            "ratio": math.sqrt(kept_squared) / null if null else None,
            "ratio_ci95": [end / null for end in ends] if ends and null else None,
            "ratio_null_sd": kept_null_sd(self.head, alignment(self._seen_along, total[FULL]), centre=centre),
        }

    def _bands(self) -> Table:
        centre = self.head.softcap is None
        leverage = ops.squared_norms(self.head.columns.centred) * self._targets[:, 0]
        null = kept_null(self.head, centre=centre)
        return bands(self._targets, leverage, null, column=CENTRED if centre else RAW)
