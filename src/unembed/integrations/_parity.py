"""UNE020: are the scores rebuilt from the weights alone those of the running model?

Shapes: T positions, D hidden size, V rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unembed.integrations._errors import out_of_memory
from unembed.integrations._first_window import first_window
from unembed.integrations._quiet import quiet
from unembed.integrations._run import evaluating, find_head
from unembed.models import Unembedding
from unembed.ops import linear_scores
from unembed.results import Check, InputError
from unembed.text import Document

_FLOAT32 = 1e-4
_HEAD_ROUNDINGS = 5.0
_NORM_ROUNDINGS = 8.0
_MASKED = 1e30
_ROWS = 1 << 14
_CAPS = ("final_logit_softcapping", "logits_soft_cap")


def check_parity(
    model: Any,
    tokenizer: Any,
    unembedding: Unembedding,
    documents: Iterable[Document],
    *,
    length: int = 64,
    seed: int = 0,
) -> Check:
    r"""Compare scores rebuilt from `unembedding`'s own tensors with the model's, on the first window of the text.

    $$\hat z = \mathrm{cap}(s\,(n(x) W^T + b)), \qquad |\hat z - z| \le 10^{-4} \sigma + r, \qquad
      \sigma = \overline{\mathrm{std}_v z}$$
    Twice: from the input of the model's head, which is what the audit measures on, and from the input `x` of its final
    norm, which is found as the module whose output is the input of the head. W and b are first rounded to the dtype
    that the model holds them in.

    `r` is what rounding explains, with `u` the unit roundoff of the model's dtype (2^-24, 2^-11, 2^-8):

    - From the head's input, `5 u (max(|z|, sigma) + |s b|)` for each score: the product, the bias and the three steps
      of a soft-cap round it once each; sums of parts in half precision err by the size of the parts, about `sigma`.
    - From the norm's input, `8 u (|z| + max_v |s| ||h * w_v||)`: the normed state is rounded too, about three times,
      which gives a score a deviation of `u ||h * w_v||`; 8 leaves room for the largest of V values.

    What a model in bfloat16 hides: a change of a score by less than 2 percent of it. A missing soft-cap `c` changes it
    by `(z / c)^2 / 3` of it, so it is seen once some score is above a quarter of the cap (7.7 for 30) and not before;
    in float16 above 0.09 c, in float32 above 0.02 c for scores with a spread of 0.02 c. A change of scale is seen from
    2 percent on. Open the model in float32 to see more.

    Where all scores of a position are equal, there is no spread, and they are compared in nats: sigma is 1.

    Args:
        model: The model, as `open_model` gives it.
        tokenizer: Its tokenizer.
        unembedding: The head, loaded on its own.
        documents: The text.
        length: Most positions compared.
        seed: Of the order of documents.

    Returns:
        A check with status `ok`, `failed`, or `note` where the norm could not be checked.

    Raises:
        InputError: If `documents` can be read only once or holds something else, the text gives no prediction, the
            model gives no scores, or memory runs out.
    """
    seen = _observe(model, first_window(model, tokenizer, documents, length, seed))
    if seen.scores.shape[-1] != unembedding.weight.shape[0]:
        message = (
            f"The model gives {seen.scores.shape[-1]} scores, the head has {unembedding.weight.shape[0]} rows; "
            "they are not of one model."
        )
        return Check("UNE020", "failed", message)
    if not (seen.head_input.isfinite().all() and seen.scores[:, _shown(seen.scores)].isfinite().all()):
        message = (
            f"The model's own scores hold NaN or infinity in {str(seen.dtype).removeprefix('torch.')}; "
            "open it with another `dtype` (float32; float16 overflows above 65504)."
        )
        return Check("UNE020", "failed", message)
    from_head = _compare(seen, unembedding, seen.head_input)
    if not from_head.good:
        return Check("UNE020", "failed", _explain(from_head, seen, unembedding))
    if unembedding.norm is None or seen.norm_input is None:
        why = "the head's norm is not known" if unembedding.norm is None else "the model's norm was not found"
        return Check("UNE020", "note", f"From the head's input on, {from_head}; the norm was not checked: {why}.")
    from_norm = _compare(seen, unembedding, _normed(unembedding, seen.norm_input), normed=True)
    if not from_norm.good:
        message = (
            f"Scores rebuilt from the weights are not the model's: {from_norm}. Likeliest cause: the final norm was "
            "left out or is another one, since from its output on they agree."
        )
        return Check("UNE020", "failed", message)
    return Check("UNE020", "ok", f"Scores rebuilt from the weights are the model's: {from_norm}.")


@dataclass(frozen=True)
class _Seen:
    """What one forward showed, on the CPU (not every device has float64), float32 or wider.

    Args:
        scores: The model's, as it gives them.
        head_input: What entered its head.
        norm_input: What entered the module before that; None if there is none such.
        dtype: That its head's numbers are rounded to.
        unit: Unit roundoff of the model's dtype.
        cap: The soft-cap its configuration names.
    """

    scores: Float[Tensor, "T V"]
    head_input: Float[Tensor, "T D"]
    norm_input: Float[Tensor, "T D"] | None
    dtype: torch.dtype
    unit: float
    cap: float | None


@dataclass(frozen=True)
class _Distance:
    """How far rebuilt scores are from the model's: at the score where that is worst for what is allowed there."""

    error: float
    tolerance: float
    of: str
    kl: float
    same: int
    positions: int

    @property
    def good(self) -> bool:
        return self.error <= self.tolerance

    def __str__(self) -> str:
        return (
            f"largest error {self.error:.2g} {self.of} (tolerance {self.tolerance:.2g}), KL {self.kl:.2g} nats, "
            f"same argmax in {self.same} of {self.positions} positions"
        )


def _observe(model: Any, ids: Tensor) -> _Seen:
    """One whole forward with hooks on every module that gives vectors as wide as the head takes."""
    head = find_head(model)
    width = head.weight.shape[-1]
    passed: list[tuple[Tensor, Tensor]] = []
    entered: list[Tensor] = []

    def keep(_module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if isinstance(output, Tensor) and output.shape[-1] == width and inputs and isinstance(inputs[0], Tensor):
            passed.append((inputs[0], output))

    hooks = [module.register_forward_hook(keep) for module in model.modules() if module is not head]
    hooks.append(head.register_forward_pre_hook(lambda _module, inputs: entered.append(inputs[0])))
    try:
        with evaluating(model), quiet(), out_of_memory("running the model", "use a smaller model"):
            scores = model(input_ids=ids[None].to(model.device), use_cache=False).logits
    finally:
        for hook in hooks:
            hook.remove()
    if not entered:
        raise InputError(f"{type(model).__name__}: its forward never calls its output layer.")
    x = entered[0]
    inputs = [a for a, b in passed if a.shape == b.shape == x.shape and torch.equal(b.to(x.dtype), x)]
    unit = torch.finfo(torch.promote_types(x.dtype, head.weight.dtype)).eps / 2
    caps = (getattr(model.config.get_text_config(), name, None) for name in _CAPS)
    return _Seen(
        scores=_wide(scores[0].cpu()),
        head_input=_wide(x[0].cpu()),
        norm_input=_wide(inputs[0][0].cpu()) if inputs else None,
        dtype=head.weight.dtype,
        unit=unit,
        cap=next((cap for cap in caps if cap), None),
    )


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


def _compare(
    seen: _Seen, head: Unembedding, hidden: Float[Tensor, "T D"], *, shift: int = 0, normed: bool = False
) -> _Distance:
    """Distance of `head`'s scores for `hidden`, its rows moved by `shift`, to the model's scores.

    With `normed`, `hidden` was normed here, and the rounding of the model's norm counts as well.
    """
    rebuilt, bias, deviation = (part.roll(shift, -1) for part in _rebuild(seen, head, hidden))
    shown = _shown(seen.scores)
    scores, rebuilt = seen.scores[:, shown], rebuilt[:, shown]
    spread = scores.std(-1, correction=0).mean().item()
    none = spread <= seen.unit * scores.abs().max().item()  # all scores of a position are equal, up to rounding
    sigma = 1.0 if none else spread
    if normed:
        rounding = _NORM_ROUNDINGS * (scores.abs() + deviation.max())
    else:
        rounding = _HEAD_ROUNDINGS * (scores.abs().clamp(min=spread) + bias[shown])
    error = (scores - rebuilt).abs() / sigma
    allowed = _FLOAT32 + seen.unit * rounding / sigma
    worst = (error / allowed).argmax()  # NaN where there is one
    kl, same = _agreement(scores, rebuilt)
    return _Distance(
        error=error.flatten()[worst].item(),
        tolerance=allowed.flatten()[worst].item(),
        of="nats, no spread to compare with: all scores are equal" if none else "of the spread",
        kl=kl,
        same=same,
        positions=len(scores),
    )


def _agreement(scores: Float[Tensor, "T v"], rebuilt: Float[Tensor, "T v"]) -> tuple[float, int]:
    """Mean KL divergence in nats, and at how many positions the argmax is the same."""
    kl, same = 0.0, 0
    for one, other in zip(scores.split(8), rebuilt.split(8), strict=True):  # float64 of a few positions at a time
        said, ours = one.double().log_softmax(-1), other.double().log_softmax(-1)
        kl += (said.exp() * (said - ours)).sum().item()
        same += int((said.argmax(-1) == ours.argmax(-1)).sum())
    return kl / len(scores), same


def _shown(scores: Float[Tensor, "T V"]) -> Tensor:
    """The columns that the model does not mask at every position (what it masks says nothing); NaN is no mask."""
    shown = ~(scores.abs().amin(0) >= _MASKED)
    return shown if shown.any() else ~shown


def _normed(head: Unembedding, x: Float[Tensor, "T D"]) -> Float[Tensor, "T D"]:
    assert head.norm is not None
    return head.norm(x.to(head.weight.device))


def _rebuild(
    seen: _Seen, head: Unembedding, hidden: Float[Tensor, "T D"]
) -> tuple[Float[Tensor, "T V"], Float[Tensor, " V"], Float[Tensor, " V"]]:
    """On the CPU: the scores over all rows, `|s b|`, and the largest `|s| ||h * w_v||`.

    A chunk of rows is widened at a time.
    """
    hidden = hidden.to(head.weight.device)
    scores, biases, deviations = [], [], []
    for start in range(0, len(head.weight), _ROWS):
        rows = _wide(head.weight[start : start + _ROWS].detach().to(seen.dtype))
        bias = None if head.bias is None else _wide(head.bias[start : start + _ROWS].detach().to(seen.dtype))
        scores.append(linear_scores(hidden, rows, bias=bias, softcap=head.softcap, scale=head.scale).cpu())
        biases.append(torch.zeros(len(rows)) if bias is None else (head.scale * bias).abs().cpu())
        squared = linear_scores(hidden.square(), rows.square()).amax(0)
        deviations.append(abs(head.scale) * squared.clamp(min=0).sqrt().cpu())
    return torch.cat(scores, -1), torch.cat(biases), torch.cat(deviations)


def _explain(found: _Distance, seen: _Seen, head: Unembedding) -> str:
    """One line: by how much, and which change to the head would make it right."""
    causes = [
        name for name, other, shift in _variants(seen, head) if _compare(seen, other, seen.head_input, shift=shift).good
    ]
    cause = (
        f"Likeliest cause: {causes[0]}."
        if causes
        else "No single change to scale, soft-cap, bias or row order mends it."
    )
    return f"Scores rebuilt from the weights are not the model's, though from the same head input: {found}. {cause}"


def _variants(seen: _Seen, head: Unembedding) -> Iterator[tuple[str, Unembedding, int]]:
    """Heads that differ from `head` by one thing, and a shift of the rows."""
    if head.softcap is not None:
        yield f"the soft-cap {head.softcap:g} is applied and the model applies none", replace(head, softcap=None), 0
    if seen.cap is not None and seen.cap != head.softcap:
        yield f"the soft-cap {seen.cap:g} is missing", replace(head, softcap=seen.cap), 0
    scale = _best_scale(seen, head)
    yield f"the scale is {head.scale:.6g} and should be {scale:.6g}", replace(head, scale=scale), 0
    if head.bias is not None:
        yield "a bias is applied and the model applies none", replace(head, bias=None), 0
    for shift in (1, -1):
        yield f"the rows are shifted by {-shift:+d}", head, shift


def _best_scale(seen: _Seen, head: Unembedding) -> float:
    """Least-squares factor between the model's scores, soft-cap undone, and the head's without scale and cap."""
    plain, _, _ = _rebuild(seen, replace(head, softcap=None, scale=1.0), seen.head_input)
    wanted = seen.scores
    if head.softcap is not None:
        wanted = (wanted / head.softcap).clamp(-0.999999, 0.999999).atanh() * head.softcap
    shown = _shown(wanted)
    plain, wanted = plain[:, shown].double(), wanted[:, shown].double()
    return ((plain * wanted).sum() / plain.square().sum()).item()
