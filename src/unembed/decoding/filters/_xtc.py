"""Exclude top choices: now and then, take the most probable tokens out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unembed.decoding._history import History
from unembed.decoding.filters._base import Selection
from unembed.decoding.filters._parameters import Number, at_least_one, column, within


def _reference(scores: Float[Tensor, " V"], threshold: float, min_keep: int = 1) -> Bool[Tensor, " V"]:
    """One row whose coin says yes: of the tokens with `p >= threshold` only the last in order stays."""
    probabilities = torch.softmax(scores.double(), -1)
    order = sorted(range(len(scores)), key=lambda v: (-float(scores[v]), v))
    top = [v for v in order if float(probabilities[v]) >= threshold and float(scores[v]) > -torch.inf]
    kept = torch.ones_like(scores, dtype=torch.bool)
    left = int((scores > -torch.inf).sum()) - max(len(top) - 1, 0)
    if len(top) > 1 and left >= min_keep:
        kept[top[:-1]] = False
    return kept


@dataclass(frozen=True)
class XTC(Selection):
    """With a probability, exclude all tokens of `p >= threshold` but the least probable of them.

    The coin is the history's `coin`, from the request's own seed; without one, PyTorch's generator. Equal scores go
    by the lowest index, so the last of them stays. Introduced by P. E. Weidmann (text-generation-webui, 2024).

    Args:
        threshold: Tokens of at least this probability are top choices; above 0.5 there is never more than one.
        probability: How often they are excluded.
        min_keep: Nothing is excluded where fewer would be left.
    """

    threshold: Number
    probability: Number
    min_keep: int = 1

    def __post_init__(self) -> None:
        at_least_one(self.min_keep)
        within("threshold", self.threshold, 0, 1)
        within("probability", self.probability, 0, 1)

    def keep(self, scores: Float[Tensor, "B V"], history: History | None) -> Bool[Tensor, "B V"]:
        """All but the top choices, where the coin says so."""
        coin = torch.rand(len(scores), dtype=torch.float64) if history is None else history.tossed()
        finite = scores > -torch.inf
        threshold = column("threshold", self.threshold, scores).to(scores.dtype)
        top = (torch.softmax(scores, -1) >= threshold) & finite
        # The least probable of them: the smallest score, of equal ones the highest index.
        lowest = torch.where(top, scores, torch.inf).amin(-1, keepdim=True)
        index = torch.arange(scores.shape[-1], device=scores.device)
        last = torch.where(top & (scores == lowest), index, -1).amax(-1, keepdim=True)
        gone = top & (index != last)
        tossed = coin.to(scores.device)[:, None] < column("probability", self.probability, scores)
        enough = (finite & ~gone).sum(-1, keepdim=True) >= self.min_keep
        return ~(gone & tossed & enough)
