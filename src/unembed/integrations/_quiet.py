"""Silence around third parties that write to the terminal."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Generator

from unembed.text import quiet_loggers

_LOGGERS = ("transformers", "huggingface_hub", "accelerate", "gguf", "httpx", "urllib3")


@contextlib.contextmanager
def quiet(*, stderr: bool = False) -> Generator[None]:
    """No log lines, warnings or progress bars from transformers and what it calls; all as before afterwards.

    Args:
        stderr: Hold back all that is written to `sys.stderr` too, for a progress bar that cannot be switched off.
    """
    from transformers.utils import logging as hf_logging

    bars = hf_logging.is_progress_bar_enabled()
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        stack.enter_context(quiet_loggers(*_LOGGERS))
        if stderr:
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        if bars:
            hf_logging.disable_progress_bar()  # the hub's bars too
            stack.callback(hf_logging.enable_progress_bar)
        yield
