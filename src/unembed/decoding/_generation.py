"""What generation gives back.

Shapes: B prompts, R sequences a prompt, L tokens of the longest sequence, n alternatives.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from jaxtyping import Float, Int
from torch import Tensor

Finish = Literal["eos", "stop", "length", "dead end"]


@dataclass(frozen=True)
class Generation:
    """Sequences that were written, without their prompts; of beams the best first, of stochastic beams as drawn.

    R is the most sequences that a prompt has: a search may find fewer than were asked for.

    Args:
        tokens: Tokens, the one that ended a sequence included, `pad_id` after it.
        lengths: Tokens of each sequence; 0 where a search found fewer sequences than were asked for.
        log_probs: Log-probability of each token under the model's scores as they are: no temperature, no filter.
        drawn_log_probs: The same under the distribution that the strategy chose from, after filters and masks.
        scores: The sum of `drawn_log_probs`, over a power of the length for `Beam`, which ranks by it; `-inf` where
            there is no sequence.
        finish: Why each sequence ended: `eos`, `stop` (a stop string), `length`, or `dead end` (nothing allowed); of
            each prompt as many as it has sequences, and so are `texts`.
        texts: With a tokenizer: the text of each sequence, cut in front of its stop string.
        alternative_ids: The most probable tokens at each place, under the model's scores as they are.
        alternative_log_probs: Their log-probabilities.
        extra: What only this strategy has to tell, by name.
    """

    tokens: Int[Tensor, "B R L"]
    lengths: Int[Tensor, "B R"]
    log_probs: Float[Tensor, "B R L"]
    drawn_log_probs: Float[Tensor, "B R L"]
    scores: Float[Tensor, "B R"]
    finish: list[list[Finish]]
    texts: list[list[str]] | None = None
    alternative_ids: Int[Tensor, "B R L n"] | None = None
    alternative_log_probs: Float[Tensor, "B R L n"] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def sequences(self) -> list[list[int]]:
        """Tokens of every sequence, prompt by prompt, without padding; a dead end may have none. `metrics` take it."""
        return [row[:length] for row, length in self._rows(self.tokens)]

    def sequence_log_probs(self) -> list[list[float]]:
        """`log_probs` in the same form: padding counts nowhere."""
        return [row[:length] for row, length in self._rows(self.log_probs)]

    def _rows(self, table: Tensor) -> list[tuple[list[Any], int]]:
        both = zip(table.tolist(), self.lengths.tolist(), self.finish, strict=True)
        return [pair for own, lengths, finish in both for pair in zip(own[: len(finish)], lengths, strict=False)]
