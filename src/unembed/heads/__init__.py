"""Output heads: all under one law, `log_softmax(head(hidden))` is the distribution of the next token.

Every module here whose name is `_x.py` is imported, and every head in it exported: a new head is one file.
"""

import importlib
import pkgutil

from unembed.heads._base import HEADS, Cost, Head
from unembed.heads._build import build, load, save
from unembed.heads._linear import Linear
from unembed.heads._mixture import MixtureOfSoftmaxes

for _module in pkgutil.iter_modules(__path__):
    importlib.import_module(f"{__name__}.{_module.name}")
globals().update({kind.__name__: kind for kind in HEADS.values()})

__all__ = ["HEADS", "Cost", "Head", "Linear", "MixtureOfSoftmaxes", "build", "load", "save"]
