"""The output layer of language models: measured, loaded, replaced.

Submodules and `audit` are imported when first used, so that `import unembed` and the report need no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from unembed._version import __version__

if TYPE_CHECKING:
    from unembed import diagnostics, heads, integrations, losses, models, ops, report, results, testing, text
    from unembed._audit import Audit, audit

_SUBMODULES = {
    "diagnostics",
    "experiments",
    "heads",
    "integrations",
    "losses",
    "models",
    "ops",
    "report",
    "results",
    "testing",
    "text",
}
_NAMES = {"audit": "unembed._audit", "Audit": "unembed._audit"}
__all__ = [
    "Audit",
    "__version__",
    "audit",
    "diagnostics",
    "heads",
    "integrations",
    "losses",
    "models",
    "ops",
    "report",
    "results",
    "testing",
    "text",
]


def __getattr__(name: str) -> Any:
    if name in _SUBMODULES:
        return importlib.import_module(f"unembed.{name}")
    if name in _NAMES:
        return getattr(importlib.import_module(_NAMES[name]), name)
    raise AttributeError(f"module 'unembed' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*__all__, *_SUBMODULES})
