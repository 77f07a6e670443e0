"""Presets: the filters in the order, and with the definitions, of each engine.

Read in transformers 5.24.0 (`generation/utils.py`), vLLM (`v1/sample/sampler.py`, commit 3e34265), llama.cpp
(`src/llama-sampler.cpp`, 6f7f63e; `common/common.h`, de93b99) and SGLang 0.5.23 (`srt/layers/sampler.py`).
docs/decoding.md has the table, and what each still does differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor

from unembed.decoding.filters import (
    DRY,
    XTC,
    Chain,
    Epsilon,
    Eta,
    Filter,
    FrequencyPenalty,
    Joint,
    MinP,
    NoRepeatNgram,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    Typical,
)
from unembed.decoding.filters._parameters import Number, within
from unembed.decoding.filters._penalties import Scope

Order = Literal["unembed", "transformers", "vllm", "llama.cpp", "sglang"]

_REPEATS = ("repetition_penalty", "frequency_penalty", "presence_penalty")
_ORDERS: Mapping[str, tuple[str, ...]] = {
    "unembed": (
        *_REPEATS,
        "no_repeat_ngram",
        "dry",
        "temperature",
        "top_n_sigma",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "epsilon",
        "eta",
        "xtc",
    ),
    "transformers": (
        "repetition_penalty",
        "no_repeat_ngram",
        "temperature",
        "top_k",
        "top_p",
        "min_p",
        "typical_p",
        "epsilon",
        "eta",
    ),
    "vllm": (*_REPEATS, "temperature", "min_p", "top_k", "top_p"),
    "llama.cpp": (*_REPEATS, "dry", "top_n_sigma", "top_k", "typical_p", "top_p", "min_p", "xtc", "temperature"),
    "sglang": ("frequency_penalty", "presence_penalty", "repetition_penalty", "temperature", "top_k", "top_p", "min_p"),
}
_PENALTIES: Mapping[str, Callable[..., Filter]] = {
    "repetition_penalty": RepetitionPenalty,
    "frequency_penalty": FrequencyPenalty,
    "presence_penalty": PresencePenalty,
}
_KINDS: Mapping[str, Callable[[Any], Filter]] = {
    "temperature": Temperature,
    "top_k": TopK,
    "top_p": TopP,
    "min_p": MinP,
    "typical_p": Typical,
    "epsilon": Epsilon,
    "eta": Eta,
    "top_n_sigma": TopNSigma,
    "no_repeat_ngram": NoRepeatNgram,
}
_OFF_AT_ONE = ("temperature", "top_p", "typical_p", "repetition_penalty")  # the others at 0
_WINDOWED = ("unembed", "llama.cpp")
_COUNTED = 64  # tokens that llama.cpp looks back on where nothing else is said, `penalty_last_n`


def ordered(
    *,
    order: Order = "unembed",
    temperature: Number = 1.0,
    top_k: int | Tensor | None = None,
    top_p: Number | None = None,
    min_p: Number | None = None,
    typical_p: Number | None = None,
    epsilon: Number | None = None,
    eta: Number | None = None,
    top_n_sigma: Number | None = None,
    repetition_penalty: Number | None = None,
    presence_penalty: Number | None = None,
    frequency_penalty: Number | None = None,
    penalty_window: int | None = None,
    no_repeat_ngram: int | None = None,
    dry: DRY | None = None,
    xtc: XTC | None = None,
) -> Chain:
    """The filters that are asked for, in the order of an engine.

    Rules on ids and lengths are not part of it: put them in front, `AllowedIds(ids) | ordered(...)`. No engine's
    defaults are filled in, and a number that changes nothing (a penalty of 0, a mass of 1) adds no filter.

    - `unembed`: penalties, temperature, top-n-sigma, top-k, top-p, min-p, typical, epsilon, eta, XTC.
    - `transformers`: has no presence or frequency penalty, no DRY, XTC and top-n-sigma.
    - `vllm`: min-p before top-k and top-p. Temperatures below 1e-5 are 0, others below 0.01 are 0.01.
    - `llama.cpp`: temperature last; all penalties count the prompt, in the last 64 tokens or `penalty_window`.
    - `sglang`: top-k and top-p look at the same distribution (`Joint`), unless min-p is asked for; all penalties count
      what was written, and repetition comes last of them. Temperatures below 1e-6 are 0.

    Args:
        order: Whose order.
        temperature: As `Temperature`.
        top_k: As `TopK`.
        top_p: As `TopP`.
        min_p: As `MinP`.
        typical_p: As `Typical`.
        epsilon: As `Epsilon`.
        eta: The epsilon of `Eta`.
        top_n_sigma: As `TopNSigma`.
        repetition_penalty: As `RepetitionPenalty`.
        presence_penalty: As `PresencePenalty`.
        frequency_penalty: As `FrequencyPenalty`.
        penalty_window: Last tokens that the three penalties count; only `unembed` and `llama.cpp` have it.
        no_repeat_ngram: As `NoRepeatNgram`.
        dry: The filter.
        xtc: The filter.

    Raises:
        ValueError: If there is no such order, or the engine has no such filter.
    """
    if order not in _ORDERS:
        raise ValueError(f"`order` must be one of {', '.join(get_args(Order))}, got {order!r}.")
    given: dict[str, Any] = {
        "temperature": _engine_temperature(order, temperature),
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "typical_p": typical_p,
        "epsilon": epsilon,
        "eta": eta,
        "top_n_sigma": top_n_sigma,
        "repetition_penalty": repetition_penalty,
        "presence_penalty": presence_penalty,
        "frequency_penalty": frequency_penalty,
        "no_repeat_ngram": no_repeat_ngram,
        "dry": dry,
        "xtc": xtc,
    }
    return _chain(order, given, penalty_window)


def _chain(order: str, given: Mapping[str, Any], penalty_window: int | None) -> Chain:
    """The filters of what is given, in the order of an engine that has them all."""
    asked = {name: value for name, value in given.items() if value is not None and not _changes_nothing(name, value)}
    for name in (*asked, *(["penalty_window"] if penalty_window is not None else [])):
        if name not in _ORDERS[order] and not (name == "penalty_window" and order in _WINDOWED):
            raise ValueError(f"order={order!r} has no `{name}`.")
    filters = {name: _filter(order, name, value, penalty_window) for name, value in asked.items()}
    if order == "sglang" and "min_p" not in asked and {"top_k", "top_p"} <= filters.keys():
        filters["top_k"] = Joint((TopK(asked["top_k"]), TopP(asked["top_p"])))
        del filters["top_p"]
    return Chain(tuple(filters[name] for name in _ORDERS[order] if name in filters))


def _filter(order: str, name: str, value: Any, window: int | None) -> Filter:
    """One filter by the engine's definition."""
    if name in _REPEATS:
        scope: Scope = "all" if name == "repetition_penalty" else "written"
        if order == "llama.cpp":
            scope, window = "all", _COUNTED if window is None else window
        if order == "sglang":
            scope = "written"
        return _PENALTIES[name](value, scope=scope, window=window)
    return value if isinstance(value, Filter) else _KINDS[name](value)


def _changes_nothing(name: str, value: object) -> bool:
    """Whether engines read a number as `off`; a top-k or top-n-sigma of 0 is an error, as none agree on it."""
    if isinstance(value, Tensor | DRY | XTC) or name in ("top_k", "top_n_sigma", "no_repeat_ngram"):
        return False
    return value == (name in _OFF_AT_ONE)


def _engine_temperature(order: str, temperature: Number) -> Number:
    """What the engine makes of a low temperature."""
    within("temperature", temperature, 0)
    below, least = {"vllm": (1e-5, 1e-2), "sglang": (1e-6, 0.0)}.get(order, (0.0, 0.0))
    if isinstance(temperature, Tensor):
        return torch.where(temperature < below, 0.0, temperature.clamp(min=least))
    return 0.0 if temperature < below else max(temperature, least)
