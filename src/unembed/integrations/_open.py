"""Open a causal language model and its tokenizer with transformers, quietly, with errors of one line."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from pathlib import Path
from typing import Any, Literal

import torch

from unembed.integrations._errors import out_of_memory
from unembed.integrations._gguf import read_once
from unembed.integrations._quiet import quiet
from unembed.models import is_on_hub, is_saved_head
from unembed.results import InputError
from unembed.text import one_line

Dtype = Literal["float32", "float64", "bfloat16", "float16", "auto"]


def open_model(
    source: str | Path, *, revision: str | None = None, device: str = "cpu", dtype: Dtype = "float32"
) -> tuple[Any, Any]:
    """A model in eval mode without gradients, and its tokenizer. Code that a checkpoint brings along is never run.

    Args:
        source: A folder, a `.gguf` file, or a Hugging Face id.
        revision: Branch, tag or commit of a Hugging Face id.
        device: `auto` (the fastest there is), `cpu`, `cuda`, `cuda:1`, `mps`.
        dtype: Of the weights in memory; `auto` is as stored.

    Raises:
        InputError: If the source or its tokenizer is missing or broken, the architecture is unknown to transformers
            or not a causal language model, a weight is missing from the files, the device is not there, memory runs
            out, or transformers or another package that the checkpoint needs is not installed.
    """
    place = resolve_device(device)
    try:
        import transformers
    except ImportError as error:
        raise InputError('Running a model needs transformers: pip install "unembed[hf]"') from error
    where, gguf = _locate(source)
    if gguf is None and is_saved_head(Path(where)):
        raise InputError(
            f"{source}: holds a head alone (Unembedding.save wrote it), and text needs the whole model; "
            "use `--checks spectrum`, or give the model's folder."
        )
    options: dict[str, Any] = {"trust_remote_code": False} | ({"revision": revision} if revision else {})
    options |= {"gguf_file": gguf} if gguf else {}
    with quiet(stderr=bool(gguf)), read_once() if gguf else contextlib.nullcontext(), _as_input_errors(source):
        config = transformers.AutoConfig.from_pretrained(where, **options)
        _refuse_other_kinds(source, config, transformers)
        tokenizer = _open_tokenizer(source, where, config, options, transformers)
        with out_of_memory(f"loading {source}", "use a smaller model or `dtype`"):
            model, about = transformers.AutoModelForCausalLM.from_pretrained(
                where,
                config=config,
                dtype=dtype,
                use_safetensors=None if gguf else True,
                ignore_mismatched_sizes=True,
                output_loading_info=True,
                **options,
            )
        _refuse_made_up(source, model, about)
        with out_of_memory(f"moving {source} to {place}", "use `--device cpu` or a smaller `dtype`"):
            model = model.to(place)
    return model.eval().requires_grad_(False), tokenizer


def _locate(source: str | Path) -> tuple[str, str | None]:
    """Folder or hub id, and the name of the GGUF file in that folder.

    Raises:
        InputError: If a path is not there, or a folder holds no model.
    """
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix == ".gguf":
            return str(path.parent), path.name
        if path.name == "model.safetensors":
            return str(path.parent), None
        raise InputError(f"{path}: expected a model folder or a .gguf file, got another file; give its folder.")
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if not (path / "config.json").is_file() and len(ggufs) != 1:
            raise InputError(f"{path}: expected config.json, or one .gguf file, got neither.")
        return str(path), None if (path / "config.json").is_file() else ggufs[0].name
    if not isinstance(source, str) or not is_on_hub(source):
        raise InputError(f"{source}: no such file or folder.")
    return source, None


def resolve_device(device: str) -> torch.device:
    """The torch device that `device` means here.

    Raises:
        InputError: If it is not one, or not on this machine.
    """
    found = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if device == "auto":
        return torch.device("cuda" if found["cuda"] else "mps" if found["mps"] else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"Device {device!r}: expected auto, cpu, cuda, cuda:INDEX or mps.") from error
    here = [name for name, there in found.items() if there]
    if place.type not in here:
        raise InputError(f"Device {device!r} is not available here; use one of {['auto', *here]}.")
    if place.type == "cuda" and place.index is not None and place.index >= torch.cuda.device_count():
        raise InputError(f"Device {device!r}: this machine has {torch.cuda.device_count()} CUDA devices.")
    return place


def _refuse_other_kinds(source: str | Path, config: Any, transformers: Any) -> None:
    """Refuse what is not a causal language model before its weights are read."""
    kind = (config.architectures or [type(config).__name__])[0]
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{source}: {kind} is an encoder-decoder; expected a causal (decoder-only) language model.")
    if type(config) not in transformers.MODEL_FOR_CAUSAL_LM_MAPPING:
        raise InputError(f"{source}: {kind} has no causal language model in transformers {transformers.__version__}.")
    if kind.endswith(("ForMaskedLM", "ForPreTraining", "ForSequenceClassification")):
        raise InputError(f"{source}: {kind} is not a causal language model; its head does not predict the next token.")


def _refuse_made_up(source: str | Path, model: Any, about: dict[str, Any]) -> None:
    """Refuse a model with tensors that transformers filled with random numbers."""
    wrong = {key: f"has shape {tuple(came)} for {tuple(wanted)}" for key, came, wanted in about["mismatched_keys"]}
    wrong |= dict.fromkeys(about["missing_keys"], "is missing")
    if wrong:
        key = min(wrong)
        others = f", and {len(wrong) - 1} other tensors are wrong" if len(wrong) > 1 else ""
        raise InputError(
            f"{source}: {key} {wrong[key]} for {type(model).__name__}{others}; transformers would make up the numbers."
        )


def _open_tokenizer(source: str | Path, where: str, config: Any, options: dict[str, Any], transformers: Any) -> Any:
    opener = transformers.AutoTokenizer
    if "gguf_file" in options and not (Path(where) / "tokenizer_config.json").is_file():
        # AutoTokenizer comes to this class too, but parses the whole file once more to get there.
        opener = transformers.TOKENIZER_MAPPING.get(type(config), None) or opener
    mend = "put tokenizer.json and tokenizer_config.json beside the weights"
    try:
        tokenizer = opener.from_pretrained(where, **options)
    except Exception as error:  # a missing file is OSError, ValueError, TypeError or KeyError by tokenizer class
        raise InputError(f"{source}: no tokenizer that transformers can open; {mend}.") from error
    if len(tokenizer) == 0 or not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise InputError(f"{source}: its tokenizer makes no tokens of a text; {mend}.")
    return tokenizer


@contextlib.contextmanager
def _as_input_errors(source: str | Path) -> Generator[None]:
    """What transformers raises for a bad checkpoint, as `InputError`."""
    try:
        yield
    except InputError:
        raise
    except ImportError as error:  # sentencepiece, accelerate, ...: transformers says what to install
        raise InputError(f"{source}: {one_line(error)}.") from error
    except Exception as error:  # OSError, ValueError, RuntimeError, KeyError, SafetensorError, ...: no common family
        if "custom code" in str(error) or "trust_remote_code" in str(error):
            raise InputError(f"{source}: brings its own model code, which unembed never runs.") from error
        raise InputError(f"{source}: transformers cannot open it ({one_line(error)}).") from error
