"""The k largest scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unembed.decoding._history import History
from unembed.decoding._largest import largest
from unembed.decoding.filters._base import Selection
from unembed.decoding.filters._parameters import Number, at_least_one, beside, whole


def _reference(scores: Float[Tensor, " V"], k: int, min_keep: int = 1) -> Bool[Tensor, " V"]:
    """One row: the first k by score, equal ones by number."""
    order = sorted(range(len(scores)), key=lambda v: (-float(scores[v]), v))
    kept = torch.zeros_like(scores, dtype=torch.bool)
    kept[order[: max(k, min_keep)]] = True
    return kept


@dataclass(frozen=True)
class TopK(Selection):
    """Exactly the k largest scores, equal ones by the lowest index; all where there are no more (Fan et al., 2018).

    Args:
        k: Scores to keep (arXiv:1805.04833).
        min_keep: Kept at least.
    """

    k: Number
    min_keep: int = 1

    def __post_init__(self) -> None:
        at_least_one(self.min_keep)
        whole("k", self.k, 1)

    def keep(self, scores: Float[Tensor, "B V"], history: History | None) -> Bool[Tensor, "B V"]:
        """The first k of each row."""
        ids, within_k = self._first(scores)
        return torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, ids, within_k)

    def apply(self, scores: Float[Tensor, "B V"], history: History | None) -> Float[Tensor, "B V"]:
        """Scores of what is kept, `-inf` elsewhere."""
        ids, within_k = self._first(scores.detach())
        if ids.shape[-1] == scores.shape[-1] and bool(within_k.all()):
            return scores
        kept = torch.where(within_k, scores.gather(-1, ids), -torch.inf)
        return torch.full_like(scores, -torch.inf).scatter(-1, ids, kept)

    def _first(self, scores: Float[Tensor, "B V"]) -> tuple[Int[Tensor, "B k"], Bool[Tensor, "B k"]]:
        """As many of the largest as any row keeps, and which of them a row keeps."""
        width = scores.shape[-1]
        each = beside("k", self.k, scores) if isinstance(self.k, Tensor) else torch.full((1, 1), int(self.k))
        each = each.to(scores.device).long().clamp(min(self.min_keep, width), width).expand(len(scores), 1)
        most = int(each.amax()) if len(each) else 1
        if bool((each == width).all()):
            ids = torch.arange(width, device=scores.device).expand(scores.shape)
            return ids, torch.ones_like(ids, dtype=torch.bool)
        return largest(scores, most).indices, torch.arange(most, device=scores.device) < each
