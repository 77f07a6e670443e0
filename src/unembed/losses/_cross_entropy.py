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
from unembed.losses._targets import Alignment, check_is_head


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
    check_is_head(head)
    if label_smoothing and head.sparse:
        raise ValueError(
            f"`label_smoothing` goes to classes that can have a probability, and those of {type(head).__name__} change "
            "from token to token; leave it at 0, or see losses.fenchel_young."
        )
    _check(reduction, label_smoothing, z_loss, when_empty)
    aligned = Alignment(head.tokens_shape(hidden), shift, document_ids)
    aligned.check(targets=targets, token_weight=token_weight)
    flat, flat_targets, shape = head.flattened(
        aligned.origin(hidden), aligned.targets(targets, ignore_index), document_ids=aligned.documents
    )
    token_weight = None if token_weight is None else aligned.ahead(token_weight)
    if class_weight is not None and tuple(class_weight.shape) != (head.out_features,):
        raise ValueError(f"Expected `class_weight` ({head.out_features},), got {tuple(class_weight.shape)}.")
    if z_loss and head.normalised:
        warnings.warn(f"{type(head).__name__} is normalised by construction: z_loss is zero for it.", stacklevel=2)
        z_loss = 0.0
    wide = torch.promote_types(hidden.dtype, torch.float32)
    weights, of_class = _weights(flat_targets, token_weight, class_weight, ignore_index, wide)
    spread = _spread(head, class_weight, wide) if label_smoothing else None
    total, total_pulled = (of_class.sum(), weights.sum()) if reduction == "mean" else (None, None)
    on_lse = torch.zeros_like(weights) if spread is None else label_smoothing * spread.sum() * weights
    # Of nll, lse, lse^2 and the sum of the scores that `spread` weighs.
    columns = [
        _over(of_class * (1 - label_smoothing), total),
        _over(on_lse, total),
        _over(z_loss * weights, total_pulled),
        _over(-label_smoothing * weights, total),
    ]
    options = {"ignore_index": ignore_index, "spread": spread, "chunk": chunk}
    if reduction == "none":
        return _per_token(head.terms(flat, flat_targets, **options), columns).reshape(shape)
    loss = head.loss(flat, flat_targets, torch.stack(columns, dim=1), **options)
    return torch.where(total == 0, torch.nan, loss) if when_empty == "nan" and total is not None else loss


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


def _weights(
    targets: Tensor,
    token_weight: Tensor | None,
    class_weight: Tensor | None,
    ignore_index: int,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The weight of each token, 0 where ignored, and that times the weight of its class."""
    counts = targets != ignore_index
    weights = counts.to(dtype)
    if token_weight is not None:
        weights = weights * torch.where(counts, token_weight.reshape(-1).to(dtype), 0.0)
    if class_weight is None:
        return weights, weights
    return weights, weights * class_weight.to(dtype)[torch.where(counts, targets, 0)]


def _over(column: Tensor, total: Tensor | None) -> Tensor:
    """A column over a total, of which 0 counts as 1."""
    return column if total is None else column / torch.where(total == 0, torch.ones_like(total), total)


def _per_token(terms: tuple[Tensor, ...], columns: list[Tensor]) -> Tensor:
    nll, lse, *spread = terms
    parts = zip((nll, lse, lse.square(), *spread), columns, strict=False)
    return torch.stack([torch.where(column == 0, 0.0, column * term) for term, column in parts]).sum(0)
