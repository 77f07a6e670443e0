"""The head of a model object in memory: weights referenced, formulas confirmed on random input.

Shapes: V rows, D hidden size.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import linear

from unembed.heads import Linear
from unembed.models import _families as families
from unembed.models._config import ModelConfig
from unembed.models._llama import Llama
from unembed.models._norm import FinalNorm
from unembed.models._parts import Parts
from unembed.models._resolve import EMBEDDINGS, HEADS, NORMS, pick
from unembed.models._safetensors import widen
from unembed.results import Check, InputError

_EPS = ("eps", "variance_epsilon", "norm_eps", "epsilon")


def load_module(model: nn.Module, norm: families.NormRule | None) -> Parts:
    """The head of a causal language model, transformers' or one with the same names and a `config`."""
    config = ModelConfig(_config_dict(model), f"the config of {type(model).__name__}")
    config.refuse_other_kinds()
    modules = {name: module for name, module in model.named_modules(remove_duplicate=False) if name}
    with torch.no_grad():
        name, head, tied = _head(model, modules)
        where = f"{name}.weight of {type(model).__name__}"
        weight, noise_eps = widen(head.weight.detach(), where)
        if weight.is_meta:
            raise InputError(f"{where} is on the meta device and has no values; load the weights first.")
        bias = getattr(head, "bias", None)
        bias = None if bias is None else bias.detach()
        _confirm_head(name, head, weight, bias)
        near = pick([f"{n}.weight" for n in modules], EMBEDDINGS) or name
        final, check = _norm(modules, norm, width=weight.shape[1], near=near)
    dtype = str(head.weight.dtype).removeprefix("torch.")
    said = f"{name} is {'tied to the embedding' if tied else 'the head, not tied'}."
    return Parts(
        weight=weight,
        bias=bias,
        softcap=config.softcap() if getattr(head, "softcap", None) is None else head.softcap,
        scale=config.scale() * (head.scale if type(head) is Linear else 1.0),
        norm=final,
        tied=tied,
        dtype=dtype,
        kind="object",
        architecture=config.architecture,
        where=where,
        noise_eps=noise_eps,
        vocab_size=config.count(*families.VOCAB_FIELDS),
        checks=[
            Check("UNE002", "note" if tied else "ok", said),
            Check("UNE003", "ok", f"The head's width is {weight.shape[1]}."),
            check,
            config.check_scores(),
            Check("UNE011", "ok", f"Stored as {dtype}."),
        ],
    )


def _config_dict(model: nn.Module) -> dict[str, Any]:
    config: Any = getattr(model, "config", None)
    if config is None:
        raise InputError(
            f"{type(model).__name__} has no `config`; give a transformers model, or the folder of a saved one."
        )
    if hasattr(config, "to_dict"):
        return config.to_dict()
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        content = dataclasses.asdict(config)
    else:
        content = dict(config) if isinstance(config, dict) else dict(vars(config))
    return {"model_type": type(model).__name__.lower(), **content}


def _head(model: Any, modules: dict[str, nn.Module]) -> tuple[str, Any, bool]:
    """Name, module and whether its matrix is the embedding's."""
    names = [f"{name}.weight" for name in modules]
    head: Any = model.get_output_embeddings() if hasattr(model, "get_output_embeddings") else None
    if head is None:
        stem = pick(names, HEADS)
        head = modules[stem] if stem else None
    embedding: Any = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
    if embedding is None:
        stem = pick(names, EMBEDDINGS)
        embedding = modules[stem] if stem else None
    if head is None and isinstance(model, Llama):
        return _name_of(embedding, modules), embedding, True
    if head is None:
        raise InputError(f"{type(model).__name__} is a body without a head; give the ...ForCausalLM model.")
    if not isinstance(getattr(head, "weight", None), Tensor) or head.weight.dim() != 2:
        raise InputError(
            f"The head of {type(model).__name__}, {type(head).__name__}, has no matrix; unembed reads linear heads."
        )
    weight = getattr(embedding, "weight", None)
    return _name_of(head, modules), head, isinstance(weight, Tensor) and weight is head.weight


def _name_of(module: nn.Module, modules: dict[str, nn.Module]) -> str:
    return next((name for name, other in modules.items() if other is module), type(module).__name__)


def _confirm_head(name: str, head: nn.Module, weight: Float[Tensor, "V D"], bias: Float[Tensor, " V"] | None) -> None:
    """Refuse a head that is not `h W^T + b`: an adapter, a quantised matrix, a mixture."""
    if isinstance(head, nn.Embedding) or type(head) in (nn.Linear, Linear):
        return
    hidden = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    expected = linear(hidden, weight, bias)
    try:
        given = head(hidden)
    except Exception as error:
        raise InputError(
            f"{name} is a {type(head).__name__} that takes no hidden states ({error}); unembed reads linear heads."
        ) from None
    if not isinstance(given, Tensor) or given.shape != expected.shape or not _close(given, expected):
        raise InputError(
            f"{name}, a {type(head).__name__}, does not give h W^T + b; merge its adapters, or use its base."
        )


def _norm(
    modules: dict[str, nn.Module], option: families.NormRule | None, *, width: int, near: str
) -> tuple[FinalNorm | None, Check]:
    if option == "none":
        return None, Check("UNE009", "note", "No final norm, as the option says.")
    if any(name.endswith("project_out") for name in modules):
        message = (
            "project_out lies between the final norm and the head, so the norm is left out; the head reads its output."
        )
        return None, Check("UNE009", "warning", message)
    name = pick([f"{name}.weight" for name in modules], NORMS, near=near)
    if name is None:
        return None, Check(
            "UNE009", "warning", f"No final norm among the modules (looked for {', '.join(NORMS)}); it is left out."
        )
    module = modules[name]
    rules: tuple[families.NormRule, ...] = ("rms", "rms1p", "layer", "layer1p") if option is None else (option,)
    for rule in rules:
        found = _formula(module, rule)
        if found is not None and _confirm_norm(module, found, width):
            said = f"Final norm: {found.kind} from {name} ({type(module).__name__}), eps {found.eps:g}"
            return found, Check("UNE009", "ok", f"{said}; equal on random input.")
    if option is not None:
        message = (
            f"`norm={option}`: {name} is a {type(module).__name__} that computes something else; leave the option out."
        )
        raise InputError(message)
    message = (
        f"{name}, a {type(module).__name__}, is neither an RMS nor a layer norm (compared on random input), so it is "
        "left out; scores from hidden states after the norm are right."
    )
    return None, Check("UNE009", "warning", message)


def _formula(module: nn.Module, rule: families.NormRule) -> FinalNorm | None:
    gain: Any = getattr(module, "weight", None)
    shift: Any = getattr(module, "bias", None)
    # Olmo's layer norm has the number in its code only.
    eps = next((getattr(module, name) for name in _EPS if isinstance(getattr(module, name, None), float)), 1e-5)
    if gain is not None:
        gain = gain.detach().float() + (1.0 if rule.endswith("1p") else 0.0)
    elif rule.endswith("1p"):
        return None
    shift = None if shift is None else shift.detach().float()
    return FinalNorm("layer" if rule.startswith("layer") else "rms", gain, shift, eps)


def _confirm_norm(module: nn.Module, norm: FinalNorm, width: int) -> bool:
    """Whether module and formula agree on rows with a mean, from so small that eps decides to large."""
    weight = norm.weight if norm.weight is not None else torch.zeros(())
    if norm.weight is not None and norm.weight.shape != (width,):
        return False
    like = next(module.parameters(), weight)
    x = torch.randn(8, width, generator=torch.Generator().manual_seed(0), dtype=torch.float32) + 0.5
    x = (x * torch.logspace(-4, 2, 8)[:, None]).to(like.device, like.dtype)
    try:
        given = module(x)
    except Exception:
        return False
    return isinstance(given, Tensor) and given.shape == x.shape and _close(given, norm(x))


def _close(given: Tensor, expected: Tensor) -> bool:
    """Equal to the precision of `given`'s dtype, relative to the largest element of each row."""
    error = (given.float() - expected.float()).abs().amax(-1)
    return bool((error <= 16 * torch.finfo(given.dtype).eps * expected.float().abs().amax(-1) + 1e-30).all())
