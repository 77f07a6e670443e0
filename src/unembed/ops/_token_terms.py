"""Per-token numbers of a row of scores: losses, log-sum-exp, sums of scores, entropy and divergence.

Shapes: n tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.ops._scores import widened


def logsumexp(scores: Tensor, dim: int) -> Tensor:
    """`log sum exp` along a dimension; where all are `-inf` it is `-inf` with zero gradients, not NaN."""
    peak = scores.detach().amax(dim, keepdim=True)
    peak = torch.where(peak == -torch.inf, torch.zeros_like(peak), peak)
    total = (scores - peak).exp().sum(dim)
    empty = total == 0
    found = torch.where(empty, torch.ones_like(total), total).log() + peak.squeeze(dim)
    return torch.where(empty, -torch.inf, found)


def weighted(terms: Sequence[Float[Tensor, " n"]], coefficients: Float[Tensor, "n c"]) -> Float[Tensor, ""]:
    """The sum of all terms, each times its column; a term with coefficient 0 counts as 0, infinite or not."""
    total = terms[0].new_zeros(())
    for term, column in zip(terms, coefficients.to(terms[0].dtype).unbind(1), strict=False):
        blank = (column == 0) & ~torch.isfinite(term)
        total = total + (torch.where(blank, 0.0, term) * column).sum()
    return total


def token_terms(
    scores: Float[Tensor, "n V"],
    targets: Int[Tensor, " n"],
    *,
    ignore_index: int = -100,
    spread: Float[Tensor, " V"] | None = None,
) -> tuple[Tensor, ...]:
    r"""`(nll, lse)` of each row, and $\sum_v s_v z_v$ where `spread` gives s; float32 or wider.

    $$\mathrm{nll} = \log\sum_v e^{z_v - m} - (z_y - m), \qquad m = \max_v z_v$$

    so a constant on all scores changes nothing. A score of `-inf` is probability 0: no value and no gradient but the
    loss of that very target turns infinite. A row of only `-inf` has `lse = -inf`, loss `+inf` and no gradient.

    Args:
        scores: Any float dtype.
        targets: Class of each row; `ignore_index` gives 0.
        ignore_index: Target of rows that do not count.
        spread: Weights of the third number; zero where scores may be `-inf`.
    """
    scores = scores.to(widened(scores.dtype))
    counts = targets != ignore_index
    peak = scores.detach().amax(-1)
    peak = torch.where(peak == -torch.inf, torch.zeros_like(peak), peak)
    shifted = scores - peak[:, None]
    total = shifted.exp().sum(-1)
    empty = total == 0
    log_total = torch.where(empty, torch.ones_like(total), total).log()
    own = shifted.gather(1, torch.where(counts, targets, 0)[:, None]).squeeze(1)
    nll = torch.where(counts & ~empty, log_total - own, torch.where(counts, torch.inf, 0.0).to(total))
    lse = torch.where(empty, -torch.inf, log_total + peak)
    if spread is None:
        return nll, lse
    finite = torch.where(scores == -torch.inf, 0.0, scores)
    return nll, lse, finite @ spread.to(finite.dtype)


def statistics_of(
    scores: Float[Tensor, "n V"],
    targets: Int[Tensor, " n"],
    reference: Float[Tensor, "n V"] | None,
    *,
    ignore_index: int,
) -> tuple[Tensor, ...]:
    """`log_prob, entropy, argmax, lse[, kl]` of rows of scores; a score of `-inf` is probability 0 and adds nothing."""
    scores = scores.to(widened(scores.dtype))
    lse = logsumexp(scores, -1)
    log_prob = scores - torch.where(lse == -torch.inf, 0.0, lse)[:, None]
    gone = scores == -torch.inf
    probability, finite = log_prob.exp(), torch.where(gone, 0.0, log_prob)
    counts = targets != ignore_index
    own = log_prob.gather(1, torch.where(counts, targets, 0)[:, None]).squeeze(1)
    found = (
        torch.where(counts, own, 0.0),
        -(probability * finite).sum(-1),
        scores.detach().argmax(-1),
        lse,
    )
    if reference is None:
        return found
    reference = reference.to(scores.dtype)
    other = logsumexp(reference, -1)
    log_other = reference - torch.where(other == -torch.inf, 0.0, other)[:, None]
    return *found, kl_divergence(log_prob, log_other)


def kl_divergence(log_p: Float[Tensor, "n V"], log_q: Float[Tensor, "n V"]) -> Float[Tensor, " n"]:
    """`sum p (log p - log q)`; a class of probability 0 under p adds nothing, also where q has none.

    Where q alone has none, it is infinite, without a gradient.
    """
    gone = log_p == -torch.inf
    lost = (log_q == -torch.inf) & (log_p.exp() > 0)
    gap = torch.where(gone | lost, 0.0, log_p) - torch.where(gone | lost, 0.0, log_q)
    gap = torch.where(gap == torch.inf, 0.0, gap)  # p is 0 in its dtype, q in truth
    return torch.where(lost.any(-1), torch.inf, (log_p.exp() * gap).sum(-1))
