"""Third parties' errors as one line for the user."""

from __future__ import annotations

import contextlib
from collections.abc import Generator

import torch

from unembed.results import InputError


@contextlib.contextmanager
def out_of_memory(doing: str, mend: str) -> Generator[None]:
    """Turn an allocation that fails, on a GPU or on the CPU, into an `InputError`.

    Args:
        doing: What went on, for the message.
        mend: What the user can do.
    """
    try:
        yield
    except (torch.OutOfMemoryError, MemoryError) as error:
        raise InputError(f"Out of memory while {doing}; {mend}.") from error
    except RuntimeError as error:
        if "can't allocate memory" in str(error) or "out of memory" in str(error):
            raise InputError(f"Out of memory while {doing}; {mend}.") from error
        raise
