"""Where scores come from: a model with a cache, or any function of tokens.

Shapes: B rows, T tokens of the longest row, V vocabulary, D hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

_CACHES = ("cache", "past_key_values", "cache_params")  # transformers from 5.24, before, and before for Mamba


class Scorer(Protocol):
    """Scores of the next token, and the tokens that it remembers.

    `hidden` is the last hidden state of the tokens of the last call, where one was asked for; in front of shorter
    prompts it is anything.
    """

    hidden: Float[Tensor, "B n D"] | None

    def start(self, tokens: Int[Tensor, "B T"], real: Bool[Tensor, "B T"]) -> Float[Tensor, "B V"]:
        """Read prompts, shorter ones padded in front; the scores after the last token of each."""
        ...

    def extend(self, tokens: Int[Tensor, "B n"]) -> Float[Tensor, "B n V"]:
        """Read n more tokens a row; the scores after each of them."""
        ...

    def select(self, rows: Int[Tensor, " m"]) -> None:
        """Go on with these rows, in this order; one may come several times or not at all."""
        ...

    def rewind(self, count: int) -> None:
        """Forget the last tokens of each row; only where the scorer was made `rewindable`."""
        ...


class FunctionScorer:
    """Calls a function on all tokens again at each step: right for anything, fast for nothing.

    Rows of one length go together, so the function never sees padding.

    Args:
        function: Maps tokens [n, t] to scores of the next token [n, V], or of every position [n, t, V]; or to a pair of
            the scores of every position and hidden states [n, t, D].
        keep_hidden: Whether hidden states are wanted.
    """

    def __init__(self, function: Callable[[Tensor], Any], *, keep_hidden: bool = False) -> None:
        self._function, self._keep = function, keep_hidden
        self._tokens = torch.empty(0)
        self._lengths = torch.empty(0)
        self.hidden: Tensor | None = None

    def start(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Scores after each prompt."""
        self._tokens, self._lengths = tokens, real.sum(1)
        return self._scores(1, tokens.shape[1])[:, -1]

    def extend(self, tokens: Tensor) -> Tensor:
        """Scores after each of n more tokens."""
        self._tokens, self._lengths = torch.cat([self._tokens, tokens], 1), self._lengths + tokens.shape[1]
        return self._scores(tokens.shape[1], tokens.shape[1])

    def select(self, rows: Tensor) -> None:
        """Keep these rows."""
        self._tokens, self._lengths = self._tokens[rows], self._lengths[rows]

    def rewind(self, count: int) -> None:
        """Forget the last tokens."""
        self._tokens, self._lengths = self._tokens[:, : self._tokens.shape[1] - count], self._lengths - count

    def _scores(self, count: int, states: int) -> Tensor:
        """Scores of the last `count` positions, rows of one length at a time; hidden states of the last `states`."""
        scores = hidden = None
        width = self._tokens.shape[1]
        for length in self._lengths.unique().tolist():
            which = (self._lengths == length).nonzero().squeeze(1)
            found, state = self._called(self._tokens[which][:, width - length :], count)
            if scores is None:
                scores = found.new_empty(len(self._tokens), *found.shape[1:])
            scores[which] = found
            if state is not None:
                if hidden is None:
                    hidden = state.new_zeros(len(self._tokens), states, state.shape[-1])
                own = min(states, length)
                hidden[which, states - own :] = state[:, -own:]
        assert scores is not None
        self.hidden = hidden
        return scores

    def _called(self, rows: Tensor, count: int) -> tuple[Tensor, Tensor | None]:
        """Scores [n, count, V] and hidden states, from one call, or one a position where that is needed."""
        found, state = self._function(rows), None
        if isinstance(found, tuple) and len(found) == 2:
            found, state = found
        if self._keep and (not isinstance(state, Tensor) or state.shape[:2] != rows.shape):
            raise ValueError(
                "This strategy needs hidden states: `model` must give (scores [n, t, V], hidden [n, t, D])."
            )
        fine = isinstance(found, Tensor) and found.is_floating_point() and found.ndim in (2, 3)
        if not fine or len(found) != len(rows) or (found.ndim == 3 and found.shape[1] != rows.shape[1]):
            came = f"{found.dtype} {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
            wanted = f"[{len(rows)}, V] or [{len(rows)}, {rows.shape[1]}, V]"
            raise ValueError(f"`model` must return floating-point scores {wanted}, got {came}.")
        if found.ndim == 2:
            earlier = [self._function(rows[:, : rows.shape[1] - back]) for back in range(count - 1, 0, -1)]
            found = torch.stack([*[one[0] if isinstance(one, tuple) else one for one in earlier], found], 1)
        return found[:, -count:].to(rows.device), state.to(rows.device) if self._keep and state is not None else None


class _Columns:
    """The columns of a cache: tokens that were read, and padding in front of shorter prompts.

    Args:
        real: False where prompts are padded.
    """

    def __init__(self, real: Bool[Tensor, "B T"]) -> None:
        self.rows, self.width = real.shape
        self._device = real.device
        self._padding = None if bool(real.all()) else (~real).sum(1, keepdim=True)

    def mask(self) -> Int[Tensor, "B T"]:
        """1 where there is a token."""
        if self._padding is None:
            return torch.ones(self.rows, self.width, dtype=torch.int64, device=self._device)
        return (torch.arange(self.width, device=self._device) >= self._padding).long()

    def positions(self, count: int) -> Int[Tensor, "B n"]:
        """Of the last columns, counted in real tokens."""
        columns = torch.arange(self.width - count, self.width, device=self._device)
        return columns.repeat(self.rows, 1) if self._padding is None else (columns - self._padding).clamp(min=0)

    def select(self, rows: Int[Tensor, " m"]) -> None:
        """Go on with these rows."""
        self.rows = rows.shape[0]
        if self._padding is not None:
            self._padding = self._padding[rows]


class CachedScorer:
    """A causal language model of transformers, or one with its conventions, with its cache.

    Positions count real tokens, so a row padded in front has the scores of the row alone.

    Args:
        model: Called with `input_ids`, `attention_mask`, `position_ids`, `cache` (or `past_key_values`) and
            `use_cache`; gives `logits` and the cache.
        rewindable: Whether `rewind` will be called.
        keep_hidden: Whether last hidden states are wanted.

    Raises:
        ValueError: If the model takes no cache.
    """

    def __init__(self, model: Any, *, rewindable: bool = False, keep_hidden: bool = False) -> None:
        self._model, self._rewindable, self._keep = model, rewindable, keep_hidden
        self._takes = taken_by(model)
        names = [name for name in _CACHES if name in self._takes]
        if not names:
            raise ValueError(
                f"{type(model).__name__} takes no cache: pass a function instead, `lambda ids: model(ids).logits`."
            )
        self._name = names[0]
        self._cache: Any = None
        self._columns = _Columns(torch.ones(0, 0, dtype=torch.bool))
        self._stateful = False
        self.hidden: Tensor | None = None

    def start(self, tokens: Tensor, real: Tensor) -> Tensor:
        """Scores after each prompt."""
        self._cache, self._columns, self._stateful = None, _Columns(real), False
        scores = self._called(tokens.masked_fill(~real, 0), 1)[:, -1]
        linear = list(getattr(self._cache, "is_linear", ()))
        self._stateful = bool(linear) and all(linear)  # such a model takes the mask as that of the new tokens
        if self._rewindable:
            if not getattr(self._cache, "is_croppable", True):
                raise ValueError(
                    f"{type(self._model).__name__} folds tokens into a state and cannot forget the last ones, "
                    "which this strategy needs."
                )
            if hasattr(self._cache, "activate_past_recording"):
                self._cache.activate_past_recording()  # or layers with a window have dropped what a rewind needs
        return scores

    def extend(self, tokens: Tensor) -> Tensor:
        """Scores after each of n more tokens."""
        self._columns.width += tokens.shape[1]
        return self._called(tokens, tokens.shape[1])

    def select(self, rows: Tensor) -> None:
        """Keep these rows of the cache."""
        if rows.tolist() == list(range(self._columns.rows)):
            return
        # Layers can be reordered; a cache that keeps states beside its layers (MiniMax) has a method of its own.
        own = "batch_select_indices" in vars(type(self._cache))
        (self._cache.batch_select_indices if own else self._cache.reorder_cache)(rows)
        self._columns.select(rows)

    def rewind(self, count: int) -> None:
        """Cut the last tokens off the cache."""
        if count or self._rewindable:
            self._cache.crop(-count)  # of 0 too: layers that record their past are trimmed by it
        self._columns.width -= count

    def _called(self, tokens: Tensor, count: int) -> Tensor:
        inputs: dict[str, Any] = {"input_ids": tokens, self._name: self._cache, "use_cache": True, "return_dict": True}
        if not self._stateful:
            inputs["attention_mask"] = self._columns.mask()
        if "position_ids" in self._takes:
            inputs["position_ids"] = self._columns.positions(tokens.shape[1])
        if "logits_to_keep" in self._takes:
            inputs["logits_to_keep"] = count
        if self._keep:
            inputs["output_hidden_states"] = True
        found = self._run(inputs)
        self._cache = getattr(found, self._name)
        if self._cache is None:
            raise ValueError(f"{type(self._model).__name__} gave no cache back, although `use_cache` was set.")
        self.hidden = found.hidden_states[-1].to(tokens.device) if self._keep else None
        return found.logits[:, -count:].to(tokens.device)  # the head of a model in parts may be elsewhere

    def _run(self, inputs: dict[str, Any]) -> Any:
        """Call the model.

        Raises:
            ValueError: If it has learned positions, and not enough of them.
        """
        try:
            return self._model(**inputs)
        except IndexError:
            most, length = getattr(self._model.config, "max_position_embeddings", None), self._columns.width
            if most is None or length <= most:
                raise
            name = type(self._model).__name__
            raise ValueError(
                f"{name} has {most} positions, too few for {length} tokens: lower `max_new_tokens`."
            ) from None


def taken_by(model: Any) -> set[str]:
    """Names of what a model's forward takes; of the model that `torch.compile` wrapped, if it did."""
    plain: Any = getattr(model, "_orig_mod", model)
    return set(inspect.signature(plain.forward).parameters)
