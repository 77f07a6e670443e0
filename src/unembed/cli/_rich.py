"""The one place that imports rich."""

from __future__ import annotations

import importlib
from typing import Any


def rich_module(name: str) -> Any:
    """`rich.<name>`.

    Raises:
        InputError: If rich is not installed; names the extra.
    """
    try:
        return importlib.import_module(f"rich.{name}")
    except ModuleNotFoundError as error:
        from unembed.results import InputError

        raise InputError('The command needs rich, which is missing: pip install "unembed[cli]".') from error
