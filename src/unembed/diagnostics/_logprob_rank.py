r"""UNE102 `logprob_rank`: rank of the log-probability matrix on real contexts, against its bound.

Without a soft-cap $A = s (H W^T + 1 b^T) - g 1^T$ has the factors `[sH, s1, -g]` and `[W, b, 1]`; a running QR of the
first and the known spectrum of the second give every singular value of `A` in float64, in memory no token adds to.
Whether the scores really have that form is measured too: what part of them lies outside `span(W, b, 1)`.
Under a soft-cap there is no bound (Yang et al., 2018, arXiv:1711.03953), and a random sketch of `A` gives a lower one.

Shapes: N tokens, D hidden size, V vocabulary, r rank of the row-centred weight.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from unembed import ops
from unembed.diagnostics._accumulator import Accumulator
from unembed.diagnostics._chunk import Chunk
from unembed.diagnostics._effective import effective_ranks
from unembed.diagnostics._head import LinearHead
from unembed.results import Finding, Result, Table

_LEVELS = tuple(10.0**-power for power in range(1, 9))
_OWN_ROUNDING = 8 * torch.finfo(torch.float64).eps  # singular values below this, relative, are that of our arithmetic
# What rounding the hidden states to their dtype can do to A, or what our own arithmetic does if that is more.
_RULE = "max(eps(hidden dtype) ||H||_F (1/sqrt(N) + 1/sqrt(D)) / sqrt(3) * scale * s_1(W), 8 eps(float64) ||A||_F)"
_PIECE = 1 << 15  # rows of W taken to float64 at a time


class LogprobRank(Accumulator):
    """Rank of `A[c, v] = log P(v | c)` on the contexts seen.

    Args:
        head: The head under measurement.
        every: The residual is measured on predictions whose running number is a multiple of this.
        seed: Seed of the sketch.
        hidden_eps: Relative precision of the hidden states, which sets the noise a rank must rise above.
    """

    name = "logprob_rank"
    code = "UNE102"
    title = "Rank of the log-probability matrix"
    needs_basis = True
    sums = ("_tokens", "_energy", "_residual")
    settings = ("_every", "_seed", "_eps")

    def __init__(self, head: LinearHead, *, every: int = 1, seed: int = 0, hidden_eps: float = 2**-23) -> None:
        super().__init__(head)
        if every < 1:
            raise ValueError(f"`every` must be at least 1, got {every}.")
        self._every, self._seed, self._eps = every, seed, hidden_eps
        self._tokens = 0
        self._energy = torch.zeros((), dtype=torch.float64)  # of the hidden states
        self._factor: Tensor | None = None
        self._residual = torch.zeros(3, dtype=torch.float64)  # tokens, energy outside the span, energy
        self._masked = head.bias is not None and not bool(torch.isfinite(head.bias).all())
        self._bias = None if head.bias is None or self._masked else _BiasParts(head)
        self._sketch = None if head.softcap is None else _Sketch(head, seed)
        most = head.width + 2 if self._sketch is None else self._sketch.width  # no rank is above this
        self._distinct = _Distinct(head.width, limit=most + 1, tolerance=max(1e-5, 4 * hidden_eps))

    def add(self, chunk: Chunk) -> None:
        """Add one chunk to the left factor, or to the sketch under a soft-cap."""
        if self._masked:
            return
        self._tokens += len(chunk)
        self._energy += ops.squared_norms(chunk.hidden).sum()
        self._distinct.add(chunk.hidden)
        lse = (chunk.total.log() + chunk.peak).cpu().to(torch.float64)
        if self._sketch is None:
            scaled = chunk.hidden.cpu().to(torch.float64) * self.head.scale
            ones = [] if self._bias is None else [torch.full((len(chunk), 1), self.head.scale, dtype=torch.float64)]
            rows = torch.cat([scaled, *ones, -lse[:, None]], dim=1)
        else:
            rows = self._sketch.rows(chunk.scores, lse)
        self._factor = ops.thin_r([rows] if self._factor is None else [self._factor, rows])
        taken = (chunk.index % self._every == 0).nonzero().squeeze(1)
        if len(taken):
            self._residual += self._outside(chunk.scores[taken])

    def _outside(self, scores: Float[Tensor, "n V"]) -> Float[Tensor, 3]:
        """Tokens, energy outside `span(W, b, 1)`, energy of the centred scores; the residual is formed in float64."""
        basis = self.head.columns.centred
        mean = _mean64(scores)
        # The bias has one direction more, orthogonal to both; zero without a bias.
        direction = torch.zeros(len(basis), dtype=torch.float64) if self._bias is None else self._bias.direction
        pieces = list(zip(basis.split(_PIECE), direction.split(_PIECE), scores.split(_PIECE, dim=1), strict=True))
        coordinates = torch.zeros(len(scores), basis.shape[1], dtype=torch.float64)
        along_bias = torch.zeros(len(scores), 1, dtype=torch.float64)
        energy = torch.zeros((), dtype=torch.float64)
        for rows, bias, part in pieces:
            part64 = part.cpu().to(torch.float64) - mean
            coordinates += part64 @ rows.cpu().to(torch.float64)
            along_bias += part64 @ bias[:, None]
            energy += part64.square().sum()
        outside = torch.zeros((), dtype=torch.float64)
        for rows, bias, part in pieces:
            rest = part.cpu().to(torch.float64) - mean - coordinates @ rows.cpu().to(torch.float64).T
            outside += (rest - along_bias * bias).square().sum()
        return torch.stack([torch.tensor(float(len(scores)), dtype=torch.float64), outside, energy])

    def merge(self, other: Accumulator) -> None:
        """Take over the sums and the factor of `other`."""
        super().merge(other)
        assert isinstance(other, LogprobRank)
        self._distinct.add(other._distinct.states)
        if other._factor is not None:
            self._factor = other._factor if self._factor is None else ops.thin_r([self._factor, other._factor])

    def state(self) -> dict[str, Tensor]:
        """The sums, the factor and the distinct contexts."""
        kept = super().state() | {"distinct": self._distinct.states}
        return kept | ({} if self._factor is None else {"factor": self._factor})

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Replace what `state` gives."""
        super().load_state(state)
        self._distinct.states = state["distinct"]
        self._factor = state.get("factor")

    def result(self) -> Result:
        """Numerical rank with its bound and tolerance, effective ranks, and the residual outside the span."""
        if self._masked:
            return self._nothing("the bias masks ids with -inf, so their log-probability is no number")
        if self._factor is None:
            return self._nothing("no prediction was seen")
        if self._sketch is None:
            raw, centred = self._singular_values()
        else:
            raw = centred = torch.linalg.svdvals(self._factor)
        columns = self.head.vocab if self._sketch is None else self._sketch.width
        noise, noise_centred = (self._noise(values, stretch) for values, stretch in self._stretches(raw, centred))
        rank = int((raw > noise).sum())
        size = min(self._tokens, columns)
        distinct = self._distinct.count
        if distinct is not None and distinct < rank:  # so near to each other that rounding and rank part ways
            distinct = None
        limit = size if distinct is None else min(size, distinct)
        values: dict[str, Any] = {
            "tokens": self._tokens,
            "distinct_contexts": distinct,
            "rank": rank,
            "rank_is": "exact" if self._sketch is None else "lower bound from a random sketch",
            "limit": limit if self._sketch is None else min(limit, self._factor.shape[1]),
            "bound": self.head.rank_bound,
            "tolerance": noise,
            "tolerance_rule": _RULE,
            "largest": float(raw[0]),
            "smallest_above_tolerance": float(raw[rank - 1]) if rank else None,
            "rank_at": {f"{level:.0e}": int((raw > level * raw[0]).sum()) for level in _LEVELS},
            **effective_ranks(raw.numpy()),
            "centred": None
            if self._sketch is not None
            else {
                "rank": int((centred > noise_centred).sum()),
                "tolerance": noise_centred,
                **effective_ranks(centred.numpy()),
            },
            "residual": math.sqrt(float(self._residual[1] / self._residual[2])) if self._residual[2] > 0 else None,
            "residual_tokens": int(self._residual[0]),
        }
        return Result(
            self.name, self.code, self.title, values, (_table(raw, centred, size),), (_finding(values, self.head),)
        )

    def _stretches(self, raw: Tensor, centred: Tensor) -> list[tuple[Tensor, float]]:
        """Singular values, and how much the head can stretch an error in a hidden state, raw and row-centred."""
        svd = self.head.svd
        sketch = 1.0 if self._sketch is None else self._sketch.norm
        scale = self.head.scale * sketch
        return [(raw, scale * float(svd.values_raw[0])), (centred, scale * float(svd.values[0]))]

    def _noise(self, values: Tensor, stretch: float) -> float:
        """Size of a singular value that rounding the hidden states can produce (`_RULE`)."""
        tokens, width = self._tokens, self.head.width
        # Twice the norm expected of a matrix of independent rounding errors, which has the shape of H, not of A.
        errors = self._eps * math.sqrt(float(self._energy)) * (1 / math.sqrt(tokens) + 1 / math.sqrt(width))
        own = _OWN_ROUNDING * float(torch.linalg.vector_norm(values))
        if self._sketch is not None:  # scores come in float32 one by one, so their rounding has the shape of A
            own = max(
                own, 2**-23 * float(torch.linalg.vector_norm(values)) / math.sqrt(min(tokens, self._sketch.width))
            )
        return max(errors / math.sqrt(3) * stretch, own)

    def _singular_values(self) -> tuple[Tensor, Tensor]:
        """Singular values of `A`, and of `A` with the mean of each row taken out."""
        assert self._factor is not None
        svd = self.head.svd
        root = math.sqrt(svd.rows)
        last = torch.zeros(1, svd.right.shape[1] + 2, dtype=torch.float64)
        last[0, -2] = root
        # Rows: the columns of [W, b, 1]; columns: coordinates along [U, 1/sqrt(V), the part of b outside both].
        real = torch.where(svd.values > svd.noise, svd.values, 0.0)
        right = [torch.cat([svd.right * real, root * svd.mean[:, None], torch.zeros(len(svd.mean), 1)], dim=1)]
        if self._bias is not None:
            right.append(
                torch.cat([self._bias.inside, last.new_tensor([root * self._bias.mean, self._bias.outside])])[None]
            )
        product = self._factor @ torch.cat([*right, last])
        without_ones = torch.cat([product[:, :-2], product[:, -1:]], dim=1)
        return torch.linalg.svdvals(product), torch.linalg.svdvals(without_ones)


class _Distinct:
    """Keeps hidden states that differ, up to `limit` of them, in the order they come.

    The first tokens of a document are often those of another, and equal contexts add nothing to a rank. Those of two
    batches differ by rounding. A state near two others counts by which came first, so after a merge the count may be
    off by such states.

    Args:
        width: D.
        limit: Stops here.
        tolerance: Largest difference of a coordinate between equal contexts, over the largest coordinate.
    """

    _ROWS = 256

    def __init__(self, width: int, *, limit: int, tolerance: float) -> None:
        self._limit, self._tolerance = limit, tolerance
        self.states = torch.zeros(0, width, dtype=torch.float64)

    @property
    def count(self) -> int | None:
        """Distinct states seen, None once there are `limit` of them."""
        return None if len(self.states) >= self._limit else len(self.states)

    def add(self, hidden: Float[Tensor, "n D"]) -> None:
        """Take over those states that are new."""
        for part in hidden.split(self._ROWS):
            if self.count is None:
                return
            wide = part.cpu().to(torch.float64)
            near = self._tolerance * wide.abs().amax(1, keepdim=True)
            known = (torch.cdist(wide, self.states, p=torch.inf) <= near).any(1).tolist()
            alike = torch.cdist(wide, wide, p=torch.inf) <= near
            fresh: list[int] = []
            for row, seen in enumerate(known):
                if not seen and not bool(alike[row, fresh].any()):
                    fresh.append(row)
            self.states = torch.cat([self.states, wide[fresh]])[: self._limit]


class _BiasParts:
    """The bias along the column space of `W_c`, along `1`, and outside both."""

    def __init__(self, head: LinearHead) -> None:
        assert head.bias is not None
        bias = head.bias.cpu().to(torch.float64)
        svd = head.svd
        self.mean = float(bias.mean())
        rank = svd.rank
        turn = svd.right[:, :rank] / svd.values[:rank]
        inside = torch.zeros(rank, dtype=torch.float64)
        pieces = list(zip(head.weight.split(_PIECE), bias.split(_PIECE), strict=True))
        for rows, part in pieces:
            inside += ((rows.cpu().to(torch.float64) - svd.mean) @ turn).T @ (part - self.mean)
        rests = [
            part - self.mean - ((rows.cpu().to(torch.float64) - svd.mean) @ turn) @ inside for rows, part in pieces
        ]
        rest = torch.cat(rests)
        self.outside = float(torch.linalg.vector_norm(rest))
        self.inside = torch.cat([inside, inside.new_zeros(len(svd.values) - rank)])
        self.direction = rest / self.outside if self.outside > 0 else rest


class _Sketch:
    """`A` times a random V x m matrix with one Gaussian entry a row: its rank is at most that of `A`."""

    def __init__(self, head: LinearHead, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.width = min(2 * (head.width + 2), head.vocab)
        # Every bucket is hit: a permutation, cut into V / m rounds.
        self._bucket = (torch.randperm(head.vocab, generator=generator) % self.width).to(head.weight.device)
        self._factor = torch.randn(head.vocab, generator=generator).to(head.weight.device)
        columns = torch.zeros(self.width, dtype=torch.float64)
        columns.index_add_(0, self._bucket.cpu(), self._factor.cpu().to(torch.float64).square())
        self.norm = math.sqrt(float(columns.max()))  # the columns do not overlap

    def rows(self, scores: Float[Tensor, "n V"], lse: Float[Tensor, " n"]) -> Float[Tensor, "n m"]:
        """Sketched log-probabilities in float64."""
        logprob = scores - lse[:, None].to(scores.device, scores.dtype)
        sketched = logprob.new_zeros(len(scores), self.width)
        return sketched.index_add_(1, self._bucket, logprob * self._factor).cpu().to(torch.float64)


def _mean64(scores: Float[Tensor, "n V"]) -> Float[Tensor, "n 1"]:
    parts = [part.sum(1, keepdim=True).cpu().to(torch.float64) for part in scores.split(_PIECE, dim=1)]
    return torch.stack(parts).sum(0) / scores.shape[1]


def _table(raw: Tensor, centred: Tensor, size: int) -> Table:
    count = min(len(raw), size)
    values = raw[:count].numpy()
    # `1` is no column of the row-centred matrix, so its list may be one shorter.
    values_centred = torch.nn.functional.pad(centred, (0, max(0, count - len(centred))))[:count].numpy()
    return Table(
        "logprob_rank_values",
        "Singular values of the log-probability matrix, largest first",
        {
            "index": np.arange(1, count + 1),
            "singular_value": values,
            "relative": values / max(values[0], np.finfo(float).tiny),
            "row_centred": values_centred,
        },
        {"relative": "over the largest", "row_centred": "of the matrix with the mean of each row taken out"},
    )


def _finding(values: dict[str, Any], head: LinearHead) -> Finding:
    span = "W, 1" if head.bias is None else "W, b, 1"
    residual = f"{values['residual']:.2g} of the centred scores lies outside span({span})" if values["residual"] else ""
    contexts = f"{values['tokens']:,} contexts"
    if values["distinct_contexts"] is not None:
        contexts += f" ({values['distinct_contexts']:,} of them distinct)"
    evidence = f"rank {values['rank']:,} on {contexts} at tolerance {values['tolerance']:.3g}; {residual}"
    if values["bound"] is None:
        return Finding(
            LogprobRank.code,
            "info",
            f"The soft-cap lifts the rank bound; a rank of at least {values['rank']:,} was seen",
            evidence,
            f"At most {values['limit']:,} could have shown, with {contexts} and a sketch of "
            f"{min(2 * (head.width + 2), head.vocab):,} columns.",
            "No bound does not mean that any distribution can be expressed.",
        )
    distinct = values["distinct_contexts"]
    short = distinct is not None and distinct < values["bound"]
    return Finding(
        LogprobRank.code,
        "info",
        f"{distinct:,} distinct contexts are too few for the bound: {values['rank']:,} of {values['bound']:,} "
        "dimensions seen"
        if short
        else f"Log-probabilities use {values['rank']:,} of {values['bound']:,} possible "
        f"dimensions, V is {head.vocab:,}",
        evidence,
        "Fewer distinct contexts than the bound were measured, so the bound could not be reached."
        if short
        else "Whatever the body learns, log-probabilities over all contexts stay in a space of that dimension.",
        "A bound that is met limits what can be expressed exactly; whether the loss would fall without it is open."
        if values["rank"] == values["bound"]
        else "A rank below the bound is that of these contexts above the tolerance: hidden states may leave directions "
        "out (those of a LayerNorm without a bias do), or lie below the rounding of their dtype.",
    )
