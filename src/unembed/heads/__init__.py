"""Output heads: all under one law, `log_softmax(head(hidden))` is the distribution of the next token.

Every module here whose name is `_x.py` is imported, and every head in it exported: a new head is one file. Those that
ship with the package are named here too, for readers and type checkers.
"""

import importlib
import pkgutil

from unembed.heads._adaptive import AdaptiveSoftmax
from unembed.heads._base import HEADS, Cost, Head
from unembed.heads._build import build, load, save
from unembed.heads._direct_output import DirectOutputConnection
from unembed.heads._entmax import Entmax
from unembed.heads._hierarchical import HierarchicalSoftmax
from unembed.heads._linear import Linear
from unembed.heads._low_rank import LowRank
from unembed.heads._mixtape import Mixtape
from unembed.heads._mixture import MixtureOfSoftmaxes
from unembed.heads._monotonic import MonotonicSoftmax
from unembed.heads._multi_facet import MultiFacet
from unembed.heads._multi_token import MultiTokenPrediction
from unembed.heads._sigsoftmax import Sigsoftmax

__all__ = [
    "HEADS",
    "AdaptiveSoftmax",
    "Cost",
    "DirectOutputConnection",
    "Entmax",
    "Head",
    "HierarchicalSoftmax",
    "Linear",
    "LowRank",
    "Mixtape",
    "MixtureOfSoftmaxes",
    "MonotonicSoftmax",
    "MultiFacet",
    "MultiTokenPrediction",
    "Sigsoftmax",
    "build",
    "load",
    "save",
]

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
globals().update({kind.__name__: kind for kind in HEADS.values() if kind.__module__.startswith(f"{__name__}.")})
