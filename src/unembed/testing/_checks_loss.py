"""Checks of `unembed.losses.cross_entropy` of a head against `torch.nn.functional.cross_entropy` of its log_prob."""

from __future__ import annotations

import itertools
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from unembed import losses
from unembed.testing._case import Case, NotApplicableError, close, close_gradients, expect, gradients, log_prob
from unembed.testing._checks_scores import needs_bias, without
from unembed.testing._registry import check

AFTER = ("law", "nll", "gradients", "ignore_index")
_NEEDED = ("nll", "terms", "loss", "flattened", "tokens_shape", "normalised", "real_classes")


def takes_cross_entropy(case: Case) -> None:
    if any(not hasattr(case.given, name) for name in _NEEDED):
        raise NotApplicableError("`losses.cross_entropy` takes an `unembed.heads.Head`")
    case.plain()


def _expected(head: Any, hidden: Tensor, targets: Tensor, options: dict[str, Any]) -> Tensor:
    """The same loss, all scores at once; classes of probability 0 leave before they are smoothed over."""
    weight, factor = options.get("class_weight"), options.get("token_weight")
    zeta, smoothing = options.get("z_loss", 0.0), options.get("label_smoothing", 0.0)
    found = log_prob(head, hidden).flatten(0, -2)
    flat, counts = targets.flatten(), targets.flatten() != -100
    real = found.detach().isfinite().all(0) if smoothing else torch.ones_like(found[0], dtype=torch.bool)
    place = real.cumsum(0) - 1
    inside = torch.where(counts, place[torch.where(counts, flat, 0)], -100)
    kept = None if weight is None else weight[real]
    each = F.cross_entropy(found[:, real], inside, weight=kept, label_smoothing=smoothing, reduction="none")
    factor = counts.double() if factor is None else factor.flatten() * counts
    each, pulled = each * factor, torch.zeros_like(each)
    if zeta and not head.normalised:
        pulled = zeta * head(hidden).flatten(0, -2).logsumexp(-1).square() * factor
    if options["reduction"] == "none":
        return (each + pulled).reshape(targets.shape)
    if options["reduction"] == "sum":
        return (each + pulled).sum()
    share = factor if weight is None else factor * weight[torch.where(counts, flat, 0)]
    return each.sum() / share.sum() + pulled.sum() / factor.sum()


def _compare(head: Any, hidden: Tensor, targets: Tensor, options: dict[str, Any]) -> None:
    said = ", ".join(f"{name}={'...' if isinstance(one, Tensor) else one}" for name, one in options.items())
    got, found = gradients(head, hidden, targets, partial(losses.cross_entropy, **options))
    want, slopes = gradients(head, hidden, targets, partial(_expected, options=options))
    close(got, want, 1e-10, f"cross_entropy({said})")
    close_gradients(found, slopes, 1e-10, f" of cross_entropy({said})")


@check("cross_entropy", after=AFTER)
def cross_entropy(case: Case) -> None:
    """Every option of `losses.cross_entropy` is what `torch.nn.functional.cross_entropy` makes of `log_prob`."""
    takes_cross_entropy(case)
    head, hidden, targets = case.pair(dtype=torch.float64)
    targets.view(-1)[1] = -100
    like = {"dtype": torch.float64, "device": case.device}
    class_weight = torch.rand(case.classes, **like) + 0.5
    token_weight = torch.rand(targets.shape, **like) + 0.5
    zeta = 0.0 if head.normalised else 0.01
    smoothings = (0.0,) if getattr(head, "sparse", False) else (0.0, 0.1)
    switches = itertools.product(smoothings, (None, class_weight), (None, token_weight), {0.0, zeta})
    for place, (smoothing, weight, factor, pull) in enumerate(switches):
        # Each combination with one reduction in turn, the richest with all.
        everything = smoothing == smoothings[-1] and weight is not None and factor is not None and pull == zeta
        for reduction in ("mean", "sum", "none") if everything else (("mean", "sum", "none")[place % 3],):
            options: dict[str, Any] = {"reduction": reduction, "label_smoothing": smoothing, "z_loss": pull}
            options |= {"class_weight": weight, "token_weight": factor}
            _compare(head, hidden, targets, options)


@check("smoothing_real", after=(*AFTER, "impossible_class", "cross_entropy"))
def smoothing_real(case: Case) -> None:
    """Label smoothing is spread over the classes that can have a probability."""
    takes_cross_entropy(case)
    if getattr(case.given, "sparse", False):
        raise NotApplicableError("which classes can have a probability changes from token to token (`sparse`)")
    needs_bias(case)
    head, hidden = without(case, torch.float64, (0, case.classes - 1)), case.hidden(dtype=torch.float64)
    targets = torch.ones_like(case.targets(head, hidden))
    for reduction in ("mean", "none"):
        options: dict[str, Any] = {"reduction": reduction, "label_smoothing": 0.1}
        got, found = gradients(head, hidden, targets, partial(losses.cross_entropy, **options))
        close(got, _expected(head, hidden, targets, options), 1e-10, f"smoothed loss with padding, {reduction}")
        for name, gradient in found.items():
            expect(bool(gradient.isfinite().all()), f"gradient of `{name}` of the smoothed loss is not finite")


@check("empty_batch", after=AFTER)
def empty_batch(case: Case) -> None:
    """With every target ignored, or no token at all, `mean` is 0 with gradients 0, or NaN when asked; `sum` is 0."""
    takes_cross_entropy(case)
    head, hidden, targets = case.pair()
    pairs = [(hidden, torch.full_like(targets, -100))]
    nothing = hidden[:0]
    if case.tokens(head, nothing) == (0, *targets.shape[1:]):
        pairs.append((nothing, targets[:0]))
    for some, ignored in pairs:
        choices: list[dict[str, Any]] = [{"reduction": "mean"}, {"reduction": "sum"}]
        choices += [] if getattr(head, "sparse", False) else [{"label_smoothing": 0.1}]
        for options in choices:
            got, found = gradients(head, some, ignored, partial(losses.cross_entropy, **options))
            close(got, torch.zeros_like(got), 0.0, f"loss of {ignored.numel()} ignored tokens, {options}")
            zero = {name: torch.zeros_like(one) for name, one in found.items()}
            close_gradients(found, zero, 0.0, f" of {ignored.numel()} ignored tokens, {options}")
        loss = losses.cross_entropy(head, some, ignored, when_empty="nan")
        expect(bool(loss.isnan()), f"when_empty='nan': expected NaN, got {float(loss.detach()):.4g}")
