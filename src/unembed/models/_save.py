"""A head as a folder: `config.json`, `model.safetensors` and `tokens.json`, read back bit-equal."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from unembed.models._config import read_json
from unembed.models._norm import FinalNorm
from unembed.models._parts import Parts
from unembed.models._safetensors import SINGLE, Checkpoint
from unembed.models._tokens import Tokens
from unembed.results import Check, InputError

if TYPE_CHECKING:
    from unembed.models._unembedding import Unembedding

KEY = "unembed_head"
_FORMAT = 1


def save_head(head: Unembedding, folder: Path) -> Path:
    """Write everything under a temporary name beside `folder`, then rename it.

    Raises:
        InputError: If `folder` exists and is not empty.
    """
    from safetensors.torch import save_file

    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise InputError(f"{folder}: exists and is not an empty folder; give another name or remove it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    tensors = {"lm_head.weight": head.weight} | ({} if head.bias is None else {"lm_head.bias": head.bias})
    tensors |= {f"norm.{name}": tensor for name, tensor in (head.norm.tensors if head.norm else {}).items()}
    temporary = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}."))
    try:
        stored = {name: t.detach().cpu().contiguous() for name, t in tensors.items()}
        save_file(stored, temporary / SINGLE, metadata={"format": "pt"})
        if head.tokens is not None:
            # ASCII escapes carry lone surrogates, which UTF-8 cannot.
            (temporary / "tokens.json").write_text(json.dumps(head.tokens), encoding="ascii")
        (temporary / "config.json").write_text(json.dumps(_config(head), indent=2) + "\n", encoding="ascii")
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)
        temporary.replace(folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return folder


def _config(head: Unembedding) -> dict[str, Any]:
    about = {
        "format": _FORMAT,
        "softcap": head.softcap,
        "scale": head.scale,
        "tied": head.tied,
        "dtype": head.dtype,
        "noise_eps": head.noise_eps,
        "norm": None if head.norm is None else {"kind": head.norm.kind, "eps": head.norm.eps},
        "vocab_tokens": head.vocab_tokens,
        "holes": list(head.holes),
        "source": head.source,
        "hash": head.hash,
    }
    size = {"hidden_size": head.in_features, "vocab_size": head.vocab_rows}
    return {"model_type": head.architecture, **size, KEY: about}


def is_saved_head(folder: Path) -> bool:
    """Whether `folder` holds a head that `save_head` wrote, without a model around it."""
    config = folder / "config.json"
    return config.is_file() and KEY in read_json(config)


def load_saved(folder: Path, config: dict[str, Any]) -> Parts:
    """Read a folder that `save_head` wrote.

    Raises:
        InputError: If the folder is not as it was written.
    """
    path, about = folder / SINGLE, config[KEY]
    if not isinstance(about, dict) or about.get("format") != _FORMAT:
        raise InputError(
            f"{folder / 'config.json'}: a head in a format this version does not read; use the version that wrote it."
        )
    checkpoint = Checkpoint.of_file(path)
    tensors = {name: checkpoint.get(name) for name in checkpoint.files}
    try:
        norm = about["norm"] and FinalNorm(
            about["norm"]["kind"], tensors.get("norm.weight"), tensors.get("norm.bias"), about["norm"]["eps"]
        )
        strings = _strings(folder, about["vocab_tokens"])
        return Parts(
            weight=tensors["lm_head.weight"],
            bias=tensors.get("lm_head.bias"),
            softcap=about["softcap"],
            scale=about["scale"],
            norm=norm,
            tied=about["tied"],
            dtype=about["dtype"],
            kind="safetensors",
            architecture=config["model_type"],
            where=f"lm_head.weight in {path}",
            noise_eps=about["noise_eps"],
            tokens=None if strings is None else Tokens(strings, tuple(about["holes"])),
            checks=[
                Check("UNE001", "ok", "1 file, whole."),
                Check(
                    "UNE002",
                    "ok",
                    f"A head saved by unembed from {about['source']}, {'tied' if about['tied'] else 'not tied'} there.",
                ),
                Check("UNE009", "ok" if norm else "note", f"Final norm: {norm.kind if norm else 'none'}, as saved."),
            ],
        )
    except (KeyError, TypeError) as error:
        raise InputError(f"{folder}: a saved head without {error}; save it again.") from None


def _strings(folder: Path, size: int | None) -> list[str] | None:
    path = folder / "tokens.json"
    if not path.is_file():
        return None
    strings = read_json(path, list)
    if len(strings) != size:
        raise InputError(f"{path}: {len(strings)} tokens, but config.json says {size}; save the head again.")
    return strings
