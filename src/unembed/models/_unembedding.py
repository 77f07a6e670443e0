"""`Unembedding`: the output layer of a model alone, from its weights.

Shapes: N tokens, D hidden size, V rows.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unembed.heads import Linear
from unembed.models import _checks as checks
from unembed.models._norm import FinalNorm
from unembed.models._parts import Kind, Parts
from unembed.models._save import save_head
from unembed.models._source import read_source
from unembed.ops import linear_scores
from unembed.results import Check, InputError


@dataclass(frozen=True, eq=False)
class Unembedding:
    r"""The output layer: final norm, matrix, bias, scale and soft-cap, and the tokens its rows stand for.

    $$z = \mathrm{cap}(s\,(n(x) W^T + b))$$

    Args:
        weight: The matrix with its padding rows, in the stored dtype (memory-mapped where the file allows); float32
            from a GGUF file, bfloat16 from 8-bit floats.
        bias: Added before scale and soft-cap.
        softcap: Cap of the scores.
        scale: Factor on the scores.
        norm: The final norm; None where the model has none or it is not known (see `integrity`).
        tied: Whether the matrix is the input embedding too.
        vocab_tokens: Size of the tokenizer: its largest id + 1. None without one.
        holes: Ids below `vocab_tokens` without a token.
        tokens: Token strings by id as stored, "" for holes. They are other people's text: show with `text.visible`.
        dtype: How the numbers are stored: `bfloat16`, `Q8_0`.
        source: Where the head came from.
        hash: SHA-256 of the values, equal for the same head in any format.
        kind: What the source is.
        architecture: Family: `model_type`, or GGUF's `general.architecture`.
        integrity: The checks, in order.
        noise_eps: Relative spacing of the numbers as stored; that of the weight's dtype when None.
    """

    weight: Float[Tensor, "V D"] = field(repr=False)
    bias: Float[Tensor, " V"] | None = field(default=None, repr=False)
    softcap: float | None = None
    scale: float = 1.0
    norm: FinalNorm | None = field(default=None, repr=False)
    tied: bool = False
    vocab_tokens: int | None = None
    holes: tuple[int, ...] = field(default=(), repr=False)
    tokens: list[str] | None = field(default=None, repr=False)
    dtype: str = ""
    source: str = "memory"
    hash: str | None = None
    kind: Kind = "object"
    architecture: str = "unknown"
    integrity: list[Check] = field(default_factory=list, repr=False)
    noise_eps: float | None = None

    def __post_init__(self) -> None:
        if not self.dtype:
            object.__setattr__(self, "dtype", str(self.weight.dtype).removeprefix("torch."))

    @classmethod
    def load(
        cls,
        source: str | Path | nn.Module,
        *,
        revision: str | None = None,
        norm: Literal["rms", "rms1p", "layer", "layer1p", "none"] | None = None,
        tokenizer: Any = None,
    ) -> Unembedding:
        """Read the head and nothing of the body, and check it.

        Args:
            source: A model folder (safetensors, whole or in shards), a .safetensors file beside its config.json, a
                .gguf file, a folder that `save` wrote, a hub id, or a causal language model in memory.
            revision: Branch, tag or commit of a hub id.
            norm: The final norm where the family's is not known: `rms`, `layer`; `rms1p` and `layer1p` where the file
                stores the gain minus one; `none`.
            tokenizer: A tokenizer object, or the path of one; what lies beside the weights when None.

        Raises:
            InputError: If there is no head to read. One line with the file, tensor or option and the mend.
            IntegrityError: If a check of the head failed.
        """
        if norm not in (None, "rms", "rms1p", "layer", "layer1p", "none"):
            raise InputError(f"`norm` must be rms, rms1p, layer, layer1p or none, got {norm!r}.")
        return cls._checked(*read_source(source, revision, norm, tokenizer))

    @classmethod
    def _checked(cls, parts: Parts, source: str) -> Unembedding:
        weight, tokens = parts.weight, parts.tokens
        rows = weight.shape[0]
        scan = checks.Scan.of(weight)
        found = [
            checks.require(check) for check in checks.check_values(scan, weight, parts.bias, parts.norm, parts.where)
        ]
        size = None if tokens is None else len(tokens.strings)
        holes = () if tokens is None else tokens.holes
        real = rows if size is None else min(size, rows)
        found.append(checks.check_zero_rows(scan, real))
        found += checks.check_vocabulary(rows, size, parts.vocab_size, holes)
        padding = checks.check_padding(weight, scan, real)
        ordered = sorted([*parts.checks, *found, *([padding] if padding else [])], key=lambda check: check.code)
        return cls(
            weight=weight,
            bias=parts.bias,
            softcap=parts.softcap,
            scale=parts.scale,
            norm=parts.norm,
            tied=parts.tied,
            vocab_tokens=size,
            holes=holes,
            tokens=None if tokens is None else tokens.strings,
            dtype=parts.dtype,
            source=source,
            hash=checks.content_hash(scan, weight, parts.bias, parts.norm),
            kind=parts.kind,
            architecture=parts.architecture,
            integrity=ordered,
            noise_eps=parts.noise_eps,
        )

    @property
    def vocab_rows(self) -> int:
        """V: rows of the matrix, padding included."""
        return self.weight.shape[0]

    @property
    def in_features(self) -> int:
        """D: width of the hidden states."""
        return self.weight.shape[1]

    @property
    def real_rows(self) -> int:
        """Rows below the tokenizer's size; all of them without a tokenizer."""
        return self.vocab_rows if self.vocab_tokens is None else min(self.vocab_tokens, self.vocab_rows)

    @property
    def padding(self) -> range:
        """Ids of the rows at or beyond the tokenizer's size."""
        return range(self.real_rows, self.vocab_rows)

    @property
    def rank_bound(self) -> int | None:
        """Bound on the rank of the log-probabilities: D + 1, one more for a bias; None under a soft-cap (MATH 2)."""
        if self.softcap is not None:
            return None
        return min(self.in_features + 1 + (self.bias is not None), self.real_rows)

    def scores(self, hidden: Float[Tensor, "*N D"], *, padding: bool = False) -> Float[Tensor, "*N V"]:
        """Scores over the rows that carry a token, in float32 or wider.

        Args:
            hidden: Hidden states after the final norm.
            padding: Over all rows of the matrix.
        """
        rows = self.vocab_rows if padding else self.real_rows
        bias = None if self.bias is None else self.bias[:rows]
        return linear_scores(hidden, self.weight[:rows], bias=bias, softcap=self.softcap, scale=self.scale)

    def to_head(self) -> Linear:
        """As a head to train or to start others from; shares the matrix, padding rows included, and not the norm."""
        options = {"bias": self.bias is not None, "softcap": self.softcap, "scale": self.scale}
        head = Linear(self.in_features, self.vocab_rows, device="meta", **options)
        head.weight = nn.Parameter(self.weight)
        if self.bias is not None:
            head.bias = nn.Parameter(self.bias)
        return head

    def to(self, device: str | torch.device) -> Unembedding:
        """The same head with its tensors on `device`."""
        return replace(
            self,
            weight=self.weight.to(device),
            bias=None if self.bias is None else self.bias.to(device),
            norm=None if self.norm is None else self.norm.to(device),
        )

    def save(self, folder: str | Path) -> Path:
        """Write `config.json`, `model.safetensors` and `tokens.json`, which `load` reads back bit-equal.

        The folder is written under a temporary name and renamed when it is whole.

        Raises:
            InputError: If `folder` exists and is not empty.
        """
        return save_head(self, Path(folder))

    def describe(self) -> dict[str, Any]:
        """The `head` block of `audit.json`."""
        return {
            "kind": "linear",
            "in_features": self.in_features,
            "vocab_rows": self.vocab_rows,
            "vocab_tokens": self.vocab_tokens,
            "tied": self.tied,
            "bias": self.bias is not None,
            "softcap": self.softcap,
            "scale": self.scale,
            "dtype": self.dtype,
            "padding_rows": len(self.padding),
            "holes": len(self.holes),
            "norm": None if self.norm is None else self.norm.kind,
            "rank_bound": self.rank_bound,
        }
