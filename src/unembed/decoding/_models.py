"""What is asked of a model before it is run: whether it is causal, where it is, what ends a text, and its mode."""

from __future__ import annotations

import contextlib
from collections.abc import Generator, Iterable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from unembed.decoding._scorer import CachedScorer, FunctionScorer, Scorer, taken_by
from unembed.decoding._strategy import Strategy
from unembed.ops._whole import is_whole


def is_causal_model(model: Any) -> bool:
    """Whether to run it with a cache, as transformers does; else it is a function or a scorer.

    Raises:
        ValueError: If it is none of these.
    """
    if is_scorer(model):
        return False
    if not callable(model):
        raise ValueError(f"`model` must be a model, a function of tokens, or a Scorer, got {type(model).__name__}.")
    if not (hasattr(model, "config") and hasattr(model, "forward")):
        return False
    name = type(model).__name__
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(f"`model` must be a causal language model, but {name} is an encoder with a decoder.")
    if "input_ids" not in taken_by(model):
        raise ValueError(f"`model` must take `input_ids`, but {name} does not: pass a function from tokens to scores.")
    return True


def is_scorer(model: Any) -> bool:
    """Whether it reads tokens itself."""
    return all(hasattr(model, name) for name in ("start", "extend", "select"))


def as_scorer(model: Any, strategy: Strategy, name: str = "model") -> Scorer:
    """The scorer that a strategy needs.

    Raises:
        ValueError: If a scorer lacks what this strategy uses; `name` says which argument it is.
    """
    if is_scorer(model):
        needs = [need for need, used in (("rewind", strategy.rewindable), ("hidden", strategy.keep_hidden)) if used]
        lacking = [need for need in needs if not hasattr(model, need)]
        if lacking:
            kind, came = type(strategy).__name__, type(model).__name__
            raise ValueError(f"`{name}` must have `{lacking[0]}` for {kind}, but {came} has none.")
        return model
    if is_causal_model(model):
        return CachedScorer(model, rewindable=strategy.rewindable, keep_hidden=strategy.keep_hidden)
    return FunctionScorer(model, keep_hidden=strategy.keep_hidden)


def vocabulary_of(model: Any) -> int | None:
    """Rows of a model's embedding, where it tells."""
    return getattr(_embedding(model), "num_embeddings", None)


def positions_of(model: Any) -> int | None:
    """Tokens that a model was made for, where its config tells."""
    config = getattr(model, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    found = getattr(config, "max_position_embeddings", None)
    return found if isinstance(found, int) else None


def device_of(model: Any, default: torch.device) -> torch.device:
    """Where tokens go in: the device of the embedding, as a model may be on several."""
    if not isinstance(model, nn.Module):
        return default
    table = _embedding(model)
    found = next((table if isinstance(table, nn.Module) else model).parameters(), None)
    return default if found is None else found.device


@contextlib.contextmanager
def evaluating(model: Any) -> Generator[None]:
    """Eval mode; afterwards each part is in its own former mode, whatever happened."""
    training = [part for part in model.modules() if part.training] if isinstance(model, nn.Module) else []
    try:
        for part in training:
            part.training = False
        yield
    finally:
        for part in training:
            part.training = True


def ends_of(model: Any, eos_ids: int | Sequence[int] | None) -> tuple[int, ...]:
    """Ids that end a text, each once, as given or as the model says.

    Raises:
        ValueError: If they are no ids.
    """
    found = _said(model, "eos_token_id") if eos_ids is None else eos_ids
    listed = found.tolist() if isinstance(found, Tensor | np.ndarray) else found
    ids = () if listed is None else tuple(listed) if isinstance(listed, Iterable) else (listed,)
    if not all(is_whole(one) and one >= 0 for one in ids):
        raise ValueError(f"`eos_ids` must be whole numbers of at least 0, got {found!r:.80}.")
    return tuple(dict.fromkeys(int(one) for one in ids))


def pad_of(model: Any, pad_id: int | None, ends: Sequence[int]) -> int:
    """The id that stands after an end, as given, as the model says, the first end, or 0.

    Raises:
        ValueError: If it is no whole number.
    """
    found = _said(model, "pad_token_id") if pad_id is None else pad_id
    if found is None:
        return ends[0] if ends else 0
    if not isinstance(found, int):
        raise ValueError(f"`pad_id` must be a whole number, got {found!r:.80}.")
    return found


def _said(model: Any, name: str) -> Any:
    """What a model's `generation_config` says, or else its config; None where neither does."""
    config = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else None
    for one in (getattr(model, "generation_config", None), config, text):
        found = getattr(one, name, None)
        if found is not None:
            return found
    return None


def _embedding(model: Any) -> Any:
    return model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
