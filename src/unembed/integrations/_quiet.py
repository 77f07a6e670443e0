"""Silence around third parties that write to the terminal."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator

_LOGGERS = ("transformers", "huggingface_hub", "datasets", "accelerate", "gguf", "httpx", "urllib3")


@contextlib.contextmanager
def quiet(*, stderr: bool = False) -> Iterator[None]:
    """No log lines, warnings or progress bars from transformers and what it calls; all as before afterwards.

    Args:
        stderr: Hold back all that is written to `sys.stderr` too, for a progress bar that cannot be switched off.
    """
    from huggingface_hub.utils import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars
    from transformers.utils import logging as hf_logging

    levels = {name: logging.getLogger(name).level for name in _LOGGERS}
    bars, hub_bars = hf_logging.is_progress_bar_enabled(), not are_progress_bars_disabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        if stderr:
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        try:
            for name in _LOGGERS:
                logging.getLogger(name).setLevel(logging.CRITICAL + 1)
            hf_logging.disable_progress_bar()
            disable_progress_bars()
            yield
        finally:
            for name, level in levels.items():
                logging.getLogger(name).setLevel(level)
            if bars:
                hf_logging.enable_progress_bar()
            if hub_bars:
                enable_progress_bars()
