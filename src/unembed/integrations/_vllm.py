"""Filters for vLLM: a function of one request that needs no vLLM, and a class for its batches.

The class follows `vllm.v1.sample.logits_processor.LogitsProcessor` (interface.py, commit 05da17c). vLLM's second model
runner has an interface of its own, which is still changing and not covered: run with `VLLM_USE_V2_MODEL_RUNNER=0`.

Shapes: B requests, V vocabulary.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from unembed.decoding import Chain, Filter, History
from unembed.ops import Stream, uniforms
from unembed.results import InputError

Chooser = Callable[[Any], Filter | None]  # of a request's SamplingParams


def request_processor(
    filters: Filter | Sequence[Filter], *, seed: int | None = None
) -> Callable[[Sequence[int], Sequence[int], Float[Tensor, " V"]], Float[Tensor, " V"]]:
    """A function `(prompt_token_ids, output_token_ids, logits) -> logits` of one request.

    vLLM's engine of version 0 takes it in `SamplingParams(logits_processors=[...])`; later ones through the
    `new_req_logits_processor` of an `AdapterLogitsProcessor`.

    Args:
        filters: A filter, or several in order.
        seed: For filters that are random; PyTorch's generator when None.
    """
    chain = filters if isinstance(filters, Filter) else Chain(tuple(filters))

    def processed(
        prompt_token_ids: Sequence[int], output_token_ids: Sequence[int], logits: Float[Tensor, " V"]
    ) -> Float[Tensor, " V"]:
        request = _Request(chain, prompt_token_ids, output_token_ids, seed)
        return chain(logits, _history([request], logits.device))

    return processed


def vllm_processor(filters: Filter | Sequence[Filter] | Chooser) -> type:
    """A class for `LLM(..., logits_processors=[...])`, or for `--logits-processors MODULE:NAME`.

    vLLM runs it before its own penalties, temperature, min-p, top-k and top-p, and needs it importable by name in each
    of its processes: assign it in a module of your own, `MyFilters = vllm_processor(...)`.

    Args:
        filters: For every request; or a function that takes a request's `SamplingParams` (its `extra_args` are for
            this) and gives the filter for it, or None.

    Raises:
        InputError: If vLLM is not installed.
    """
    try:
        theirs: Any = importlib.import_module("vllm.v1.sample.logits_processor").LogitsProcessor
    except ImportError as error:
        raise InputError("Filters inside vLLM need vLLM: pip install vllm") from error
    if isinstance(filters, Filter | Sequence):
        chain = filters if isinstance(filters, Filter) else Chain(tuple(filters))
        choose: Chooser = lambda _: chain  # noqa: E731
    else:
        choose = filters

    class FilterProcessor(BatchProcessor, theirs):
        @classmethod
        def choose(cls, params: Any) -> Filter | None:
            return choose(params)

    return FilterProcessor


@dataclass(frozen=True)
class _Request:
    """A request of the batch; vLLM goes on writing to `output`."""

    filters: Filter
    prompt: Sequence[int] | None
    output: Sequence[int]
    seed: int | None


class BatchProcessor:
    """What vLLM asks of a logits processor, without vLLM."""

    def __init__(self, vllm_config: Any = None, device: Any = None, is_pin_memory: bool = False) -> None:
        self._requests: dict[int, _Request] = {}

    @classmethod
    def choose(cls, params: Any) -> Filter | None:
        """The filter of a request, by its `SamplingParams`; None where it asks for nothing."""
        raise NotImplementedError

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse a request whose filter cannot be made.

        Raises:
            ValueError: From the filter.
        """
        cls.choose(sampling_params)

    def is_argmax_invariant(self) -> bool:
        """No: greedy requests are filtered too."""
        return False

    def update_state(self, batch_update: Any) -> None:
        """Follow requests that left, came and moved, in this order."""
        if batch_update is None:
            return
        for index in batch_update.removed:
            self._requests.pop(index, None)
        for index, params, prompt, output in batch_update.added:
            self._requests.pop(index, None)
            filters = self.choose(params)
            if filters is not None:
                self._requests[index] = _Request(filters, prompt, output, getattr(params, "seed", None))
        for source, target, direction in batch_update.moved:
            moved, other = self._requests.pop(source, None), self._requests.pop(target, None)
            if moved is not None:
                self._requests[target] = moved
            if other is not None and direction.name == "SWAP":
                self._requests[source] = other

    def apply(self, logits: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        """Filter the rows of requests that have filters, in place."""
        groups: dict[int, list[int]] = {}
        for index, request in self._requests.items():
            groups.setdefault(id(request.filters), []).append(index)
        for indices in groups.values():
            requests = [self._requests[index] for index in indices]
            rows = torch.tensor(indices, device=logits.device)
            found = requests[0].filters(logits[rows], _history(requests, logits.device))
            logits[rows] = found.to(logits.dtype)
        return logits


def _history(requests: Sequence[_Request], device: torch.device) -> History:
    """Tokens of requests; -1, which vLLM has not filled in yet, counts as none, and so does a prompt of embeddings."""
    prompts = [() if one.prompt is None else one.prompt for one in requests]
    found = History.of(prompts, [one.output for one in requests], device=device)

    @functools.cache
    def toss() -> Float[Tensor, " B"]:
        coin = torch.rand(len(requests), dtype=torch.float64)
        for place, one in enumerate(requests):
            if one.seed is not None:
                coin[place] = float(uniforms([one.seed], [len(one.output)], stream=Stream.COIN)[0])
        return coin

    return History(found.tokens, found.written, toss)
