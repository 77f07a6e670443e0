"""Find head, embedding and final norm among the tensors of a checkpoint, and settle what is tied to what."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from unembed.models import _families as families
from unembed.models._checks import require
from unembed.models._config import ModelConfig
from unembed.models._norm import FinalNorm
from unembed.models._parts import Parts
from unembed.models._safetensors import Checkpoint, widen
from unembed.results import Check, InputError

HEADS = ("lm_head", "embed_out", "output_projection", "output_layer", "output", "head")
EMBEDDINGS = (
    "embed_tokens",
    "wte",
    "embed_in",
    "word_embeddings",
    "tok_embeddings",
    "tokens_embed",
    "embeddings",
    "transformer.w",
)
NORMS = (
    "norm",
    "ln_f",
    "final_layer_norm",
    "final_layernorm",
    "norm_f",
    "final_norm",
    "ln_out",
    "embedding_norm",
    "layer_norm",
    "layernorm",
)
_PACKED = (".qweight", ".weight_packed")
_BETWEEN = ("project_out",)  # OPT 350m: a matrix between the norm and the head
_ELSEWHERE = ("vision", "visual", "audio", "image", "talker", "mtp", "projector", "codec", "encoder")


def pick(names: Iterable[str], modules: Iterable[str], *, near: str = "") -> str | None:
    """The module among `modules` whose weight is in `names`: outside the layers, nearest to the tensor `near`."""
    found = []
    for rank, module in enumerate(modules):
        for name in names:
            stem = name.removesuffix(".weight")
            if stem == name or not (stem == module or stem.endswith(f".{module}")):
                continue
            parts = name.split(".")
            if any(part.isdigit() or any(word in part for word in _ELSEWHERE) for part in parts):
                continue
            shared = next((i for i, (a, b) in enumerate(zip(parts, near.split("."), strict=False)) if a != b), 0)
            found.append((-shared, len(parts), rank, stem))
    return min(found)[-1] if found else None


def resolve(checkpoint: Checkpoint, config: ModelConfig, norm: families.NormRule | None) -> Parts:
    """The head of a checkpoint; reads the values of head, bias and norm only."""
    config.refuse_other_kinds()
    names = checkpoint.files
    choice = _choose(checkpoint, config)
    where = f"{choice.name} in {checkpoint.file_of(choice.name)}"
    checks = [*choice.checks, _check_width(checkpoint.shape(choice.name), config, where)]
    scale_name = next((n for n in (f"{choice.name}_scale", f"{choice.name}_scale_inv") if n in names), None)
    if scale_name is not None:
        raise InputError(
            f"{where}: quantised with {scale_name}; give the checkpoint before quantisation, or a GGUF file."
        )
    stored = checkpoint.get(choice.name)
    weight, noise_eps = widen(stored, where)
    dtype = str(stored.dtype).removeprefix("torch.")
    widened = "" if weight is stored else ", widened to bfloat16, which holds each value"
    checks.append(Check("UNE011", "note" if widened else "ok", f"Stored as {dtype}{widened}."))
    bias = _bias(checkpoint, choice.name, weight.shape[0])
    final, check = _norm(checkpoint, config, norm, near=choice.near)
    return Parts(
        weight=weight,
        bias=bias,
        softcap=config.softcap(),
        scale=config.scale(),
        norm=final,
        tied=choice.tied,
        dtype=dtype,
        kind="safetensors",
        architecture=config.architecture,
        where=where,
        noise_eps=noise_eps,
        vocab_size=config.count(*families.VOCAB_FIELDS),
        checks=[*checks, check, config.check_scores()],
    )


@dataclass(frozen=True)
class _Choice:
    """The tensor that is the head, whether it is the embedding too, and the tensor its body lies next to."""

    name: str
    tied: bool
    near: str
    checks: list[Check]


def _choose(checkpoint: Checkpoint, config: ModelConfig) -> _Choice:
    names = checkpoint.files
    embedding_stem = pick(names, EMBEDDINGS)
    head_stem = pick(names, HEADS)
    embedding = embedding_stem and f"{embedding_stem}.weight"
    head = head_stem and f"{head_stem}.weight"
    packed = next((n for n in names if n.endswith(_PACKED) and n.rpartition(".")[0].endswith(HEADS)), None)
    if head is None and packed is not None:
        raise InputError(f"{checkpoint.where}: {packed} is packed; give the model before quantisation, or a GGUF file.")
    if head is None and embedding is None:
        raise InputError(
            f"{checkpoint.where}: no head ({', '.join(HEADS)}) and no embedding among its {len(names)} tensors; "
            "give the whole model."
        )
    said = config.tied
    tied = said if said is not None else config.tied_by_default
    source = (
        f"{config.where} says tie_word_embeddings {str(said).lower()}"
        if said is not None
        else (
            f"{config.where} does not say tie_word_embeddings, {config.architecture} "
            + (f"defaults to {str(tied).lower()}" if tied is not None else "is not known")
        )
    )
    if head is None:
        assert embedding is not None
        return _from_embedding(embedding, checkpoint, config, tied, source)
    if embedding is None or not tied:
        return _from_head(head, embedding, checkpoint, tied=bool(tied), source=source)
    return _from_both(head, embedding, checkpoint, source)


def _from_embedding(name: str, checkpoint: Checkpoint, config: ModelConfig, tied: bool | None, source: str) -> _Choice:
    bodies = config.top.get("architectures") or []
    body = (
        next((b for b in bodies if isinstance(b, str) and b.endswith("Model")), None)
        if isinstance(bodies, list)
        else None
    )
    if not tied and body:
        raise InputError(
            f"{checkpoint.where}: {body} is a body without a head, and {source}; save the ...ForCausalLM model instead."
        )
    if tied is False:
        require(
            Check(
                "UNE002",
                "failed",
                f"{checkpoint.where}: no lm_head.weight, only {name}, and {source}, so a loader would fill the head "
                "with random numbers; save the model with its head, or set tie_word_embeddings to true if both are one",
            )
        )
    message = f"The head is tied: {name} is used, there is no lm_head.weight and {source}."
    return _Choice(name, True, name, [Check("UNE002", "note", message)])


def _from_head(head: str, embedding: str | None, checkpoint: Checkpoint, *, tied: bool, source: str) -> _Choice:
    if embedding is None:
        message = f"{head} is the head; no embedding is stored" + (
            f", and {source}, so it serves as both." if tied else "."
        )
        return _Choice(head, tied, head, [Check("UNE002", "note" if tied else "ok", message)])
    rows, other = checkpoint.shape(head)[:1], checkpoint.shape_at_hand(embedding)
    if other is not None and rows != other[:1]:
        message = (
            f"{head} is the head, with {rows[0]} rows; the embedding has {other[0]}; they are not tied ({source})."
        )
        return _Choice(head, False, embedding, [Check("UNE002", "note", message)])
    return _Choice(head, False, embedding, [Check("UNE002", "ok", f"{head} is the head, not tied ({source}).")])


def _from_both(head: str, embedding: str, checkpoint: Checkpoint, source: str) -> _Choice:
    if _equal(checkpoint.get(head), checkpoint.get(embedding)):
        message = f"{head} and {embedding} are both stored and equal; tied ({source})."
        return _Choice(head, True, embedding, [Check("UNE002", "note", message)])
    shapes = f"shapes {checkpoint.shape(head)} and {checkpoint.shape(embedding)}"
    message = (
        f"{source} but {head} and {embedding} differ ({shapes}): {head} is used and not tied, as transformers 5 does; "
        f"transformers 4 used {embedding}. Set tie_word_embeddings to false if this is meant."
    )
    return _Choice(head, False, embedding, [Check("UNE002", "warning", message)])


def _equal(a: Tensor, b: Tensor) -> bool:
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    # As integers: equal bits, NaN included, and 8-bit floats have no comparison.
    return all(
        torch.equal(x.view(torch.uint8), y.view(torch.uint8)) for x, y in zip(a.split(8192), b.split(8192), strict=True)
    )


def _check_width(shape: tuple[int, ...], config: ModelConfig, where: str) -> Check:
    if len(shape) != 2 or 0 in shape:
        raise InputError(f"{where}: expected a matrix [vocabulary, hidden], got shape {shape}; give the whole model.")
    field = next((name for name in families.WIDTH_FIELDS if config.count(name) is not None), None)
    if field is None:
        return Check(
            "UNE003", "skipped", f"{config.where} has no hidden_size to compare with the head's width {shape[1]}."
        )
    width = config.count(field)
    if width == shape[1]:
        return Check("UNE003", "ok", f"The head's width is {field} = {width}.")
    message = f"{where}: width {shape[1]}, but {config.where} says {field} {width}; the two are not of one model"
    return require(Check("UNE003", "failed", message))


def _bias(checkpoint: Checkpoint, head: str, rows: int) -> Tensor | None:
    name = f"{head.removesuffix('.weight')}.bias"
    if name not in checkpoint.files:
        # A tied head may still have a bias of its own.
        found = pick([n.removesuffix(".bias") + ".weight" for n in checkpoint.files if n.endswith(".bias")], HEADS)
        if found is None:
            return None
        name = f"{found}.bias"
    where = f"{name} in {checkpoint.file_of(name)}"
    if checkpoint.shape(name) != (rows,):
        raise InputError(
            f"{where}: expected shape ({rows},), got {checkpoint.shape(name)}; the two are not of one model."
        )
    return widen(checkpoint.get(name), where)[0]


def _norm(
    checkpoint: Checkpoint, config: ModelConfig, option: families.NormRule | None, *, near: str
) -> tuple[FinalNorm | None, Check]:
    spec = config.of_family(families.NORMS)
    if option is not None:
        spec = _spec_of_option(option, config)
    if spec is None:
        message = (
            f"The final norm of model_type {config.architecture} is not known, so it is left out; scores from hidden "
            "states after the norm are right. Say it with norm=rms, rms1p, layer or none."
        )
        return None, Check("UNE009", "warning", message)
    if spec.rule == "none":
        return None, Check("UNE009", "note", "No final norm, as the option says.")
    between = next((n for n in checkpoint.files if n.removesuffix(".weight").endswith(_BETWEEN)), None)
    if between is not None:
        message = (
            f"{between} lies between the final norm and the head, so the norm is left out; the head reads its output."
        )
        return None, Check("UNE009", "warning", message)
    return _read_norm(checkpoint, config, spec, near=near)


def _spec_of_option(option: families.NormRule, config: ModelConfig) -> families.NormSpec:
    field = next((name for name in families.EPS_FIELDS if config.number(name) is not None), None)
    return families.NormSpec(option, field, 1e-5 if option.startswith("layer") else 1e-6)


def _read_norm(
    checkpoint: Checkpoint, config: ModelConfig, spec: families.NormSpec, *, near: str
) -> tuple[FinalNorm | None, Check]:
    value = config.number(spec.eps_field) if spec.eps_field else None
    eps = spec.eps if value is None else value
    kind = "layer" if spec.rule.startswith("layer") else "rms"
    stem = pick(checkpoint.files, NORMS, near=near)
    if stem is None:
        if any(name in families.BARE_NORMS for name in config.model_types):
            return FinalNorm(kind, None, None, eps), Check("UNE009", "ok", f"Final norm: {kind}, no gain, eps {eps:g}.")
        message = (
            f"{checkpoint.where}: no final norm among the tensors (looked for {', '.join(NORMS)}); it is left out."
        )
        return None, Check("UNE009", "warning", message)
    gain = widen(checkpoint.get(f"{stem}.weight"), stem)[0].float()
    if spec.rule.endswith("1p"):
        gain = gain + 1.0
    shift = widen(checkpoint.get(f"{stem}.bias"), stem)[0].float() if f"{stem}.bias" in checkpoint.files else None
    said = f"Final norm: {kind} from {stem}, eps {eps:g}{', gain stored minus 1' if spec.rule.endswith('1p') else ''}."
    return FinalNorm(kind, gain, shift, eps), Check("UNE009", "ok", said)
