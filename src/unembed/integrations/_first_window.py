"""The first window of a text, on which a model is compared with its head.

Shapes: T positions, V rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.integrations._errors import out_of_memory
from unembed.integrations._quiet import quiet
from unembed.integrations._run import evaluating, find_head, position_limit
from unembed.integrations._windows import check_ids, leading_ids, plan_windows
from unembed.results import InputError
from unembed.text import Document, check_documents


def head_and_scores(
    model: Any, tokenizer: Any, documents: Iterable[Document], *, length: int = 64, seed: int = 0
) -> tuple[Tensor, Float[Tensor, "1 T V"]]:
    """What entered the model's head on the first window of the text, and the scores that the model gave.

    Raises:
        InputError: As `check_parity`.
    """
    ids = first_window(model, tokenizer, documents, length, seed)
    entered: list[Tensor] = []
    hook = find_head(model).register_forward_pre_hook(lambda _module, inputs: entered.append(inputs[0]))
    try:
        with evaluating(model), quiet(), out_of_memory("running the model", "use a smaller model"):
            scores = model(input_ids=ids[None].to(model.device), use_cache=False).logits
    finally:
        hook.remove()
    if not entered:
        raise InputError(f"{type(model).__name__}: its forward never calls its output layer.")
    return entered[0], scores


def first_window(
    model: Any, tokenizer: Any, documents: Iterable[Document], length: int, seed: int
) -> Int[Tensor, " T"]:
    check_documents(documents)
    limit = min(length, position_limit(model) - len(leading_ids(tokenizer)))
    window = next(plan_windows(tokenizer, documents, tokens=limit, context=limit, seed=seed), None)
    if window is None:
        raise InputError("The text gives no predictions: every document is shorter than two tokens.")
    check_ids(window.inputs, model.get_input_embeddings().weight.shape[0], "embedding")
    return torch.from_numpy(window.inputs)
