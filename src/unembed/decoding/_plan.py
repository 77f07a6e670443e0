"""What a request asks of every strategy: rules on scores, ends, noise, and who is told.

Shapes: B rows, T tokens so far, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unembed.decoding._drawing import Drawing, at_rows
from unembed.decoding._history import History
from unembed.decoding._largest import largest
from unembed.decoding.filters._base import Chain
from unembed.ops import Stream, uniforms, widened
from unembed.ops._seeds import generated

Mask = Callable[[History], Bool[Tensor, "B V"]]


@dataclass(frozen=True)
class Event:
    """One token of one sequence, as it is written.

    Args:
        row: The prompt.
        token: Its id; None at a dead end, where there was no token to write.
        log_prob: Under the model's scores as they are.
        text: With a tokenizer: text that can no longer change and was not told yet; may be empty.
        finish: Why the sequence ended with this token, None while it goes on.
    """

    row: int
    token: int | None
    log_prob: float | None
    text: str | None = None
    finish: str | None = None


@dataclass(frozen=True)
class Plan:
    """The options of `generate` that every strategy obeys, checked.

    Args:
        prompts: Prompts, shorter ones padded in front with -1.
        max_new_tokens: Of each row.
        eos_ids: Ids that end a sequence.
        pad_id: Stands after the end.
        filters: On scores, before the strategy chooses; parameters with one number a row are of all rows.
        drawing: Temperature, top-k, top-p and min-p, after the filters, for strategies that are `fused`; else these are
            filters too.
        mask: True where a token is allowed; asked at each step with the tokens so far, before the filters.
        stop: Strings that end a sequence.
        tokenizer: With `decode`; needed for `stop`, and for texts.
        seeds: One a row, as unsigned words; None for a generator.
        generator: Of the noise where there are no seeds.
        alternatives: Most probable tokens to tell at each place.
        on_token: Called with each `Event`.
    """

    prompts: Int[Tensor, "B T"]
    max_new_tokens: Int[Tensor, " B"]
    eos_ids: tuple[int, ...] = ()
    pad_id: int = 0
    filters: Chain = field(default_factory=Chain)
    drawing: Drawing = field(default_factory=Drawing)
    mask: Mask | None = None
    stop: Sequence[str] = ()
    tokenizer: Any = None
    seeds: np.ndarray | None = None
    generator: torch.Generator | None = None
    alternatives: int = 0
    on_token: Callable[[Event], None] | None = None

    def uniforms(
        self, rows: Int[Tensor, " n"], positions: Int[Tensor, " n"], stream: Stream, attempt: int = 0
    ) -> Float[Tensor, " n"]:
        """One draw for each row of the request that `rows` names, at its own position; on the host's float64."""
        if self.seeds is None:
            return generated(len(rows), torch.device("cpu"), self.generator).cpu()
        drawn = uniforms(self.seeds[rows.cpu().numpy()], positions.cpu().numpy(), stream=stream, attempt=attempt)
        return torch.from_numpy(drawn)

    @property
    def ruled(self) -> bool:
        """Whether a mask or a filter stands between the model's scores and the choice."""
        return self.mask is not None or len(self.filters) > 0

    def history(self, rows: Int[Tensor, " n"], written: Int[Tensor, "n t"]) -> History:
        """Prompts of some rows and what was written after them, with the coin of the next position."""
        tokens = torch.cat([self.prompts[rows], written], 1)
        length = torch.full((len(rows),), written.shape[1], dtype=torch.int64, device=tokens.device)
        own = self.seeds is not None or self.generator is not None
        toss = functools.cache(lambda: self.uniforms(rows, length, Stream.COIN)) if own else None
        return History(tokens, length, toss, rows)

    def allowed(self, scores: Float[Tensor, "n V"], history: History | None) -> Float[Tensor, "n V"]:
        """Scores after the mask and the filters; a row may be left without any.

        Args:
            scores: Of the model.
            history: From `history`; may be None where nothing is `ruled`.

        Raises:
            ValueError: If the mask has another shape.
        """
        scores = scores.to(widened(scores.dtype))
        if self.mask is not None:
            assert history is not None
            mask = self.mask(history)
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool or tuple(mask.shape) != tuple(scores.shape):
                came = f"{mask.dtype} {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
                raise ValueError(f"`mask` must return booleans {tuple(scores.shape)}, got {came}.")
            scores = scores.masked_fill(~mask.to(scores.device), -torch.inf)
        if not len(self.filters):
            return scores
        rows = None if history is None else history.rows
        return (self.filters if rows is None else at_rows(self.filters, rows))(scores, history)

    def told(self, scores: Float[Tensor, "n V"], tokens: Int[Tensor, " n"]) -> Float[Tensor, " n"]:
        """Log-probability of tokens under scores."""
        scores = scores.to(widened(scores.dtype))
        return scores.gather(-1, tokens[:, None]).squeeze(-1) - scores.logsumexp(-1)

    def others(
        self, scores: Float[Tensor, "n V"], lse: Float[Tensor, " n"] | None = None
    ) -> list[tuple[Tensor, Tensor] | None]:
        """The most probable tokens of each row and their log-probabilities, where they are asked for.

        Args:
            scores: Of the model.
            lse: Their `logsumexp`, where it is known.

        Raises:
            ValueError: If there are fewer tokens.
        """
        if not self.alternatives:
            return [None] * len(scores)
        if self.alternatives > scores.shape[-1]:
            most = scores.shape[-1]
            raise ValueError(f"`alternatives` must be at most {most}, the number of classes, got {self.alternatives}.")
        scores = scores.to(widened(scores.dtype))
        lse = scores.logsumexp(-1) if lse is None else lse
        values, ids = largest(scores, self.alternatives)
        return list(zip(ids.cpu(), (values - lse[:, None]).cpu(), strict=True))
