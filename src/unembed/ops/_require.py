"""Conditions on the values of a tensor: an error where they can be looked at, an assertion on the device elsewhere."""

from __future__ import annotations

import torch
from torch import Tensor


def require(condition: Tensor, message: str) -> None:
    """Refuse values that do not fit: a ValueError in eager mode, a device-side assertion under torch.compile.

    Under vmap nothing can be looked at, and nothing is checked; on the meta device there is nothing. What the caller
    returns then has to be safe by itself.

    Raises:
        ValueError: If the condition does not hold everywhere.
    """
    if condition.is_meta:
        return
    if torch.compiler.is_compiling():
        torch._assert_async(condition.all(), message)
        return
    try:
        holds = bool(condition.all())
    except RuntimeError:  # vmap, or a tensor without values
        return
    if not holds:
        raise ValueError(message)
