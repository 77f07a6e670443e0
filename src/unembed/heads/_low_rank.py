"""The low-rank head: `z = h B^T A^T + b`, a linear head whose matrix is a product of two narrow ones.

Shapes: n or * tokens, D hidden size, r rank, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unembed import ops
from unembed.heads._base import Head, start_of, uniform_
from unembed.heads._product import product

_RESOLVED = 1e-5  # of the largest singular value, above which a float64 Gram matrix keeps 6 digits
_BLOCK = 1 << 20  # numbers of `W` in float64 at once while it is factorised


def _reference(head: LowRank, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
    """Scores as the formula has them, in float64."""
    scores = hidden.double() @ (head.weight.double() @ head.projection.double()).T
    return scores if head.bias is None else scores + head.bias.double()


class LowRank(Head):
    r"""$z = h B^T A^T + b$ with A = `weight` [V, r] and B = `projection` [r, D]: `r (D + V)` multiply-adds a token.

    Args:
        in_features: D.
        out_features: V.
        rank: r; a quarter of D when None, at least 1. Above D it adds parameters but no rank.
        bias: Whether to add one number a class.
        device: Where the parameters are.
        dtype: Of the parameters.

    Attributes:
        fit_error: What `from_linear` could not keep: $\|W - A B\|_F / \|W\|_F$, before A and B are rounded to their
            dtype. None for a head that was not made so; not saved.
    """

    names = ("low_rank",)
    not_applicable: ClassVar[dict[str, str]] = {"from_linear": "the best fit of rank r, with its error in `fit_error`"}

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        rank: int | None = None,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        self.rank = max(1, in_features // 4) if rank is None else rank
        if self.rank < 1:
            raise ValueError(f"`rank` must be at least 1, got {rank}.")
        like = {"device": device, "dtype": dtype}
        self.fit_error: float | None = None
        self.weight = nn.Parameter(torch.empty(out_features, self.rank, **like))
        self.projection = nn.Parameter(torch.empty(self.rank, in_features, **like))
        self.bias = nn.Parameter(torch.empty(out_features, **like)) if bias else None
        self.reset_parameters()

    def options(self) -> dict[str, Any]:
        """As given to `__init__`."""
        return {"rank": self.rank, "bias": self.bias is not None}

    def reset_parameters(self) -> None:
        """Draw A, B and the bias as two `nn.Linear` after each other do."""
        uniform_(self.projection, self.in_features)
        uniform_(self.weight, self.rank)
        if self.bias is not None:
            uniform_(self.bias, self.rank)

    @property
    def rank_bound(self) -> int | None:
        """Rank r + 1, one more for a bias; r counts as D above that."""
        return min(min(self.rank, self.in_features) + 1 + (self.bias is not None), self.out_features)

    def flops(self) -> int:
        """`r (D + V)` multiply-adds."""
        return 2 * self.rank * (self.in_features + self.out_features)

    def forward(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Scores, in the dtype of the product."""
        return product(self._narrow(hidden), self.weight, self.bias)

    def terms(
        self,
        hidden: Float[Tensor, "*n D"],
        targets: Int[Tensor, "*n"],
        *,
        ignore_index: int = -100,
        spread: Float[Tensor, " V"] | None = None,
        chunk: int | None = None,
    ) -> tuple[Float[Tensor, "*n"], ...]:
        """By `ops.linear_terms` of `h B^T`."""
        flat, targets, shape = self.flattened(hidden, targets)
        found = ops.linear_terms(
            self._narrow(flat),
            self.weight,
            targets,
            bias=self.bias,
            ignore_index=ignore_index,
            spread=spread,
            chunk=chunk,
        )
        return tuple(part.reshape(shape) for part in found)

    def loss(
        self,
        hidden: Float[Tensor, "n D"],
        targets: Int[Tensor, " n"],
        coefficients: Float[Tensor, "n 4"],
        *,
        ignore_index: int = -100,
        spread: Float[Tensor, " V"] | None = None,
        chunk: int | None = None,
    ) -> Float[Tensor, ""]:
        """By `ops.linear_loss` of `h B^T`: three products of the scores, gradients included."""
        return ops.linear_loss(
            self._narrow(hidden),
            self.weight,
            targets,
            coefficients,
            bias=self.bias,
            ignore_index=ignore_index,
            spread=spread,
            chunk=chunk,
        )

    def _narrow(self, hidden: Tensor) -> Tensor:
        return product(hidden, self.projection)

    @classmethod
    def from_linear(cls, linear: Any, *, rank: int | None = None) -> Self:
        r"""The head of rank r nearest to a linear head: $A B$ is the truncated singular value decomposition of W.

        Both factors get the root of each singular value, so neither learns faster than the other. `fit_error` of the
        result is the relative distance; from rank D on (or the rank of W) it is 0 and the head starts as the linear
        one. Warns where the distance is more than the rounding of W.

        Args:
            linear: An `nn.Linear`, or a `Linear` head without soft-cap; its scale goes into A B and the bias.
            rank: As in `__init__`.

        Raises:
            ValueError: If the linear head has a soft-cap.
        """
        weight, bias = start_of(linear, cls)
        like = {"device": weight.device, "dtype": weight.dtype}
        head = cls(linear.in_features, linear.out_features, rank=rank, bias=bias is not None, **like)
        with torch.no_grad():
            head.fit_error = head._fit(weight)
            if head.bias is not None and bias is not None:
                head.bias.copy_(bias)
        if head.fit_error > torch.finfo(weight.dtype).eps:
            warnings.warn(
                f"{cls.__name__} starts {head.fit_error:.1e} (relative error of W) from the linear head: "
                f"rank {head.rank} of {linear.in_features}; see `fit_error`.",
                stacklevel=2,
            )
        return head

    def _fit(self, weight: Float[Tensor, "V D"]) -> float:
        """Make A B the best fit of W; its relative error."""
        kept = min(self.rank, *weight.shape)
        values, right = _right_singular(weight, kept)
        root = values[:kept].sqrt()
        share = torch.where(root > 0, 1 / torch.where(root > 0, root, 1.0), 0.0)
        self.weight.zero_()  # what is left over of a rank above D adds nothing, and can learn: its B is drawn
        step = max(1, _BLOCK // weight.shape[1])
        for start in range(0, len(weight), step):
            block = weight[start : start + step].double()
            self.weight[start : start + step, :kept] = ((block @ right[:, :kept]) * share).to(weight.dtype)
        self.projection[:kept] = (right[:, :kept] * root).T.to(weight.dtype)
        total, lost = values.square().sum(), values[kept:].square().sum()
        return float((lost / total).sqrt()) if total > 0 else 0.0

    @classmethod
    def examples(cls, in_features: int, out_features: int) -> Sequence[Self]:
        """Narrow, and as wide as D with a bias."""
        return [
            cls(in_features, out_features, rank=max(1, in_features // 2)),
            cls(in_features, out_features, rank=in_features, bias=True),
        ]


def _right_singular(weight: Float[Tensor, "V D"], kept: int) -> tuple[Float[Tensor, " D"], Float[Tensor, "D D"]]:
    """Singular values of W and its right singular vectors, one a column, in float64.

    Nothing here is larger than a block of rows. A Gram matrix squares the condition number, so where one of the `kept`
    values is too small for that, a QR over the blocks takes its place; it costs ten times as much.
    """
    step = max(weight.shape[1], _BLOCK // weight.shape[1])
    gram = weight.new_zeros(weight.shape[1], weight.shape[1], dtype=torch.float64)
    for block in weight.split(step):
        wide = block.double()
        gram.addmm_(wide.T, wide)
    squares, right = torch.linalg.eigh(gram)
    values = squares.clamp(min=0).sqrt().flip(0)
    if values[kept - 1] > _RESOLVED * values[0]:
        return values, right.flip(1)
    upper = ops.thin_r(block.double() for block in weight.split(step))
    _, values, right = torch.linalg.svd(upper, full_matrices=False)
    return values, right.T
