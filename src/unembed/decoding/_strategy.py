"""What a strategy is, and how what it wrote becomes a `Generation`."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from unembed.decoding._generation import Finish, Generation
from unembed.decoding._plan import Plan
from unembed.decoding._scorer import Scorer


@dataclass(frozen=True)
class Strategy:
    """Chooses tokens: an object with options, run on a scorer and a plan."""

    rewindable: ClassVar[bool] = False  # what its scorer must be able to do
    keep_hidden: ClassVar[bool] = False
    fused: ClassVar[bool] = False  # draws with `sample`: temperature, top-k, top-p and min-p then are no filters

    def run(self, scorer: Scorer, plan: Plan) -> Generation:
        """Read the prompts of the plan and write until each row ends."""
        raise NotImplementedError


@dataclass
class Written:
    """One sequence while it is written; fields as those of `Generation`."""

    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    drawn_log_probs: list[float] = field(default_factory=list)
    alternatives: list[tuple[Tensor, Tensor]] = field(default_factory=list)
    finish: Finish = "length"
    score: float | None = None
    text: str | None = None


def packed(found: Sequence[Sequence[Written]], plan: Plan, *, extra: dict[str, Any] | None = None) -> Generation:
    """Sequences of each prompt as tensors, on the device of the prompts."""
    sizes = (len(found), max(map(len, found), default=0))
    longest = max((len(one.tokens) for row in found for one in row), default=0)
    place = plan.prompts.device
    wide = torch.float32 if place.type == "mps" else torch.float64

    def each(of: Callable[[Written], Any], empty: Any, dtype: torch.dtype) -> Tensor:
        values = [[*map(of, row), *[empty] * (sizes[1] - len(row))] for row in found]
        return torch.tensor(values, dtype=dtype, device=place)

    def filled(name: str, empty: float, dtype: torch.dtype) -> Tensor:
        rest = [empty] * longest
        return each(lambda one: (own := getattr(one, name)) + rest[len(own) :], rest, dtype).view(*sizes, longest)

    ids, others = _alternatives(found, (*sizes, longest, plan.alternatives)) if plan.alternatives else (None, None)
    return Generation(
        tokens=filled("tokens", plan.pad_id, torch.int64),
        lengths=each(lambda one: len(one.tokens), 0, torch.int64),
        log_probs=filled("log_probs", 0.0, torch.float32),
        drawn_log_probs=filled("drawn_log_probs", 0.0, torch.float32),
        scores=each(_score, -math.inf, wide),
        finish=[[one.finish for one in row] for row in found],
        texts=None if plan.tokenizer is None else [[one.text or "" for one in row] for row in found],
        alternative_ids=None if ids is None else ids.to(place),
        alternative_log_probs=None if others is None else others.to(place),
        extra=extra or {},
    )


def _score(one: Written) -> float:
    return sum(one.drawn_log_probs) if one.score is None else one.score


def _alternatives(found: Sequence[Sequence[Written]], sizes: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Ids and log-probabilities; id 0 at `-inf` where there is no token."""
    ids, log_probs = torch.zeros(sizes, dtype=torch.int64), torch.full(sizes, -torch.inf)
    for b, row in enumerate(found):
        for r, one in enumerate(row):
            for place, (which, values) in enumerate(one.alternatives):
                ids[b, r, place], log_probs[b, r, place] = which.cpu(), values.cpu()
    return ids, log_probs
