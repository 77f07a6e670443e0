"""From what a user gives to the head in it: folder, file, hub id or model object."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from unembed.models import _families as families
from unembed.models._config import ModelConfig, read_json
from unembed.models._gguf import load_gguf
from unembed.models._gguf_file import MAGIC
from unembed.models._hub import HubModel, is_hub_id
from unembed.models._module import load_module
from unembed.models._parts import Parts
from unembed.models._resolve import resolve
from unembed.models._safetensors import INDEX, SINGLE, Checkpoint
from unembed.models._save import is_saved_head, load_saved
from unembed.models._tokens import read_tokens, tokens_of
from unembed.results import Check, InputError

_PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


def read_source(source: Any, revision: str | None, norm: families.NormRule | None, tokenizer: Any) -> tuple[Parts, str]:
    """The head and how to call its source.

    Raises:
        InputError: If there is no head to read; says what was expected and the mend.
    """
    if revision is not None and (not isinstance(source, str) or Path(source).exists()):
        raise InputError(f"`revision` is for hub ids, got {revision!r} with what is here already; leave it out.")
    if isinstance(source, nn.Module):
        parts, name = load_module(source, norm), type(source).__name__
    elif isinstance(source, str | Path):
        parts, name = _read_path(source, revision, norm), str(source)
    else:
        raise InputError(f"`source` must be a path, a hub id or a model, got {type(source).__name__}.")
    if tokenizer is not None:
        parts.tokens = tokens_of(tokenizer)
    return parts, name


def _read_path(source: str | Path, revision: str | None, norm: families.NormRule | None) -> Parts:
    path = Path(source).expanduser()
    if path.is_dir():
        return _read_folder(path, norm)
    if path.is_file():
        return _read_file(path, norm)
    if isinstance(source, str) and is_hub_id(source):
        return _read_hub(HubModel(source, revision), norm)
    raise InputError(
        f"{source}: no such file or folder; give a model folder, a .safetensors or .gguf file, or a hub id."
    )


def _read_hub(hub: HubModel, norm: families.NormRule | None) -> Parts:
    path = hub.config()
    config = ModelConfig(read_json(path), f"config.json of {hub.repo_id}")
    config.refuse_other_kinds()
    parts = resolve(hub.checkpoint(), config, norm)
    parts.checks.insert(0, Check("UNE001", "ok", f"Fetched from the hub: {hub.repo_id}, what the head needs."))
    folder = hub.tokenizer()
    parts.tokens = None if folder is None else read_tokens(folder)
    return parts


def _read_file(path: Path, norm: families.NormRule | None) -> Parts:
    with path.open("rb") as file:
        magic = file.read(4)
    if path.suffix == ".gguf" or magic == MAGIC:
        return load_gguf(path, norm)
    if path.suffix in _PICKLES:
        raise _refuse_pickle(path)
    if path.suffix != ".safetensors":
        raise InputError(f"{path}: not a model file; give a .safetensors or .gguf file, or the model's folder.")
    return _read_checkpoint(path.parent, Checkpoint.of_file(path), norm)


def _read_folder(folder: Path, norm: families.NormRule | None) -> Parts:
    if is_saved_head(folder):
        if norm is not None:
            raise InputError(f"`norm={norm}`: {folder} is a saved head with its norm in it; leave the option out.")
        return load_saved(folder, read_json(folder / "config.json"))
    if (folder / INDEX).is_file():
        return _read_checkpoint(folder, Checkpoint.of_index(folder / INDEX, folder.joinpath), norm)
    files = sorted(folder.glob("*.safetensors"))
    single = folder / SINGLE if (folder / SINGLE).is_file() else files[0] if len(files) == 1 else None
    if single is not None and single.name.startswith("adapter_"):
        raise InputError(f"{folder}: an adapter, not a model; merge it into its base model and save that.")
    if single is not None:
        return _read_checkpoint(folder, Checkpoint.of_file(single), norm)
    if files:
        raise InputError(
            f"{folder}: {len(files)} .safetensors files and no {INDEX}; fetch the index, or give one file."
        )
    ggufs = [path for path in sorted(folder.glob("*.gguf")) if "-of-" not in path.stem or "-00001-of-" in path.stem]
    if len(ggufs) == 1:
        return load_gguf(ggufs[0], norm)
    if ggufs:
        raise InputError(
            f"{folder}: {len(ggufs)} GGUF files ({', '.join(p.name for p in ggufs[:5])}); give the path of one."
        )
    pickled = next((path for path in sorted(folder.iterdir()) if path.suffix in _PICKLES), None)
    if pickled is not None:
        raise _refuse_pickle(pickled)
    what = "an empty folder" if not any(folder.iterdir()) else "not a model folder"
    raise InputError(
        f"{folder}: {what}; expected config.json with {SINGLE} (or shards with their index), or one .gguf file."
    )


def _read_checkpoint(folder: Path, checkpoint: Checkpoint, norm: families.NormRule | None) -> Parts:
    path = folder / "config.json"
    if not path.is_file():
        raise InputError(
            f"{path}: absent, and it says how the head is scaled and tied; put the model's config.json there."
        )
    config = ModelConfig(read_json(path), str(path))
    config.refuse_other_kinds()
    count = checkpoint.check_shards()
    parts = resolve(checkpoint, config, norm)
    parts.checks.insert(0, Check("UNE001", "ok", f"{count} safetensors file{'s' if count > 1 else ''}, whole."))
    parts.tokens = read_tokens(folder)
    return parts


def _refuse_pickle(path: Path) -> InputError:
    return InputError(
        f"{path}: a pickle can run code when read, so only safetensors and GGUF are; convert it with "
        "AutoModelForCausalLM.from_pretrained(...).save_pretrained(folder)."
    )
