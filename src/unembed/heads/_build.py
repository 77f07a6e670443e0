"""Heads by name, and heads on disk.

`build("mos:k=4", 512, 32000)` is `MixtureOfSoftmaxes(512, 32000, k=4)`. A saved head is a folder with its parameters in
`head.safetensors` and what made it in `head.json`.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

from unembed._version import __version__
from unembed.heads._base import HEADS, Head
from unembed.heads._options import check_options, nearest
from unembed.results import InputError, replace_together

_WEIGHTS, _ABOUT = "head.safetensors", "head.json"


def build(spec: str, in_features: int, out_features: int, *, device: Any = None, dtype: Any = None) -> Head:
    """The head that `spec` names.

    Args:
        spec: `name` or `name:option=value,option=value`, with Python literals for values (a bare word is a string).
        in_features: D.
        out_features: V.
        device: Where the parameters are; `meta` makes none.
        dtype: Of the parameters.

    Raises:
        ValueError: If there is no such head or option, or a value is none that it takes; says what there is.
    """
    name, _, listed = spec.partition(":")
    kind = _kind(name.strip())
    options: dict[str, Any] = {}
    for item in _items(listed):
        key, equals, value = item.partition("=")
        if not equals:
            raise ValueError(f"{spec!r}: expected option=value, got {item!r}.")
        options[key.strip()] = _literal(value.strip())
    try:
        check_options(kind, options)
    except ValueError as error:
        raise ValueError(f"{spec!r}: {error}") from None
    try:
        return kind(in_features, out_features, **options, device=device, dtype=dtype)
    except TypeError as error:  # what annotations do not say
        raise ValueError(f"{spec!r}: {error}.") from error


def save(head: Head, folder: str | Path) -> Path:
    """Write parameters and options into `folder`, both files or none."""
    place = Path(folder)
    about = {
        "unembed": __version__,
        "head": type(head).names[0],
        "in_features": head.in_features,
        "out_features": head.out_features,
        "dtype": str(next(head.parameters()).dtype).removeprefix("torch."),
        "options": head.options(),
    }
    tensors = {name: tensor.detach().contiguous() for name, tensor in head.state_dict().items()}
    with replace_together(place) as stage:
        with stage.open(_WEIGHTS) as file:
            file.write(to_bytes(tensors))
        stage.text(_ABOUT, json.dumps(about, indent=2) + "\n")
    return place


def load(folder: str | Path, *, device: Any = None) -> Head:
    """The head saved in `folder`.

    Raises:
        InputError: If there is none, or its parts do not fit.
    """
    place = Path(folder)
    try:
        about = json.loads((place / _ABOUT).read_text(encoding="utf-8"))
        tensors = load_file(place / _WEIGHTS, device=str(device or "cpu"))
        kind = _kind(about["head"])
        head = kind(
            about["in_features"],
            about["out_features"],
            **about["options"],
            device=device,
            dtype=getattr(torch, about["dtype"]),
        )
        head.load_state_dict(tensors)
    except FileNotFoundError as error:
        raise InputError(f"{place}: expected {_ABOUT} and {_WEIGHTS}, which `heads.save` writes.") from error
    except (SafetensorError, KeyError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise InputError(f"{place}: not a head that this version can load ({' '.join(str(error).split())}).") from error
    return head


def _kind(name: str) -> Any:
    if name not in HEADS:
        raise ValueError(f"There is no head {name!r}{nearest(name, HEADS)}")
    return HEADS[name]


def _items(listed: str) -> list[str]:
    """Split at commas that are in no bracket."""
    items, depth, current = [], 0, ""
    for character in listed:
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            items.append(current)
            current = ""
        else:
            current += character
    return [item for item in [*items, current] if item.strip()]


def _literal(text: str) -> Any:
    words = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
