"""Write on from prompts with a model: what was asked is checked here, and a strategy does the rest.

Shapes: B prompts, T tokens of the longest prompt, V vocabulary.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from operator import index
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from unembed.decoding._drawing import Drawing, check_rows, per_row
from unembed.decoding._generation import Generation
from unembed.decoding._models import (
    as_scorer,
    device_of,
    ends_of,
    evaluating,
    is_causal_model,
    pad_of,
    positions_of,
    vocabulary_of,
)
from unembed.decoding._plan import Event, Mask, Plan
from unembed.decoding._prompts import as_prompts
from unembed.decoding._sample import sample
from unembed.decoding._steps import Greedy, Sample
from unembed.decoding._strategy import Strategy
from unembed.decoding.filters._base import Chain, Filter
from unembed.decoding.filters._parameters import Number
from unembed.ops._seeds import words
from unembed.ops._whole import is_whole

Each = Number | Sequence[float]  # a number, or one a row


def generate(
    model: Any,
    input_ids: Tensor | Sequence[int] | Sequence[Sequence[int]],
    *,
    strategy: Strategy | None = None,
    attention_mask: Tensor | Sequence[Sequence[int]] | None = None,
    max_new_tokens: int | Sequence[int] | Tensor = 64,
    temperature: Each | None = None,
    top_k: int | Sequence[int] | Tensor | None = None,
    top_p: Each | None = None,
    min_p: Each | None = None,
    filters: Filter | Sequence[Filter] | None = None,
    mask: Mask | None = None,
    eos_ids: int | Sequence[int] | None = None,
    pad_id: int | None = None,
    stop: str | Sequence[str] = (),
    tokenizer: Any = None,
    seeds: int | Sequence[int | None] | Tensor | None = None,
    generator: torch.Generator | None = None,
    alternatives: int = 0,
    on_token: Callable[[Event], None] | None = None,
) -> Generation:
    """Write on from each prompt, until a token or string that ends it, or its limit.

    Every strategy chooses from the same distribution: the model's scores after `mask`, `filters`, temperature, top-k,
    top-p and min-p, in this order. A model is in eval mode meanwhile (a function sees to its own); nothing is
    differentiable.

    Args:
        model: A causal language model of transformers, or one with its conventions; or a function from tokens [n, t]
            to scores [n, V] or [n, t, V], called on all tokens at each step (see `FunctionScorer`); or a `Scorer`.
        input_ids: Prompts, one or several; lists of any lengths, or a tensor [B, T].
        strategy: Chooses tokens. When None, `Sample()` if a temperature, a limit, seeds or a generator is given, else
            `Greedy()`.
        attention_mask: With a tensor, 0 where it is padding, on either side; every token counts when None.
        max_new_tokens: Written at most, the one that ends a sequence included; one number, or one a row.
        temperature: T, one number or one a row; this and the next three are as in `sample`.
        top_k: Scores to keep, likewise.
        top_p: Mass to keep, likewise.
        min_p: Probability to keep relative to the best one, likewise.
        filters: Penalties and other filters. A parameter with one number a row follows its row.
        mask: Called at each step with the `History` of the running rows (`history.rows` says which they are); True
            where a token is allowed. A row with none ends as a `dead end`.
        eos_ids: Ids that end a sequence; those of the model's `generation_config`, or else its config, when None.
        pad_id: Stands after the end; as the model says when None, or else the first end, or else 0.
        stop: Strings that end a sequence, found in its text wherever tokens begin.
        tokenizer: Has `decode`, from ids to a string, that only appends as ids do; for `stop` and `texts`.
        seeds: One whole number a row, None where it does not matter: a row's draws depend on its seed, their place and
            its scores alone, in any batch.
        generator: Instead of `seeds`; reproducible for one batch. PyTorch's own when both are None.
        alternatives: Most probable tokens to tell at each place.
        on_token: Called with each `Event` as it is written, by strategies that write in order.

    Raises:
        ValueError: If an argument does not fit, with its name.
    """
    chosen = _strategy(strategy, (temperature, top_k, top_p, min_p, seeds, generator))
    vocabulary = vocabulary_of(model) if is_causal_model(model) else None
    prompts = as_prompts(input_ids, attention_mask, vocabulary=vocabulary)
    prompts = prompts.to(device_of(model, prompts.device))
    ends = ends_of(model, eos_ids)
    heat = 1.0 if temperature is None else temperature
    drawing = _drawing(len(prompts), prompts.device, temperature=heat, top_k=top_k, top_p=top_p, min_p=min_p)
    chain, limits = _chain(filters, len(prompts)), _limits(max_new_tokens, len(prompts))
    plan = Plan(
        prompts=prompts,
        max_new_tokens=limits,
        eos_ids=ends,
        pad_id=pad_of(model, pad_id, ends),
        filters=chain if chosen.fused else chain | drawing.chain(),
        drawing=drawing if chosen.fused else Drawing(),
        mask=_mask(mask),
        stop=_stop(stop, tokenizer),
        tokenizer=_decoder(tokenizer),
        seeds=_seeds(seeds, generator, len(prompts)),
        generator=generator,
        alternatives=_alternatives(alternatives, vocabulary),
        on_token=on_token,
    )
    _check_room(model, prompts, limits)
    with torch.no_grad(), evaluating(model):
        return chosen.run(as_scorer(model, chosen), plan)


def _strategy(strategy: Strategy | None, drawn: Sequence[Any]) -> Strategy:
    if strategy is None:
        return Greedy() if all(one is None for one in drawn) else Sample()
    if not isinstance(strategy, Strategy):
        raise ValueError(f"`strategy` must be a strategy such as Greedy() or Sample(), got {strategy!r:.80}.")
    return strategy


def _limits(max_new_tokens: int | Sequence[int] | Tensor, rows: int) -> Int[Tensor, " B"]:
    try:
        found = torch.as_tensor(max_new_tokens)
    except (TypeError, ValueError, RuntimeError):  # what PyTorch raises for what are no numbers
        found = torch.zeros(0)
    if found.ndim == 0:
        found = found.expand(rows)
    if found.is_floating_point() or found.dtype == torch.bool or tuple(found.shape) != (rows,) or int(found.min()) < 1:
        raise ValueError(
            f"`max_new_tokens` must be a whole number of at least 1, or one for each of {rows} rows, "
            f"got {max_new_tokens!r:.80}."
        )
    return found.long()


def _check_room(model: Any, prompts: Int[Tensor, "B T"], limits: Int[Tensor, " B"]) -> None:
    """Warn of texts that may get longer than what the model was made for; the last token is not read."""
    positions, need = positions_of(model), int(((prompts >= 0).sum(1).cpu() + limits.cpu()).max()) - 1
    if positions is not None and need > positions:
        warnings.warn(
            f"The model was made for {positions} tokens, and prompt and `max_new_tokens` are up to {need}: what it "
            "writes beyond may be worthless.",
            stacklevel=3,
        )


def _drawing(rows: int, device: torch.device, **given: Any) -> Drawing:
    """Temperature and limits, checked by `sample` itself."""
    found = Drawing(**{name: per_row(name, value, rows, device) for name, value in given.items()})
    tried = rows if any(isinstance(value, Tensor) for value in found.options().values()) else 1
    sample(torch.zeros(tried, 1, device=device), **found.options(), seeds=[0] * tried)
    return found


def _chain(filters: Filter | Sequence[Filter] | None, rows: int) -> Chain:
    if not isinstance(filters, Filter | Iterable | None):
        raise ValueError(f"`filters` must be a filter or a list of them, got {filters!r:.80}.")
    given = () if filters is None else (filters,) if isinstance(filters, Filter) else tuple(filters)
    chain = Chain(given)
    check_rows(chain, rows)
    return chain


def _mask(mask: Mask | None) -> Mask | None:
    if mask is not None and not callable(mask):
        raise ValueError(f"`mask` must be a function of the `History`, got {mask!r:.80}.")
    return mask


def _stop(stop: str | Sequence[str], tokenizer: Any) -> tuple[str, ...]:
    found = (stop,) if isinstance(stop, str) else tuple(stop) if isinstance(stop, Iterable) else ("",)
    if not all(isinstance(one, str) and one for one in found):
        raise ValueError(f"`stop` must be strings that are not empty, got {stop!r:.80}.")
    if found and tokenizer is None:
        raise ValueError("`stop` is looked for in the text: pass `tokenizer` too.")
    return found


def _decoder(tokenizer: Any) -> Any:
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(f"`tokenizer` must have `decode`, from ids to a string, got {type(tokenizer).__name__}.")
    return tokenizer


def _seeds(seeds: Any, generator: torch.Generator | None, rows: int) -> np.ndarray | None:
    """One word a row; rows without a seed get one from PyTorch's generator."""
    if seeds is None:
        return None
    if generator is not None:
        raise ValueError("Give `seeds` or `generator`, not both.")
    if is_whole(seeds):
        seeds = [seeds]
    if isinstance(seeds, Iterable) and not isinstance(seeds, Tensor | np.ndarray):
        seeds = [int(torch.randint(2**62, ())) if one is None else one for one in seeds]
    found = words("seeds", seeds)
    if len(found) != rows:
        raise ValueError(f"`seeds` must have one number for each of {rows} rows, got {len(found)}.")
    return found


def _alternatives(alternatives: int, vocabulary: int | None) -> int:
    if not is_whole(alternatives) or not 0 <= alternatives <= (vocabulary or alternatives):
        most = "" if vocabulary is None else f" and at most {vocabulary}"
        raise ValueError(f"`alternatives` must be a whole number of at least 0{most}, got {alternatives!r:.80}.")
    return index(alternatives)
