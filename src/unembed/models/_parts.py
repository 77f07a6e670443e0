"""What every source of a head hands over before its values are checked."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from jaxtyping import Float
from torch import Tensor

from unembed.models._norm import FinalNorm
from unembed.models._tokens import Tokens
from unembed.results import Check

Kind = Literal["safetensors", "gguf", "object"]


@dataclass
class Parts:
    """A head taken out of its source.

    Args:
        where: Tensor and file, for messages.
        noise_eps: Relative spacing of the numbers as stored, where the dtype of `weight` does not say it.
        vocab_size: What the config says.
    """

    weight: Float[Tensor, "V D"]
    bias: Float[Tensor, " V"] | None
    softcap: float | None
    scale: float
    norm: FinalNorm | None
    tied: bool
    dtype: str
    kind: Kind
    architecture: str
    where: str
    noise_eps: float | None = None
    vocab_size: int | None = None
    tokens: Tokens | None = None
    checks: list[Check] = field(default_factory=list)
