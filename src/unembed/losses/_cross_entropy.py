"""Cross-entropy of any head, with the same options for all.

Shapes: * tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import warnings
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.heads import Head
from unembed.losses._targets import aligned


def cross_entropy(
    head: Head,
    hidden: Float[Tensor, "*n D"],
    targets: Int[Tensor, "*n"],
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    class_weight: Float[Tensor, " V"] | None = None,
    token_weight: Float[Tensor, "*n"] | None = None,
    shift: int = 0,
    document_ids: Int[Tensor, "*n"] | None = None,
    when_empty: Literal["zero", "nan"] = "zero",
    chunk: int | None = None,
) -> Tensor:
    r"""Cross-entropy in nats, never tokens x vocabulary in memory.

    $$\ell_n = (1 - \varepsilon)\, w_{y_n} \mathrm{nll}_n
      + \frac{\varepsilon}{V} \sum_v w_v (\mathrm{lse}_n - z_{nv}) + \zeta\, \mathrm{lse}_n^2$$

    with class weights w and smoothing over the real classes: those whose score is not `-inf`. `mean` divides the first
    two by the sum of token weight times $w_{y_n}$ over tokens that count, the last by the sum of token weights.

    Args:
        head: Any head.
        hidden: Hidden states, as the head takes them.
        targets: Next tokens; with `shift`, the tokens themselves.
        reduction: `mean`, `sum`, or `none` for one loss a token (with `shift`, for each token but the first ones).
        ignore_index: Target of tokens that do not count.
        label_smoothing: $\varepsilon$ in [0, 1].
        z_loss: $\zeta$; heads normalised by construction have `lse` 0, so nothing to pull on.
        class_weight: w; ones when None.
        token_weight: A factor on each token's loss; ones when None.
        shift: Position t predicts the target at t + `shift`, along the last dimension of `targets`.
        document_ids: With `shift`, no prediction across a change of document.
        when_empty: What `mean` is when no token counts.
        chunk: Tokens whose scores are alive at once; chosen from V when None.

    Raises:
        ValueError: If an option is out of range, shapes do not fit, or a target is no class.
    """
    _check(reduction, label_smoothing, z_loss, when_empty)
    hidden, targets, token_weight = aligned(
        head, hidden, targets, token_weight, shift=shift, document_ids=document_ids, ignore_index=ignore_index
    )
    flat, flat_targets, shape = head.flattened(hidden, targets)
    if class_weight is not None and tuple(class_weight.shape) != (head.out_features,):
        raise ValueError(f"Expected `class_weight` ({head.out_features},), got {tuple(class_weight.shape)}.")
    if z_loss and head.normalised:
        warnings.warn(f"{type(head).__name__} is normalised by construction: z_loss is zero for it.", stacklevel=2)
        z_loss = 0.0
    wide = torch.promote_types(hidden.dtype, torch.float32)
    counts = flat_targets != ignore_index
    weights = counts.to(wide)
    if token_weight is not None:
        weights = weights * torch.where(counts, token_weight.reshape(-1).to(wide), 0.0)
    of_class = weights
    if class_weight is not None:
        of_class = weights * class_weight.to(wide)[torch.where(counts, flat_targets, 0)]
    spread = _spread(head, class_weight, wide) if label_smoothing else None
    whole = None if spread is None else spread.sum()
    columns = [of_class * (1 - label_smoothing)]
    columns.append(torch.zeros_like(weights) if whole is None else label_smoothing * whole * weights)
    columns += [torch.zeros_like(weights), -label_smoothing * weights]
    pulled = z_loss * weights
    if reduction == "none":
        terms = head.terms(flat, flat_targets, ignore_index=ignore_index, spread=spread, chunk=chunk)
        return _per_token(terms, columns, pulled).reshape(shape)
    total, total_pulled = of_class.sum(), weights.sum()
    if reduction == "mean":
        safe = [torch.where(one == 0, torch.ones_like(one), one) for one in (total, total_pulled)]
        columns = [column / safe[0] for column in columns]
        pulled = pulled / safe[1]
    columns[2] = pulled
    coefficients = torch.stack(columns, dim=1)
    loss = head.loss(flat, flat_targets, coefficients, ignore_index=ignore_index, spread=spread, chunk=chunk)
    if reduction == "mean" and when_empty == "nan":
        return torch.where(total == 0, torch.nan, loss)
    return loss


def _check(reduction: str, label_smoothing: float, z_loss: float, when_empty: str) -> None:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"`reduction` must be mean, sum or none, got {reduction!r}.")
    if not 0 <= label_smoothing <= 1:
        raise ValueError(f"`label_smoothing` must lie in [0, 1], got {label_smoothing}.")
    if not z_loss >= 0:
        raise ValueError(f"`z_loss` must be at least 0, got {z_loss}.")
    if when_empty not in ("zero", "nan"):
        raise ValueError(f"`when_empty` must be zero or nan, got {when_empty!r}.")


def _spread(head: Head, class_weight: Tensor | None, dtype: torch.dtype) -> Tensor:
    """Class weights over the number of real classes, 0 for the others."""
    real = head.real_classes()
    if real is None:
        device = next(head.parameters()).device
        real = torch.ones(head.out_features, dtype=torch.bool, device=device)
    weights = real.to(dtype) if class_weight is None else torch.where(real, class_weight.to(dtype), 0.0)
    return weights / real.sum()


def _per_token(terms: tuple[Tensor, ...], columns: list[Tensor], pulled: Tensor) -> Tensor:
    nll, lse, *spread = terms
    loss = torch.where(columns[0] == 0, 0.0, columns[0] * nll)
    if spread:
        loss = loss + torch.where(columns[1] == 0, 0.0, columns[1] * lse + columns[3] * spread[0])
    return loss + torch.where(pulled == 0, 0.0, pulled * lse.square())
