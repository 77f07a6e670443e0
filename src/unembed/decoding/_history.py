"""The tokens of each row so far: what penalties, n-gram rules and minimum lengths look at.

Shapes: B rows, T tokens of the longest row, t of a window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor


@dataclass(frozen=True)
class History:
    """Tokens so far, which of them the model wrote, and one uniform draw a row for filters that are random.

    Args:
        tokens: One row each, the last token in the last column; -1 in front where a row is shorter.
        written: How many of the last tokens the model wrote; the others are the prompt. All of them when None.
        coin: Uniform on [0, 1), or a function that gives it (see `tossed`); from PyTorch's own generator when None.
        rows: The row of the request that each one belongs to, for masks and filters that differ by row.
    """

    tokens: Int[Tensor, "B T"]
    written: Int[Tensor, " B"] | None = None
    coin: Float[Tensor, " B"] | Callable[[], Float[Tensor, " B"]] | None = None
    rows: Int[Tensor, " B"] | None = None

    def __post_init__(self) -> None:
        tokens = self.tokens
        if tokens.ndim != 2 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise ValueError(f"`history` must be integers [B, T], got {tokens.dtype} {tuple(tokens.shape)}.")
        for name in ("written", "coin", "rows"):
            value = getattr(self, name)
            if isinstance(value, Tensor) and tuple(value.shape) != (len(tokens),):
                raise ValueError(f"`{name}` must have shape [{len(tokens)}], got {tuple(value.shape)}.")

    @classmethod
    def of(
        cls,
        prompts: Sequence[Sequence[int]],
        outputs: Sequence[Sequence[int]],
        *,
        device: torch.device | str | None = None,
    ) -> History:
        """From the prompt and the tokens written so far of each row, of any lengths."""
        rows = [[*prompt, *output] for prompt, output in zip(prompts, outputs, strict=True)]
        width = max(map(len, rows), default=0)
        padded = [[-1] * (width - len(row)) + row for row in rows]
        tokens = torch.tensor(padded, dtype=torch.int64, device=device).reshape(len(rows), width)
        return cls(tokens, torch.tensor([len(output) for output in outputs], dtype=torch.int64, device=device))

    def tossed(self) -> Float[Tensor, " B"]:
        """One uniform draw a row, for a filter that is random: only such a filter moves a generator."""
        if self.coin is None:
            return torch.rand(len(self.tokens), dtype=torch.float64)
        return self.coin if isinstance(self.coin, Tensor) else self.coin()

    def part(self, scope: str, window: int | None = None) -> Int[Tensor, "B t"]:
        """The tokens of a scope, `all`, `written` or `prompt`; -1 elsewhere.

        Args:
            scope: Which tokens.
            window: Only the last columns, so many; all when None.
        """
        tokens = self.tokens if window is None else self.tokens[:, max(0, self.tokens.shape[1] - window) :]
        if scope == "all" or (self.written is None and scope == "written"):
            return tokens
        if self.written is None:
            return torch.full_like(tokens, -1)
        width = tokens.shape[1]
        place = torch.arange(width, device=tokens.device)
        own = place >= width - self.written.to(place.device)[:, None]
        return tokens.masked_fill(~own if scope == "written" else own, -1)

    def lengths(self) -> Int[Tensor, " B"]:
        """Tokens written so far of each row."""
        return (self.tokens >= 0).sum(1) if self.written is None else self.written
