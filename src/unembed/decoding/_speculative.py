"""Speculative sampling with a draft model.

Shapes: V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from unembed.decoding._drawing import check_rows
from unembed.decoding._generation import Generation
from unembed.decoding._models import as_scorer, device_of, evaluating
from unembed.decoding._plan import Plan
from unembed.decoding._reader import Reader
from unembed.decoding._scorer import Scorer
from unembed.decoding._speculation import Draft, Row, speculate
from unembed.decoding._strategy import Strategy
from unembed.decoding.filters._base import Chain, Filter
from unembed.ops._whole import is_whole


@dataclass(frozen=True)
class Speculative(Strategy):
    """Draws from the model exactly as `Sample` does, in fewer calls of it: a smaller model drafts, the model checks.

    The distribution is that of the request (mask, filters, temperature, ...), whatever the draft is; only the number
    of calls depends on it (Leviathan et al., 2023, arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318). At a
    temperature of 0 the tokens are those of `Greedy`. Rows are written one after the other, so it pays for few rows.
    The draft obeys mask and filters too, and both see drafted tokens: a mask must depend on its history alone.

    `extra` has for each row: `drafted` tokens, those `tested` (drafts after the first one refused are not), `accepted`,
    `acceptance_rate` of those tested, and `target_calls`.

    Args:
        draft: What drafts: anything that `generate` takes as a model, with the same tokens.
        lookahead: Drafts a call of the model, at most.
        draft_filters: Further filters of the draft, as `Temperature(0)` for its most probable tokens.
        same_ids: Whether the first ids mean the same although the numbers of rows differ (padding rows): then the
            draft's scores are cut, or filled up with `-inf`, and it drafts nothing after an id that it has not. Else
            different numbers are refused.
    """

    rewindable: ClassVar[bool] = True
    draft: Any
    lookahead: int = 4
    draft_filters: Filter | Sequence[Filter] = ()
    same_ids: bool = False

    def __post_init__(self) -> None:
        if not is_whole(self.lookahead) or self.lookahead < 1:
            raise ValueError(f"`lookahead` must be a whole number of at least 1, got {self.lookahead!r}.")
        given = self.draft_filters
        if not isinstance(given, Filter | Iterable):
            raise ValueError(f"`draft_filters` must be a filter or a list of them, got {given!r:.80}.")
        object.__setattr__(self, "draft_filters", Chain((given,) if isinstance(given, Filter) else tuple(given)))

    def run(self, scorer: Scorer, plan: Plan) -> Generation:
        """Write the rows one after the other."""
        place = plan.prompts.device
        assert isinstance(self.draft_filters, Chain)
        check_rows(self.draft_filters, len(plan.prompts))
        own = as_scorer(self.draft, self, "draft")
        drafter = _DraftModel(self, Reader(own, device_of(self.draft, place)), plan)
        with evaluating(self.draft):
            return speculate(Reader(scorer, place), drafter, plan, self.lookahead)


class _DraftModel:
    """Drafts by a model of its own."""

    def __init__(self, options: Speculative, reader: Reader, plan: Plan) -> None:
        self._options, self._reader, self._plan = options, reader, plan
        self._classes = 0
        self._own: int | None = None  # ids of the draft

    def start(self, row: Row, target: Reader) -> None:
        """Read the prompt.

        Raises:
            ValueError: If the draft has another number of rows.
        """
        self._row, self._classes = row, target.classes
        if self._own is None:
            self._reader.start(torch.zeros_like(row.prompt[:1]))  # a prompt may hold ids that it does not have
            self._own = self._reader.classes
        if self._own != self._classes and not self._options.same_ids:
            raise ValueError(
                f"`draft` must score the {self._classes} ids of the model, got {self._own}; "
                "with `same_ids=True` the ids that only one of them has count as padding."
            )
        self._foreign = int(row.prompt.max()) >= self._own
        if not self._foreign:
            self._reader.start(row.prompt)

    def drafts(self, written: Sequence[int], count: int) -> list[Draft]:
        """Draw one after the other; none where the draft does not have all ids."""
        tokens, found = list(written), []
        assert self._own is not None
        if self._foreign or max(tokens, default=0) >= self._own:
            return found
        self._reader.keep(tokens)
        further = self._options.draft_filters
        assert isinstance(further, Chain)
        while len(found) < count:
            scores = self._fitted(self._reader.after(tokens, 1)[-1])
            draft = self._row.draft(scores, tokens, further)
            if draft is None:
                break
            found.append(draft)
            tokens.append(draft.token)
            if draft.token in self._plan.eos_ids:
                break
        return found

    def _fitted(self, scores: Float[Tensor, " V"]) -> Float[Tensor, " V"]:
        """Scores of the target's ids, on its device."""
        more = max(self._classes - len(scores), 0)
        scores = torch.nn.functional.pad(scores[: self._classes], (0, more), value=-torch.inf)
        return scores.to(self._plan.prompts.device)
