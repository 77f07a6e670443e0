"""UNE104 `coefficients`: the logit gradient's coefficients in order of size, before and after the head.

After Figure 7 of (Godey and Artzi, 2026, arXiv:2603.10145), with what a random subspace would leave of them.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.diagnostics._accumulator import Accumulator
from unembed.diagnostics._chunk import Chunk
from unembed.diagnostics._head import LinearHead
from unembed.diagnostics._logit_gradient import LogitGradient, kept_dense
from unembed.results import Finding, Result, Table

_KINDS = ("full", "kept_raw", "kept_centred")
_HEAD_RANKS = (1, 10, 100)


class Coefficients(Accumulator):
    """Mean, spread and energy of the full and of the kept coefficients by rank of the full one.

    Each token's coefficients are ordered by the absolute value of the full gradient (ties by lowest id). Ranks are
    single up to 16 and grouped beyond. Needs a full sort a token, so it takes every `every`-th prediction.

    Args:
        head: The head under measurement.
        every: Takes the predictions whose running number is a multiple of this.
    """

    name = "coefficients"
    code = "UNE104"
    title = "Coefficients of the gradient, in order of size"
    needs_basis = True
    sums = ("_tokens", "_sums")
    settings = ("_every",)

    def __init__(self, head: LinearHead, *, every: int = 1) -> None:
        super().__init__(head)
        if every < 1:
            raise ValueError(f"`every` must be at least 1, got {every}.")
        self._every = every
        self._edges = _rank_edges(head.vocab)
        self._tokens = 0
        # [kind, group, (sum, sum of squares)]
        self._sums = torch.zeros(len(_KINDS), len(self._edges) - 1, 2, dtype=torch.float64)

    def add(self, chunk: Chunk) -> None:
        """Add the sampled predictions of one chunk."""
        taken = (chunk.index % self._every == 0).nonzero().squeeze(1)
        if len(taken) == 0:
            return
        part = Chunk(self.head, chunk.hidden[taken], chunk.targets[taken], chunk.documents[taken], chunk.index[taken])
        gradient = LogitGradient(part)
        full, coordinates = gradient.dense(), gradient.coordinates()
        order = full.abs().argsort(dim=-1, descending=True, stable=True)
        self._accumulate(0, full, order)
        self._accumulate(1, kept_dense(self.head, coordinates, centre=False), order)
        if self.head.softcap is None:
            self._accumulate(2, kept_dense(self.head, coordinates, centre=True), order)
        self._tokens += len(part)

    def _accumulate(self, kind: int, values: Float[Tensor, "n V"], order: Int[Tensor, "n V"]) -> None:
        ordered = values.gather(1, order)
        for group, (start, end) in enumerate(zip(self._edges[:-1], self._edges[1:], strict=True)):
            part = ordered[:, start:end].cpu().to(torch.float64)
            self._sums[kind, group, 0] += part.sum()
            self._sums[kind, group, 1] += part.square().sum()

    def result(self) -> Result:
        """The profile, and the share of the energy in the largest coefficients."""
        if self.head.masked:
            return self._nothing("the bias masks ids with -inf: leave their rows out of the weight")
        if self._tokens == 0:
            return self._nothing("no prediction was sampled")
        starts, ends = np.array(self._edges[:-1]), np.array(self._edges[1:])
        count = self._tokens * (ends - starts)
        kinds = _KINDS if self.head.softcap is None else _KINDS[:2]
        columns: dict[str, np.ndarray] = {"rank_from": starts + 1, "rank_to": ends}
        for kind, name in enumerate(kinds):
            total, squares = self._sums[kind, :, 0].numpy(), self._sums[kind, :, 1].numpy()
            mean = total / count
            columns[f"{name}_mean"] = mean
            columns[f"{name}_sd"] = np.sqrt(np.maximum(squares / count - mean**2, 0))
            columns[f"{name}_energy"] = squares / max(squares.sum(), np.finfo(float).tiny)
        for kind in kinds[1:]:
            columns[kind.replace("kept", "null") + "_energy"] = random_share(
                columns["full_energy"],
                ends - starts,
                self.head.svd.rank if kind == "kept_centred" else self.head.svd.rank_raw,
                # Row-centred, the subspace is drawn inside the complement of the ones, where the gradient lies.
                self.head.vocab - (kind == "kept_centred"),
            )
        values: dict[str, Any] = {"tokens": self._tokens, "every": self._every}
        for name in (*_KINDS, "null_raw", "null_centred"):
            if f"{name}_energy" not in columns:
                values[name] = None
                continue
            shares = np.cumsum(columns[f"{name}_energy"])
            values[name] = {
                f"energy_top_{top}": float(shares[np.searchsorted(ends, min(top, self.head.vocab))])
                for top in _HEAD_RANKS
            }
        notes = {
            "rank_from": "first rank of the group, 1 is the largest full coefficient",
            "full_mean": "mean of P - Y over tokens and ranks",
            "full_sd": "standard deviation over tokens and ranks",
            "full_energy": "share of the squared norm",
            "kept_raw_mean": "the same after projection on col(W)",
            "kept_centred_mean": "the same after projection on col(W - 1 mean^T)",
            "null_raw_energy": "expected after a random subspace of the rank of W",
            "null_centred_energy": "expected after a random subspace of the rank of W - 1 mean^T",
        }
        notes = {name: note for name, note in notes.items() if name in columns}
        table = Table("coefficients_profile", "Coefficients by rank of the full gradient", columns, notes)
        return Result(self.name, self.code, self.title, values, (table,), (_finding(values),))


def _rank_edges(vocab: int) -> list[int]:
    """0, 1, ..., 16, then about twelve groups a decade that meet 100 exactly, and V."""
    edges = [*range(17), *np.unique(np.round(np.logspace(np.log10(17), 2, 10))).astype(int).tolist()]
    if vocab > 100:
        groups = max(2, int(12 * np.log10(vocab / 100)))
        edges += np.unique(np.round(np.logspace(2, np.log10(vocab), groups))).astype(int).tolist()
    return sorted({edge for edge in edges if edge < vocab} | {vocab})


def random_share(full: np.ndarray, widths: np.ndarray, rank: int, size: int) -> np.ndarray:
    r"""Expected share of the kept energy by group of coordinates, for a random subspace.

    For a projector $\Pi$ on a random r-dimensional subspace of n dimensions and a unit vector g,
    $E (\Pi g)_i^2 = b + (a - b) g_i^2$ with $a = E \Pi_{11}^2 = r (r + 2) / (n (n + 2))$ and
    $b = E \Pi_{12}^2 = r (n - r) / (n (n - 1) (n + 2))$. Inside the complement of the ones n is V - 1, and the b of a
    coordinate is shared out over V.

    Args:
        full: Share of the full energy in each group.
        widths: Coordinates in each group.
        rank: r.
        size: n.
    """
    if rank < 1:
        return np.zeros(len(full))
    if size < 2 or rank >= size:
        return np.asarray(full, dtype=float)
    same = rank * (rank + 2) / (size * (size + 2))
    other = rank * (size - rank) / (size * (size - 1) * (size + 2))
    even = widths * (size / widths.sum())
    return (even * other + (same - other) * full) / (rank / size)


def _finding(values: dict[str, Any]) -> Finding:
    name = "raw" if values["kept_centred"] is None else "centred"
    full, kept, null = (values[key]["energy_top_10"] for key in ("full", f"kept_{name}", f"null_{name}"))
    return Finding(
        Coefficients.code,
        "info",
        f"The ten largest coefficients hold {100 * full:.2f} % of the gradient's energy before the head, "
        f"{100 * kept:.2f} % after",
        f"after a random subspace of the same rank {100 * null:.2f} % in expectation; shares of the squared norm over "
        f"{values['tokens']:,} sampled tokens, {'raw' if name == 'raw' else 'row-centred'} convention",
        "What remains outside the top is spread over tokens that were hardly predicted.",
        "Energy in the tail need not be noise: a projection moves it there for any subspace that is not aligned with "
        "the coordinate axes, a random one included. More than the random share says that the head is aligned with "
        "the coefficients that matter, not that training is better for it.",
    )
