"""A scorer of one row that is told which tokens the row has now, and reads or forgets what differs.

Shapes: T tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.decoding._scorer import Scorer


class Reader:
    """Scores after tokens of one row.

    Args:
        scorer: Made `rewindable`.
        device: Where its tokens go in.
        memory: Hidden states to keep, of the last tokens; all when None. There are none where the scorer keeps none.
    """

    def __init__(self, scorer: Scorer, device: torch.device, *, memory: int | None = 0) -> None:
        self._scorer, self._device, self._memory = scorer, device, memory
        self.calls = 0
        self.read: list[int] = []
        self.hidden: Float[Tensor, "T D"] | None = None
        self._scores: Float[Tensor, "count V"] = torch.empty(0, 0)

    @property
    def classes(self) -> int:
        """V."""
        return self._scores.shape[-1]

    def start(self, prompt: Int[Tensor, " T"]) -> None:
        """Read a prompt."""
        tokens = prompt[None].to(self._device)
        self._scores = self._scorer.start(tokens, torch.ones_like(tokens, dtype=torch.bool))
        self.calls, self.read, self.hidden = 1, [], None
        self._remember(len(prompt))

    def keep(self, tokens: Sequence[int]) -> None:
        """Forget what these tokens after the prompt do not begin with.

        Of the tokens read since the last call, that is: caches with a window then drop what lies further back.
        """
        same = 0
        for one, other in zip(self.read, tokens, strict=False):
            if one != other:
                break
            same += 1
        count = len(self.read) - same
        self._scorer.rewind(count)
        self.read = self.read[:same]
        self._scores = self._scores[: max(len(self._scores) - count, 0)]
        if self.hidden is not None:
            self.hidden = self.hidden[: max(len(self.hidden) - count, 0)]

    def after(self, tokens: Sequence[int], count: int) -> Float[Tensor, "count V"]:
        """Read on to the end of these tokens; scores after their last `count` places, the last after all of them."""
        known = len(self.read)
        assert self.read == list(tokens[:known])
        fresh = torch.tensor([tokens[known:]], dtype=torch.int64, device=self._device)
        if fresh.numel():
            self._scores = torch.cat([self._scores, self._scorer.extend(fresh)[0]])
            self.calls += 1
            self.read = list(tokens)
            self._remember(fresh.numel())
        self._scores = self._scores[-count:]
        assert len(self._scores) == count
        return self._scores

    def _remember(self, count: int) -> None:
        """Keep the hidden states of the tokens read last."""
        if self._memory == 0 or self._scorer.hidden is None:
            return
        new = self._scorer.hidden[0, -count:]
        whole = new if self.hidden is None else torch.cat([self.hidden, new])
        self.hidden = whole if self._memory is None else whole[-self._memory :]
