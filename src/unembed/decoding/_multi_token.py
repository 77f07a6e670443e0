"""Speculative sampling with a head that predicts several tokens: the model drafts for itself.

Shapes: T tokens read, n offsets, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.decoding._generation import Generation
from unembed.decoding._plan import Plan
from unembed.decoding._reader import Reader
from unembed.decoding._scorer import Scorer
from unembed.decoding._speculation import Draft, Row, speculate
from unembed.decoding._strategy import Strategy
from unembed.heads import MultiTokenPrediction
from unembed.ops import linear_scores

_UNKNOWN = -100


@dataclass(frozen=True)
class SelfSpeculative(Strategy):
    """Draws from the model exactly as `Sample` does, in fewer calls of it: its head drafts what it then checks.

    The model gives hidden states beside its scores: one of transformers, or a function as
    `lambda tokens: (head(hidden := body(tokens)), hidden)`. Drafts come from the hidden state of the last token read:
    parallel offsets each on their own (Gloeckle et al., 2024, arXiv:2404.19737), sequential ones each knowing the
    drafts before (DeepSeek-V3, 2024, arXiv:2412.19437); the latter read all tokens again for each draft, as their
    attention has no cache. What is kept, `extra`, and the order of rows are as for `Speculative`.

    Args:
        head: Its offsets draft. Offset 0 is that of the next token; what is written has the distribution of the model's
            own scores, whatever the head.
        lookahead: Drafts a call of the model, at most; as many as there are when None.
    """

    rewindable: ClassVar[bool] = True
    keep_hidden: ClassVar[bool] = True
    head: MultiTokenPrediction
    lookahead: int | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.head, MultiTokenPrediction):
            raise ValueError(f"`head` must be a MultiTokenPrediction, got {type(self.head).__name__}.")
        if self.lookahead is not None and not 1 <= self.lookahead <= self.head.n:
            raise ValueError(f"`lookahead` must lie in [1, {self.head.n}], got {self.lookahead}.")

    def run(self, scorer: Scorer, plan: Plan) -> Generation:
        """Write the rows one after the other."""
        # One state is read; behind it lie at most as many as there are drafts, and the token before them.
        memory = None if self.head.mode == "sequential" else self.head.n + 2
        lookahead = self.head.n if self.lookahead is None else self.lookahead
        target = Reader(scorer, plan.prompts.device, memory=memory)
        return speculate(target, _Offsets(self.head, plan), plan, lookahead)


class _Offsets:
    """Drafts by the offsets of a head."""

    def __init__(self, head: MultiTokenPrediction, plan: Plan) -> None:
        self._head, self._plan = head, plan

    def start(self, row: Row, target: Reader) -> None:
        """Look at the shapes.

        Raises:
            ValueError: If the head does not fit the model, or there are no hidden states.
        """
        self._row, self._target, self._prompt = row, target, row.prompt
        if target.hidden is None:
            raise ValueError("`head` drafts from hidden states, which the model does not give.")
        own, came = (self._head.in_features, self._head.out_features), (target.hidden.shape[-1], target.classes)
        if own != came:
            raise ValueError(f"`head` has sizes {own}, but the model's hidden size and ids are {came}.")

    def drafts(self, written: Sequence[int], count: int) -> list[Draft]:
        """Draw from the offsets that are ahead of what is written."""
        unread = len(written) - len(self._target.read)  # tokens that no hidden state knows: their offsets are past
        tokens, found = list(written), []
        if count < 1:
            return found
        for offset, state in self._states(tokens):
            if offset < unread:
                continue
            scores = linear_scores(state, self._head.weight, bias=self._head.bias)
            draft = self._row.draft(scores.to(self._plan.prompts.device), tokens)
            if draft is None:
                break
            found.append(draft)
            tokens.append(draft.token)
            if len(found) == count or draft.token in self._plan.eos_ids:
                break
        return found

    def _states(self, tokens: list[int]) -> Iterator[tuple[int, Float[Tensor, " D"]]]:
        """The hidden state of each offset after the last token read; `tokens` may grow meanwhile by the one it gave."""
        hidden = self._target.hidden
        assert hidden is not None
        if self._head.mode == "parallel":
            for offset, state in enumerate(self._head.states(hidden[-1:])):
                yield offset, state[-1]
            return
        inputs = torch.full((len(hidden), self._head.n - 1), _UNKNOWN, device=hidden.device)
        for offset, state in enumerate(self._head.states(hidden[None], inputs[None], ignore_index=_UNKNOWN)):
            yield offset, state[0, -1]
            if offset < self._head.n - 1:  # the next state reads this column, and not before
                inputs[:, offset] = self._ahead(tokens, offset + 1, len(hidden))

    def _ahead(self, tokens: list[int], ahead: int, count: int) -> Int[Tensor, " T"]:
        """Of each token read, the one so many places after it."""
        row = torch.cat([self._prompt, torch.tensor(tokens, dtype=torch.int64, device=self._prompt.device)])
        return row[ahead : ahead + count]
