"""UNE103 `gradient` of any head: at each token its Jacobian `dz/dh` stands in the place of `W`.

Shapes: D numbers in the hidden state of a token, V vocabulary, n predictions.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed import ops
from unembed.diagnostics._accumulator import Accumulator
from unembed.diagnostics._bootstrap import DocumentSums, interval
from unembed.diagnostics._chunk import Chunk
from unembed.diagnostics._gradient_parts import (
    CENTRED,
    CODE,
    DIRECTIONS,
    FULL,
    alignment,
    bands,
    findings,
    interval_words,
    target_sums,
)
from unembed.diagnostics._jacobian import WideHead
from unembed.diagnostics._logit_gradient import null_sd
from unembed.heads import Head
from unembed.heads._streamed import refuse_random
from unembed.results import InputError, Result

_EXPECTED = 4  # the column after those of `FULL` to `CENTRED`: energy that random subspaces keep


class HeadGradient(Accumulator):
    r"""Kept and destroyed share of the norm of the logit gradient of a head that need not be linear.

    At token n the body hears of $g_n = p_n - e_{y_n}$ through $J_n = \partial z / \partial h$, so with $\Pi_n$ the
    projector on the columns of the row-centred $J_n$, of rank $r_n$,
    $$\text{kept}^2 = \frac{\sum_n \|\Pi_n g_n\|^2}{\sum_n \|g_n\|^2}, \qquad
    \text{null}^2 = \frac{\sum_n \frac{r_n}{V - 1} \|g_n\|^2}{\sum_n \|g_n\|^2}$$
    For a linear head this is the row-centred convention of `Gradient`. There is no raw one: adding a function of h to
    all scores would change it, though no probability. A soft-cap is part of z here, and what is projected is the
    gradient after it.

    All is computed in float64 (float32 on MPS). A token costs D tangents of the head and $2 V D^2$ operations, and
    $V D$ numbers of memory: take a sample with `every`.

    The hidden state of a token is what `head.flattened` gives. For `MultiFacet` that is its summary of the block.

    Args:
        head: Any head of `unembed.heads`, or one of yours.
        every: Measure each prediction whose running number divides by this.
        seed: Seed of the bootstrap and of the directions.
    """

    name = "gradient"
    code = CODE
    title = "Logit gradient that passes the head"
    sums = ("_documents", "_targets", "_leverage", "_seen_along", "_classes", "_ranks")
    settings = ("_every", "_seed")
    head: Any  # a `Head`, where other measurements have a `LinearHead`

    def __init__(self, head: Any, *, every: int = 1, seed: int = 0) -> None:
        if not isinstance(head, Head):
            mend = "; wrap it: heads.Linear.from_linear(linear)" if isinstance(head, torch.nn.Linear) else ""
            raise ValueError(f"`head` must be one of unembed.heads, got {type(head).__name__}{mend}.")
        if head.sparse:
            raise ValueError(
                f"{type(head).__name__} gives exact zeros, whose logarithms have no gradient: measure its scores, as "
                "those of a heads.Linear with the same weight."
            )
        if every < 1:
            raise ValueError(f"`every` must be at least 1, got {every}.")
        self.head = head
        self._every, self._seed = every, seed
        self._wide = WideHead(head)
        self._documents = DocumentSums(4)
        self._targets = torch.zeros(head.out_features, 9, dtype=torch.float64)
        self._leverage = torch.zeros(head.out_features, dtype=torch.float64)
        generator = torch.Generator().manual_seed(seed)
        directions = torch.randn(head.out_features, DIRECTIONS, generator=generator)
        self._directions = directions.to(self._wide.device, self._wide.dtype)
        self._seen_along = torch.zeros(DIRECTIONS, DIRECTIONS, dtype=torch.float64)
        self._classes = torch.zeros((), dtype=torch.float64)  # that can occur, summed over tokens
        self._ranks = torch.zeros(head.out_features, dtype=torch.float64)  # tokens of each rank
        self._next = 0

    @property
    def device(self) -> torch.device:
        """Where the head's parameters are."""
        return self._wide.device

    def update(
        self,
        hidden: Float[Tensor, ...],
        targets: Int[Tensor, ...],
        *,
        documents: Int[Tensor, ...] | None = None,
        index: Int[Tensor, ...] | None = None,
    ) -> None:
        """Add predictions.

        Args:
            hidden: Hidden states in the shape that the head takes.
            targets: The tokens that followed; -100 is ignored.
            documents: Number of each prediction's document; one document when None.
            index: Running number of each prediction, for `every`; goes on from the last call when None.

        Raises:
            ValueError: If shapes do not fit or a target is no class.
            InputError: If a hidden state or a score holds NaN.
        """
        flat, flat_targets, shape = self.head.flattened(hidden, targets)
        ops.check_targets(flat_targets, self.head.out_features, -100)
        refuse_random(self.head)
        bad = int((~torch.isfinite(flat)).flatten(1).any(1).sum())
        if bad:
            raise InputError(f"`hidden` holds NaN or infinity in {bad} of {len(flat)} predictions.")
        for name, given in (("documents", documents), ("index", index)):
            if given is not None and tuple(given.shape) != shape:
                raise ValueError(f"Expected `{name}` {shape} like `targets`, got {tuple(given.shape)}.")
        count = len(flat_targets)
        index = torch.arange(self._next, self._next + count) if index is None else index.reshape(-1).cpu()
        documents = torch.zeros(count, dtype=torch.int64) if documents is None else documents.reshape(-1).cpu()
        self._next += count
        chosen = (flat_targets.cpu() != -100) & (index % self._every == 0)
        for place in chosen.nonzero().flatten().tolist():
            self._add(flat[place], int(flat_targets[place]), documents[place : place + 1])

    def add(self, chunk: Chunk) -> None:
        """Add the predictions of a chunk that was cut for a linear head of the same classes."""
        self.update(chunk.hidden, chunk.targets, documents=chunk.documents, index=chunk.index)

    def _add(self, hidden: Tensor, target: int, document: Int[Tensor, " 1"]) -> None:
        try:
            found = self._wide.gradient(hidden, target, self._directions)
        except ValueError as error:
            raise InputError(f"The gradient of a prediction of class {target} is no number: {error}.") from None
        expected = found.energy * found.rank / max(found.classes - 1, 1)
        energies = torch.tensor([[found.energy, 0.0, found.kept, expected]], dtype=torch.float64)
        self._documents.add(document, energies)
        self._targets[target] += target_sums(energies[:, :3])[0]
        self._leverage[target] += found.leverage
        self._seen_along += found.along[:, None] * found.along
        self._classes += found.classes
        self._ranks[found.rank] += 1

    def _same_head(self, other: Accumulator) -> bool:
        assert isinstance(other, HeadGradient), "`merge` has looked"
        if type(other.head) is not type(self.head) or other.head.options() != self.head.options():
            return False
        mine, others = self.head.state_dict(), other.head.state_dict()
        return mine.keys() == others.keys() and all(torch.equal(mine[name].cpu(), others[name].cpu()) for name in mine)

    def result(self) -> Result:
        """The row-centred convention with null, ratio and interval; kept share by how often the target occurs."""
        total = self._documents.total()
        if not total[FULL] > 0:
            return self._nothing("no prediction with a gradient was seen")
        numbers = self._centred(total)
        values: dict[str, Any] = {
            "tokens": int(total[0]),
            "documents": len(self._documents),
            "raw": None,
            "centred": numbers,
            "interval": interval_words(self._documents),
            "mean_squared_norm": float(total[FULL] / total[0]),
            "before_softcap": False,
        }
        table = bands(self._targets, self._leverage, numbers["kept_null"], column=CENTRED)
        said = tuple(findings(values, round(float(self._classes / total[0]))))
        return Result(self.name, self.code, self.title, values, (table,), said)

    def _centred(self, total: np.ndarray) -> dict[str, Any]:
        kept = math.sqrt(min(float(total[CENTRED] / total[FULL]), 1.0))
        null = math.sqrt(float(total[_EXPECTED] / total[FULL]))
        ends = null and interval(
            self._documents, lambda sums: np.sqrt(sums[:, CENTRED] / sums[:, _EXPECTED]), seed=self._seed
        )
        ranks = self._ranks.nonzero().flatten()
        size = round(float(self._classes / total[0])) - 1
        return {
            "rank": int(ranks[-1]),
            "rank_least": int(ranks[0]),
            "kept": kept,
            "destroyed": math.sqrt(1 - kept**2),
            "kept_null": null,
            "ratio": kept / null if null else None,
            "ratio_ci95": ends or None,
            "ratio_null_sd": null_sd(null**2 * size, size, alignment(self._seen_along, total[FULL])),
        }
