"""Models, as far as their output layer goes: the head alone from weights, and a small Llama body to train."""

from unembed.models._checks import check_vocabulary
from unembed.models._hub import is_on_hub, resolve_revision
from unembed.models._llama import Llama, LlamaConfig
from unembed.models._norm import FinalNorm
from unembed.models._save import is_saved_head
from unembed.models._tokens import tokens_of
from unembed.models._unembedding import Unembedding

__all__ = [
    "FinalNorm",
    "Llama",
    "LlamaConfig",
    "Unembedding",
    "check_vocabulary",
    "is_on_hub",
    "is_saved_head",
    "resolve_revision",
    "tokens_of",
]
