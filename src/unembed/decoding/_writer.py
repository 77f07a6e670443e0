"""Sequences while they are written, one a prompt: where they end, their texts, and who is told."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from unembed.decoding._generation import Finish, Generation
from unembed.decoding._plan import Event, Plan
from unembed.decoding._strategy import Written, packed
from unembed.decoding._text import TextStream

_CONTEXT = 4  # tokens of the prompt that the first ones are decoded with


def stream_of(plan: Plan, row: int) -> TextStream:
    """The text of a prompt's sequence, before its first token."""
    context = [token for token in plan.prompts[row, -_CONTEXT:].tolist() if token >= 0]
    return TextStream(plan.tokenizer, stop=plan.stop, context=context)


class Writer:
    """Takes tokens one by one, in the order of the sequence, and says when it ends.

    Args:
        plan: Ends, limits, stop strings, and `on_token`.
    """

    def __init__(self, plan: Plan) -> None:
        self._plan = plan
        self.rows = [Written() for _ in range(len(plan.prompts))]
        self._limits = plan.max_new_tokens.tolist()
        self._ends = frozenset(plan.eos_ids)
        self._streams: list[TextStream] | None = None
        if plan.tokenizer is not None:
            self._streams = [stream_of(plan, row) for row in range(len(plan.prompts))]
        self._watched = bool(plan.stop) or plan.on_token is not None

    def put(
        self, row: int, token: int, log_prob: float, drawn_log_prob: float, others: tuple[Tensor, Tensor] | None = None
    ) -> bool:
        """Write a token of a prompt's sequence; whether the sequence goes on.

        Args:
            row: The prompt.
            token: Its id.
            log_prob: Under the model's scores as they are.
            drawn_log_prob: Under the distribution that it was chosen from.
            others: Ids and log-probabilities of the most probable tokens in its place.
        """
        one = self.rows[row]
        one.tokens.append(token)
        one.log_probs.append(log_prob)
        one.drawn_log_probs.append(drawn_log_prob)
        if others is not None:
            one.alternatives.append(others)
        stream = self._streams[row] if self._streams is not None else None
        ended, text, stopped = token in self._ends, None, False
        if stream is not None and self._watched:
            text = "" if ended else stream.push(token)
            stopped = stream.stopped
        full = len(one.tokens) >= self._limits[row]
        finish: Finish | None = "eos" if ended else "stop" if stopped else "length" if full else None
        if finish is not None:
            more = self._close(row, finish)
            text = None if text is None else text + more
        if self._plan.on_token is not None:
            self._plan.on_token(Event(row, token, log_prob, text, finish))
        return finish is None

    def dead_end(self, row: int) -> None:
        """End a sequence after which nothing is allowed."""
        text = self._close(row, "dead end")
        if self._plan.on_token is not None:
            self._plan.on_token(Event(row, None, None, None if self._streams is None else text, "dead end"))

    def generation(self, *, extra: dict[str, Any] | None = None) -> Generation:
        """All sequences."""
        return packed([[one] for one in self.rows], self._plan, extra=extra)

    def _close(self, row: int, finish: Finish) -> str:
        """Say how a sequence ended, and decode what is left of its text."""
        one = self.rows[row]
        one.finish = finish
        if self._streams is None:
            return ""
        stream, written = self._streams[row], one.tokens[:-1] if finish == "eos" else one.tokens
        if self._watched:
            told = stream.close()
            self._check_text(row, written, stream.text)
        else:
            stream.push(*written)
            told = stream.close()
        one.text = stream.text
        return told

    def _check_text(self, row: int, tokens: Sequence[int], text: str) -> None:
        """Warn if tokens that were decoded one by one have another text than all at once."""
        whole = stream_of(self._plan, row)
        whole.push(*tokens)
        whole.close()
        if whole.text != text:
            warnings.warn(
                f"The `decode` of {type(self._plan.tokenizer).__name__} changes the text of earlier tokens: `stop` and "
                "`on_token` need one that only appends.",
                stacklevel=2,
            )
