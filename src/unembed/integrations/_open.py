"""Open a causal language model and its tokenizer with transformers, quietly, with errors of one line."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import torch

from unembed.integrations._errors import out_of_memory
from unembed.integrations._gguf import read_once
from unembed.integrations._quiet import quiet
from unembed.results import InputError
from unembed.text._source import one_line

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
            or not a causal language model, a weight is missing from the files, the device is not there, or memory
            runs out.
        ImportError: If transformers is not installed.
    """
    place = resolve_device(device)
    try:
        import transformers
    except ImportError as error:
        raise ImportError('Running a model needs transformers: pip install "unembed[hf]"') from error
    path = Path(source)
    gguf = path.suffix == ".gguf"
    if gguf and not path.is_file():
        raise InputError(f"{path}: no such file.")
    where = str(path.parent) if gguf else str(source)
    options: dict[str, Any] = {"revision": revision, "gguf_file": path.name if gguf else None}
    options = {name: value for name, value in options.items() if value is not None}
    with quiet(stderr=gguf), read_once() if gguf else contextlib.nullcontext(), _as_input_errors(source):
        config = transformers.AutoConfig.from_pretrained(where, trust_remote_code=False, **options)
        _refuse_other_kinds(source, config, transformers)
        tokenizer = _open_tokenizer(source, where, config, options, transformers)
        with out_of_memory(f"loading {source}", "use a smaller model or `dtype`"):
            model, about = transformers.AutoModelForCausalLM.from_pretrained(
                where, config=config, dtype=dtype, trust_remote_code=False, output_loading_info=True, **options
            )
        missing = sorted({*about["missing_keys"], *(key for key, *_ in about["mismatched_keys"])})
        if missing:
            raise InputError(
                f"{source}: the files lack {len(missing)} tensors that {type(model).__name__} needs, "
                f"{missing[0]} among them; transformers would make them up."
            )
        with out_of_memory(f"moving {source} to {place}", "use `--device cpu` or a smaller `dtype`"):
            model = model.to(place)
    return model.eval().requires_grad_(False), tokenizer


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


def _open_tokenizer(source: str | Path, where: str, config: Any, options: dict[str, Any], transformers: Any) -> Any:
    opener = transformers.AutoTokenizer
    if "gguf_file" in options:
        # AutoTokenizer would build the configuration, and so all the metadata, once more to find this class.
        opener = transformers.TOKENIZER_MAPPING.get(type(config), None) or opener
    try:
        tokenizer = opener.from_pretrained(where, trust_remote_code=False, **options)
    except Exception as error:  # a missing file is OSError, ValueError, TypeError or KeyError by tokenizer class
        raise InputError(f"{source}: no tokenizer that transformers can open ({one_line(error)}).") from error
    if len(tokenizer) == 0 or not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise InputError(f"{source}: no tokenizer files; put tokenizer.json beside the weights.")
    return tokenizer


@contextlib.contextmanager
def _as_input_errors(source: str | Path) -> Iterator[None]:
    """What transformers raises for a bad checkpoint, as `InputError`; its own `ImportError`s say what to install."""
    try:
        yield
    except (InputError, ImportError):
        raise
    except Exception as error:  # OSError, ValueError, RuntimeError, KeyError, SafetensorError, ...: no common family
        raise InputError(f"{source}: transformers cannot open it ({one_line(error)}).") from error
