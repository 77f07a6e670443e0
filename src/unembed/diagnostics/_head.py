"""The linear head as the measurements see it: real rows only, with its spectra and column spaces made once."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from unembed import ops
from unembed.heads import Linear

if TYPE_CHECKING:
    from collections.abc import Sequence

    from unembed.models import Unembedding


@dataclass(frozen=True)
class LinearHead:
    """`z = softcap(scale * (h W^T + b))` over the rows that carry a token.

    Args:
        weight: Unembedding matrix without padding rows, stored dtype or wider.
        bias: As `weight`.
        softcap: Cap of the scores, None for none.
        scale: Positive factor on the scores.
        tokens: Token strings by id, raw.
        noise_eps: Relative spacing of the numbers as stored, for rank tolerances; that of the dtype when None.
        extra_rows: The padding rows that were left out, None without any.
        extra_bias: Their bias.
    """

    weight: Float[Tensor, "V D"]
    bias: Float[Tensor, " V"] | None = None
    softcap: float | None = None
    scale: float = 1.0
    tokens: Sequence[str] | None = None
    noise_eps: float | None = None
    extra_rows: Float[Tensor, "P D"] | None = None
    extra_bias: Float[Tensor, " P"] | None = None

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ValueError(f"`scale` must be positive, got {self.scale}.")
        # Parameters may be given; a measurement that kept their graph would grow with every token.
        for name in ("weight", "bias", "extra_rows", "extra_bias"):
            tensor = getattr(self, name)
            if tensor is not None:
                object.__setattr__(self, name, tensor.detach())

    @classmethod
    def of(
        cls,
        unembedding: Unembedding | Linear,
        *,
        weight: Float[Tensor, "V D"] | None = None,
        device: str | torch.device = "cpu",
    ) -> LinearHead:
        """The head of a loaded `models.Unembedding` or a `heads.Linear`, in float32 or wider on `device`.

        Args:
            unembedding: The loaded head.
            weight: A tensor with the same values to use in place of its own, so that only one copy need stay alive.
            device: Where to measure.
        """
        weight = (unembedding.weight if weight is None else weight).detach().to(device)
        weight = weight.to(torch.promote_types(weight.dtype, torch.float32))
        if isinstance(unembedding, Linear):
            bias = None if unembedding.bias is None else unembedding.bias.to(device, weight.dtype)
            eps = torch.finfo(unembedding.weight.dtype).eps
            return cls(weight, bias, unembedding.softcap, unembedding.scale, noise_eps=eps)
        real = unembedding.real_rows
        bias = None if unembedding.bias is None else unembedding.bias.detach().to(device, weight.dtype)
        eps = torch.finfo(unembedding.weight.dtype).eps if unembedding.noise_eps is None else unembedding.noise_eps
        return cls(
            weight=weight[:real],
            bias=None if bias is None else bias[:real],
            softcap=unembedding.softcap,
            scale=unembedding.scale,
            tokens=unembedding.tokens,
            noise_eps=eps,
            extra_rows=weight[real:] if real < len(weight) else None,
            extra_bias=None if bias is None or real == len(weight) else bias[real:],
        )

    @property
    def vocab(self) -> int:
        """V: rows that carry a token."""
        return self.weight.shape[0]

    @property
    def rows(self) -> int:
        """V and the padding rows."""
        return self.vocab + (0 if self.extra_rows is None else len(self.extra_rows))

    @property
    def masked(self) -> bool:
        """Whether the bias gives ids probability 0; null and basis would count their rows all the same."""
        return self.bias is not None and bool((self.bias == -torch.inf).any())

    @property
    def width(self) -> int:
        """D: size of a hidden state."""
        return self.weight.shape[1]

    @property
    def rank_bound(self) -> int | None:
        """Bound on the rank of the log-probability matrix: D + 1, one more for a bias, None under a soft-cap."""
        if self.softcap is not None:
            return None
        return min(self.width + 1 + (self.bias is not None), self.vocab)

    @cached_property
    def svd(self) -> ops.TallSVD:
        """Spectra of the weight, raw and row-centred."""
        return ops.tall_svd(self.weight, noise_eps=self.noise_eps)

    @cached_property
    def columns(self) -> ops.ColumnSpace:
        """Column spaces of the weight, raw and row-centred."""
        return ops.column_space(self.weight, self.svd)

    def scores(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N V"]:
        """Scores in float32 or wider."""
        return ops.linear_scores(hidden, self.weight, bias=self.bias, softcap=self.softcap, scale=self.scale)

    def extra_scores(self, hidden: Float[Tensor, "*N D"]) -> Float[Tensor, "*N P"] | None:
        """Scores of the padding rows, None without any."""
        if self.extra_rows is None:
            return None
        return ops.linear_scores(hidden, self.extra_rows, bias=self.extra_bias, softcap=self.softcap, scale=self.scale)
