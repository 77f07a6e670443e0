"""The head of a GGUF file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jaxtyping import Float
from torch import Tensor

from unembed.models import _families as families
from unembed.models._checks import require
from unembed.models._gguf_file import GgufFile, open_parts
from unembed.models._norm import FinalNorm
from unembed.models._parts import Parts
from unembed.models._tokens import Tokens
from unembed.results import Check, InputError

# A quantised matrix counts as its float32 values: they are what the model computes with, saved or not.
_FLOAT_EPS = {"F64": 2.0**-52, "F32": 2.0**-23, "F16": 2.0**-10, "BF16": 2.0**-7}


def load_gguf(path: Path, norm: families.NormRule | None) -> Parts:
    """The head of a GGUF file."""
    files = open_parts(path)
    metadata = files[0].metadata
    architecture = str(metadata.get("general.architecture", "unknown"))
    if architecture in families.GGUF_ENCODERS | families.GGUF_ENCODER_DECODERS:
        what = "an encoder-decoder" if architecture in families.GGUF_ENCODER_DECODERS else "an encoder"
        raise InputError(f"{path}: {architecture} is {what}; unembed reads decoder-only language models.")
    holder = {name: file for file in files for name in file.tensors}
    tied = "output.weight" not in holder
    name = "token_embd.weight" if tied else "output.weight"
    if name not in holder:
        raise InputError(
            f"{path}: neither output.weight nor token_embd.weight among {len(holder)} tensors; give the whole model."
        )
    where = f"{name} in {holder[name].path}"
    width = metadata.get(f"{architecture}.embedding_length")
    shape = holder[name].tensors[name].shape
    checks = [_check_files(files), _check_head(name, tied), _check_width(shape, width, where)]
    final, check = _norm(holder, metadata, architecture, norm)
    softcap, scale, scores = _scores(metadata, architecture, shape[1])
    kind = holder[name].kind(name)
    strings = metadata.get("tokenizer.ggml.tokens")
    return Parts(
        weight=holder[name].get(name),
        bias=holder["output.bias"].get("output.bias") if "output.bias" in holder else None,
        softcap=softcap,
        scale=scale,
        norm=final,
        tied=tied,
        dtype=kind,
        kind="gguf",
        architecture=architecture,
        where=where,
        noise_eps=_FLOAT_EPS.get(kind, _FLOAT_EPS["F32"]),
        vocab_size=metadata.get(f"{architecture}.vocab_size"),
        tokens=Tokens.from_types(strings, metadata.get("tokenizer.ggml.token_type", [])) if strings else None,
        checks=[*checks, check, scores, Check("UNE011", "note", f"Stored as {kind}, dequantised to float32.")],
    )


def _check_files(files: list[GgufFile]) -> Check:
    return Check("UNE001", "ok", f"{len(files)} GGUF file{'s' if len(files) > 1 else ''}, whole.")


def _check_head(name: str, tied: bool) -> Check:
    if tied:
        return Check("UNE002", "note", f"The head is tied: the file has no output.weight, {name} is used.")
    return Check("UNE002", "ok", f"{name} is the head, not tied.")


def _check_width(shape: tuple[int, ...], width: Any, where: str) -> Check:
    if len(shape) != 2 or 0 in shape:
        raise InputError(
            f"{where}: expected a matrix [vocabulary, hidden], got shape {shape}; convert the model again."
        )
    if width is None:
        return Check("UNE003", "skipped", f"No embedding_length to compare with the head's width {shape[1]}.")
    if width != shape[1]:
        message = f"{where}: width {shape[1]}, but embedding_length is {width}; convert the model again"
        return require(Check("UNE003", "failed", message))
    return Check("UNE003", "ok", f"The head's width is embedding_length = {width}.")


def _scores(metadata: dict[str, Any], architecture: str, width: int) -> tuple[float | None, float, Check]:
    softcap = metadata.get(f"{architecture}.final_logit_softcapping", families.GGUF_SOFTCAPS.get(architecture)) or None
    value = metadata.get(f"{architecture}.logit_scale")
    scale, status = 1.0, "ok"
    if architecture in families.GGUF_SCALES:
        power, default = families.GGUF_SCALES[architecture]
        scale = float(value or default) ** power
    elif value is not None:
        status = "warning"
    if architecture in families.GGUF_BASE_WIDTH:
        scale *= families.GGUF_BASE_WIDTH[architecture] / width
    message = f"scores = {'' if scale == 1.0 else f'{scale:.6g} * '}(h W^T + b)"
    message += "" if softcap is None else f", soft-capped at {softcap:g}"
    if status == "warning":
        message += f"; {architecture}.logit_scale {value} is not applied, how {architecture} uses it is not known"
    return softcap, scale, Check("UNE010", status, f"{message}.")


def _norm(
    holder: dict[str, GgufFile], metadata: dict[str, Any], architecture: str, option: families.NormRule | None
) -> tuple[FinalNorm | None, Check]:
    if option == "none":
        return None, Check("UNE009", "note", "No final norm, as the option says.")

    def read(name: str) -> Float[Tensor, " D"] | None:
        return holder[name].get(name) if name in holder else None

    gain, shift = read("output_norm.weight"), read("output_norm.bias")
    rms = metadata.get(f"{architecture}.attention.layer_norm_rms_epsilon")
    layer = metadata.get(f"{architecture}.attention.layer_norm_epsilon")
    if option is not None:
        kind = "layer" if option.startswith("layer") else "rms"
    else:
        kind = "layer" if rms is None or (shift is not None and layer is not None) else "rms"
    eps = (layer if kind == "layer" else rms) or rms or layer
    if eps is None or (gain is None and architecture not in families.GGUF_BARE_NORMS):
        absent = "output_norm.weight" if gain is None else "layer_norm_rms_epsilon nor layer_norm_epsilon"
        message = f"The file has no {absent}, so the final norm is left out; the head reads its output."
        return None, Check("UNE009", "warning", message)
    # GGUF stores 1 + w where the checkpoint has w: `rms1p` and `rms` are one here.
    return FinalNorm(kind, gain, shift, float(eps)), Check("UNE009", "ok", f"Final norm: {kind}, eps {eps:.3g}.")
