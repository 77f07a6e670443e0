"""The loss of heads that give exact zeros, never tokens x vocabulary.

Shapes: * tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed import ops
from unembed.heads import Entmax, Head, Linear
from unembed.losses._head_rows import of_scores, reduced
from unembed.losses._targets import Alignment, check_is_head


def fenchel_young(
    head: Head,
    hidden: Float[Tensor, "*n D"],
    targets: Int[Tensor, "*n"],
    *,
    alpha: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    ignore_index: int = -100,
    class_weight: Float[Tensor, " V"] | None = None,
    token_weight: Float[Tensor, "*n"] | None = None,
    shift: int = 0,
    document_ids: Int[Tensor, "*n"] | None = None,
    when_empty: Literal["zero", "nan"] = "zero",
    chunk: int | None = None,
) -> Tensor:
    r"""The loss that alpha-entmax minimises (Blondel et al., 2020, arXiv:1901.02324); cross-entropy for alpha = 1.

    $$\ell_n = w_{y_n} \left( \langle p_n - e_{y_n}, z_n \rangle + H_\alpha(p_n) \right), \qquad
      p_n = \mathrm{entmax}_\alpha(z_n)$$

    Finite wherever the target's score is, never negative, 0 once it leads all others by $1 / (\alpha - 1)$. Its slope
    with respect to the scores is $p - e_y$. `mean` divides by the sum of token weight times $w_{y_n}$.

    Args:
        head: An `Entmax` head, or any head whose scores are not log-probabilities.
        hidden: Hidden states, as the head takes them.
        targets: Next tokens; with `shift`, the tokens themselves.
        alpha: From 1 to 2.5, for a head without one of its own. That of an Entmax head is set on the head.
        reduction: `mean`, `sum`, or `none` for one loss a token (with `shift`, for each token but the first ones).
        ignore_index: Target of tokens that do not count.
        class_weight: w; ones when None.
        token_weight: A factor on each token's loss; ones when None.
        shift: Position t predicts the target at t + `shift`, along the last dimension of `targets`.
        document_ids: With `shift`, no prediction across a change of document.
        when_empty: What `mean` is when no token counts.
        chunk: Tokens whose scores are alive at once; chosen from V when None.

    Raises:
        ValueError: If an option is out of range, shapes do not fit, a target is no class, or the head has no scores.
    """
    check_is_head(head)
    alpha = _alpha_of(head, alpha)
    aligned = Alignment(head.tokens_shape(hidden), shift, document_ids)
    aligned.check(targets=targets, token_weight=token_weight)
    if class_weight is not None and tuple(class_weight.shape) != (head.out_features,):
        raise ValueError(f"Expected `class_weight` ({head.out_features},), got {tuple(class_weight.shape)}.")
    predicted = aligned.targets(targets, ignore_index)
    flat, flat_targets, _ = head.flattened(aligned.origin(hidden), predicted, document_ids=aligned.documents)
    ops.check_targets(flat_targets, head.out_features, ignore_index)
    counts = flat_targets != ignore_index
    weights = counts.to(ops.widened(hidden.dtype))
    if token_weight is not None:
        weights = torch.where(counts, aligned.ahead(token_weight).reshape(-1).to(weights.dtype), 0.0)
    if class_weight is not None:
        weights = weights * class_weight.to(weights.dtype)[torch.where(counts, flat_targets, 0)]
    linear = _linear(head)
    if reduction in ("mean", "sum") and when_empty in ("zero", "nan") and linear is not None:
        total = weights.sum()
        scaled = weights / torch.where(total == 0, 1.0, total) if reduction == "mean" else weights
        options = _options(linear, alpha, ignore_index, chunk)
        loss = ops.linear_fenchel_young_loss(flat, linear.weight, flat_targets, scaled, **options)
        return torch.where(total == 0, torch.nan, loss) if reduction == "mean" and when_empty == "nan" else loss
    loss = _per_token(head, flat, flat_targets, alpha=alpha, ignore_index=ignore_index, chunk=chunk)
    return reduced(loss, weights.reshape(aligned.predictions), aligned.predictions, reduction, when_empty)


def _alpha_of(head: Head, alpha: float | None) -> float:
    own = getattr(head, "alpha", None)
    if isinstance(head, Entmax):
        if alpha is not None and alpha != own:
            raise ValueError(f"`alpha` is {own} for this Entmax head, got {alpha}; leave it out.")
        return head.alpha
    if head.normalised:
        raise ValueError(f"{type(head).__name__} gives log-probabilities, no scores to take entmax of.")
    if alpha is None:
        raise ValueError(f"{type(head).__name__} has no `alpha` of its own: say which.")
    ops.check_alpha(alpha)
    return float(alpha)


def _linear(head: Head) -> Linear | Entmax | None:
    """The head, if its scores are those of a matrix; a subclass may have others."""
    return head if isinstance(head, Linear | Entmax) and type(head) in (Linear, Entmax) else None


def _options(head: Linear | Entmax, alpha: float, ignore_index: int, chunk: int | None) -> dict[str, Any]:
    return {**head.score_options(), "alpha": alpha, "ignore_index": ignore_index, "chunk": chunk}


def _per_token(
    head: Head, hidden: Tensor, targets: Tensor, *, alpha: float, ignore_index: int, chunk: int | None
) -> Tensor:
    linear = _linear(head)
    if linear is not None:
        options = _options(linear, alpha, ignore_index, chunk)
        return ops.linear_fenchel_young(hidden, linear.weight, targets, **options)

    def loss_of(scores: Sequence[Tensor], more: Sequence[Tensor]) -> Tensor:
        return ops.loss_rows(scores[0], more[0], alpha, ignore_index)

    return of_scores([head], [hidden], [targets], loss_of, chunk=chunk)
