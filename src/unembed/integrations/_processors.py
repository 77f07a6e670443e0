"""Filters as a `LogitsProcessor` of transformers' own `generate`.

Shapes: B rows (prompts times beams or returned sequences), T tokens so far, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unembed.decoding import Chain, Filter, History, Joint, MinLength
from unembed.ops import Numbers, Stream, uniforms


def processor(
    filters: Filter | Sequence[Filter],
    *,
    attention_mask: Int[Tensor, "b t"] | None = None,
    prompt_length: int | None = None,
    pad_id: int | None = None,
    seeds: Numbers | None = None,
) -> Processor:
    """Make filters a logits processor: `model.generate(..., logits_processor=[processor(filters)])`.

    transformers runs it before its own temperature, top-k, top-p and so on, and its top-k is 50 where nothing else is
    said: with `do_sample=True` pass `top_k=0` to have these filters alone.

    Args:
        filters: A filter, or several in order.
        attention_mask: That of the prompts, as given to `generate`: says what is padding, and where the prompt ends.
        prompt_length: In the place of the mask where nothing is padded: width of the prompts. Tokens after it are
            those that the model wrote.
        pad_id: With `prompt_length`: what prompts are padded with in front. A prompt that begins with this id itself
            needs the mask.
        seeds: One whole number a row, for filters that are random; a coin is then a function of seed and place.

    Raises:
        ValueError: If a filter asks what the model wrote and neither the mask nor the length says it.
    """
    chain = filters if isinstance(filters, Filter) else Chain(tuple(filters))
    if attention_mask is not None and (prompt_length is not None or pad_id is not None):
        raise ValueError("`attention_mask` says where prompts lie: give it, or `prompt_length` and `pad_id`, not both.")
    if attention_mask is not None and attention_mask.ndim != 2:
        raise ValueError(f"`attention_mask` must be [B, T], got {tuple(attention_mask.shape)}.")
    if attention_mask is not None:
        prompt_length = attention_mask.shape[1]
    if prompt_length is None:
        if pad_id is not None:
            raise ValueError("`pad_id` is for prompts of a known width: give `prompt_length` too.")
        for one in _parts(chain):
            if isinstance(one, MinLength) or getattr(one, "scope", "all") != "all":
                name = type(one).__name__
                raise ValueError(f"{name} asks what the model wrote: give `attention_mask` or `prompt_length`.")
    return Processor(chain, attention_mask, prompt_length, pad_id, seeds)


class Processor:
    """What `processor` makes; called as transformers calls a `LogitsProcessor`."""

    supports_continuous_batching = False

    def __init__(
        self,
        filters: Filter,
        attention_mask: Int[Tensor, "b t"] | None,
        prompt_length: int | None,
        pad_id: int | None,
        seeds: Numbers | None,
    ) -> None:
        self.filters = filters
        self._mask = None if attention_mask is None else attention_mask != 0
        self._prompt_length, self._pad_id, self._seeds = prompt_length, pad_id, seeds

    def __call__(self, input_ids: Int[Tensor, "B T"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Filtered scores, float32 or wider."""
        return self.filters(scores, self.history(input_ids))

    def history(self, input_ids: Int[Tensor, "B T"]) -> History:
        """The tokens of the call as filters see them."""
        rows, width = input_ids.shape
        if self._prompt_length is None:
            return History(input_ids, coin=self._coin(rows, width))
        if width < self._prompt_length:
            raise ValueError(f"`input_ids` has {width} columns, fewer than the prompts' {self._prompt_length}.")
        count = width - self._prompt_length
        hidden = torch.zeros_like(input_ids, dtype=torch.bool)
        hidden[:, : self._prompt_length] = self._padding(input_ids[:, : self._prompt_length])
        written = torch.full((rows,), count, dtype=torch.int64, device=input_ids.device)
        return History(input_ids.masked_fill(hidden, -1), written, self._coin(rows, count))

    def _padding(self, prompts: Int[Tensor, "B t"]) -> Bool[Tensor, "B t"]:
        """Where prompts are padding."""
        if self._mask is not None:
            if len(prompts) % max(1, len(self._mask)):
                raise ValueError(
                    f"`attention_mask` has {len(self._mask)} rows, which {len(prompts)} rows cannot share."
                )
            own = self._mask.to(prompts.device)
            return ~own.repeat_interleave(len(prompts) // max(1, len(own)), 0)  # beams of a prompt lie together
        if self._pad_id is None:
            return torch.zeros_like(prompts, dtype=torch.bool)
        return (prompts == self._pad_id).cumprod(1).bool()

    def _coin(self, rows: int, position: int) -> Float[Tensor, " B"] | None:
        """One draw a row."""
        if self._seeds is None:
            return None
        if len(self._seeds) != rows:
            raise ValueError(f"`seeds` must have one number for each of {rows} rows, got {len(self._seeds)}.")
        return torch.from_numpy(uniforms(self._seeds, [position] * rows, stream=Stream.COIN))


def _parts(given: Filter) -> Iterator[Filter]:
    """The filters that a filter is made of."""
    if isinstance(given, Chain | Joint):
        for one in given.filters:
            yield from _parts(one)
    else:
        yield given
