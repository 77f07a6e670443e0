"""The logit gradient of a chunk and its part in the column space of the head; the definition beside the fast form.

Shapes: n predictions, V vocabulary, D hidden size, r rank of the row-centred weight, q = r + 1, s rank of the weight.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed import ops
from unembed.diagnostics._chunk import Chunk
from unembed.diagnostics._head import LinearHead


def _reference(
    head: LinearHead, hidden: Float[Tensor, "n D"], targets: Int[Tensor, " n"], *, centre: bool = False
) -> tuple[Float[Tensor, "n V"], Float[Tensor, "n V"]]:
    """`G = P - Y` (before a soft-cap) and `G Pi` with the V x V projector written out, all in float64."""
    weight = head.weight.to(torch.float64)
    bias = None if head.bias is None else head.bias.to(torch.float64)
    scores = ops.linear_scores(hidden.to(torch.float64), weight, bias=bias, softcap=head.softcap, scale=head.scale)
    gradient = torch.softmax(scores, -1) - torch.nn.functional.one_hot(targets, head.vocab)
    if head.softcap is not None:
        uncapped = ops.linear_scores(hidden.to(torch.float64), weight, bias=bias, scale=head.scale)
        gradient = gradient / torch.cosh(uncapped / head.softcap) ** 2
    if centre:
        weight = weight - weight.mean(0)
    return gradient, gradient @ (weight @ torch.linalg.pinv(weight, rtol=1e-9))


class LogitGradient:
    """`G` of one chunk, without a V x V matrix and without the cancelling `p_y - 1`.

    With `q` as in `Chunk`: `G_v = q_v f_v` off the target and `-s f_y` on it, `f` the slope of the soft-cap or 1.
    The kept part is reached through an orthonormal basis, so its energy is computed directly and not as a difference.

    Args:
        chunk: The predictions.
    """

    def __init__(self, chunk: Chunk) -> None:
        head = chunk.head
        self.chunk = chunk
        self._scale = 1 / chunk.total
        self._off = chunk.unnormalised  # G off the target, times `total`
        self._on = chunk.missing  # minus G on the target
        if head.softcap is not None:
            # 1 - tanh^2(x / c) as cosh^-2(x / c): the difference is 0 in float32 from x = 9 c on.
            factor = torch.div(chunk.uncapped, head.softcap, out=chunk.room("slope"))
            factor.cosh_().square_().reciprocal_()
            self._on = self._on * factor.gather(1, chunk.targets[:, None]).squeeze(1)
            self._off = factor.mul_(self._off)

    def energy(self) -> Float[Tensor, " n"]:
        """`||g||^2` of each row, float64 on the CPU."""
        scale, on = self._scale.cpu().to(torch.float64), self._on.cpu().to(torch.float64)
        return ops.squared_norms(self._off) * scale**2 + on**2

    def coordinates(self) -> Float[Tensor, "n q"]:
        """Coordinates of `g` in the orthonormal basis `[col(W_c), 1/sqrt(V)]`, float64 on the CPU."""
        inside = self.along(self.chunk.head.columns.centred)
        if self.chunk.head.softcap is None:  # the rows of G sum to zero
            along_ones = inside.new_zeros(len(inside))
        else:
            along_ones = (self._off.sum(-1) * self._scale - self._on) / math.sqrt(self.chunk.head.vocab)
        return torch.cat([inside, along_ones[:, None]], dim=1).cpu().to(torch.float64)

    def along(self, directions: Float[Tensor, "V k"]) -> Float[Tensor, "n k"]:
        """`G` times a matrix."""
        # Hidden states may be float64 where the weight, and so the basis, is float32.
        off = self._off.to(directions.dtype) @ directions
        return off * self._scale[:, None] - self._on[:, None] * directions[self.chunk.targets]

    def dense(self) -> Float[Tensor, "n V"]:
        """`G` written out."""
        gradient = self._off * self._scale[:, None]
        return gradient.scatter_(1, self.chunk.targets[:, None], -self._on[:, None])


def kept_energy(head: LinearHead, coordinates: Float[Tensor, "n q"]) -> tuple[Tensor, Tensor | None]:
    """Energy of the kept gradient in the raw and in the row-centred convention, float64.

    Returns:
        `(raw, centred)`; centred is None under a soft-cap, whose `G` has rows that do not sum to zero.
    """
    raw = (coordinates @ head.columns.raw).square().sum(-1)
    return raw, coordinates[:, :-1].square().sum(-1) if head.softcap is None else None


def kept_dense(head: LinearHead, coordinates: Float[Tensor, "n q"], *, centre: bool) -> Float[Tensor, "n V"]:
    """The kept gradient `g Pi` written out, in the dtype of the basis."""
    basis = head.columns.centred
    if not centre:
        coordinates = (coordinates @ head.columns.raw) @ head.columns.raw.T
    inside = coordinates[:, :-1].to(basis.device, basis.dtype) @ basis.T
    if centre:
        return inside
    return inside + (coordinates[:, -1:] / math.sqrt(head.vocab)).to(basis.device, basis.dtype)


def kept_null_sd(head: LinearHead, alignment: float, *, centre: bool) -> float | None:
    """`null_sd` at the rank of the head."""
    rank = head.svd.rank if centre else head.svd.rank_raw
    return null_sd(float(rank), head.vocab - centre, alignment)


def null_sd(rank: float, size: int, alignment: float) -> float | None:
    r"""Standard deviation of `kept / kept_null` over random subspaces, to first order; None for the empty one.

    For a projector on a random r-dimensional subspace of n dimensions and $M = G^T G$,
    $$\mathrm{Var}\, \mathrm{tr}(\Pi M) = \frac{2 r (n - r)}{n (n - 1) (n + 2)}
    (\mathrm{tr} M^2 - (\mathrm{tr} M)^2 / n)$$

    Args:
        rank: r.
        size: n.
        alignment: $\mathrm{tr} M^2 / (\mathrm{tr} M)^2$: one over the number of directions the gradients go in.
    """
    if rank == 0:
        return None
    if rank >= size:
        return 0.0
    spread = 2 * rank * (size - rank) / (size * (size - 1) * (size + 2)) * max(alignment - 1 / size, 0.0)
    return math.sqrt(spread) / (2 * rank / size)


def kept_null(head: LinearHead, *, centre: bool) -> float:
    """`kept` of a random subspace of the same rank, root mean square: `sqrt(r / V)`, `sqrt(r / (V - 1))` centred."""
    if centre:
        return math.sqrt(head.svd.rank / (head.vocab - 1)) if head.vocab > 1 else 0.0
    return math.sqrt(head.svd.rank_raw / head.vocab)
