"""Other people's libraries, imported inside functions: run a transformers model over documents, filter its scores."""

from unembed.integrations._first_window import head_and_scores
from unembed.integrations._open import Dtype, open_model, resolve_device
from unembed.integrations._parity import check_parity
from unembed.integrations._processors import processor
from unembed.integrations._run import Block, evaluating, hidden_states
from unembed.integrations._vllm import request_processor, vllm_processor

__all__ = [
    "Block",
    "Dtype",
    "check_parity",
    "evaluating",
    "head_and_scores",
    "hidden_states",
    "open_model",
    "processor",
    "request_processor",
    "resolve_device",
    "vllm_processor",
]
