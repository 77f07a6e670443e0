"""What policy-gradient and preference training need of each token, without tokens x vocabulary.

Shapes: * tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.ops._linear_nll import chunk_rows, prepared
from unembed.ops._linear_work import LinearOptions
from unembed.ops._rows import Rows, Tensors, evaluate
from unembed.ops._scores import widened
from unembed.ops._token_terms import logsumexp


class TokenStatistics(NamedTuple):
    """Numbers of each token, float32 or wider; all but `argmax` have derivatives.

    Args:
        log_prob: Of the target; 0 where it is ignored.
        entropy: Of the distribution, in nats.
        kl: `KL(p || reference)` in nats; None without a reference.
        argmax: Most probable token, ties to the lowest id.
        lse: Log-sum-exp of the scores.
    """

    log_prob: Tensor
    entropy: Tensor
    kl: Tensor | None
    argmax: Tensor
    lse: Tensor


def token_statistics(
    hidden: Float[Tensor, "*N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "*N"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    reference_hidden: Float[Tensor, "*N E"] | None = None,
    reference_weight: Float[Tensor, "V E"] | None = None,
    reference_bias: Float[Tensor, " V"] | None = None,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> TokenStatistics:
    r"""Log-probability of the target, entropy, KL to a reference head, argmax and log-sum-exp of each token.

    $$H = -\sum_v p_v \log p_v, \qquad \mathrm{KL} = \sum_v p_v (\log p_v - \log q_v)$$

    Args:
        hidden: Hidden states after the final norm.
        weight: The unembedding matrix.
        targets: Tokens that were drawn.
        bias: Added before scale and soft-cap; `-inf` takes a class out.
        softcap: Cap of the scores, of the reference's too; none when None.
        scale: Factor on the scores, on the reference's too.
        reference_hidden: Hidden states of the reference model for the same tokens; no KL when None.
        reference_weight: Its matrix; `weight` when None.
        reference_bias: Its bias; `bias` where `reference_weight` is None.
        ignore_index: Target of tokens that do not count; entropy, KL, argmax and lse are given for them too.
        chunk: Tokens whose scores are alive at once. Chosen from V when None.

    Raises:
        ValueError: If shapes do not fit, or a target is no class.
    """
    common = {"softcap": softcap, "scale": scale, "ignore_index": ignore_index}
    options, hidden, shared = prepared(hidden, weight, targets, bias=bias, **common)
    tokens = [hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).long()]
    reference = None
    if reference_hidden is not None:
        other, other_bias = (weight, bias) if reference_weight is None else (reference_weight, reference_bias)
        reference, reference_hidden, more = prepared(reference_hidden, other, targets, bias=other_bias, **common)
        if len(other) != len(weight):
            raise ValueError(f"The reference has {len(other)} classes, the head {len(weight)}; they must be the same.")
        tokens.append(reference_hidden.reshape(-1, reference_hidden.shape[-1]))
        shared = (*shared, *more)
    elif reference_weight is not None:
        raise ValueError("`reference_weight` needs `reference_hidden`.")
    if reference_bias is not None and reference_weight is None:
        raise ValueError("`reference_bias` needs `reference_weight`.")
    rows = chunk_rows(4 * len(weight), hidden.device, chunk)
    found, _ = evaluate(_Statistics(options, reference, rows), tokens, shared)
    log_prob, entropy, argmax, lse, *kl = (part.reshape(targets.shape) for part in found)
    return TokenStatistics(log_prob, entropy, kl[0] if kl else None, argmax, lse)


class _Statistics(Rows):
    """Tokens `(hidden, targets[, hidden of the reference])`, shared those of the head and of the reference."""

    def __init__(self, options: LinearOptions, reference: LinearOptions | None, chunk: int) -> None:
        super().__init__(chunk, 4 + (reference is not None), 0)
        self._options, self._reference = options, reference

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The definition."""
        hidden, targets, *other = tokens
        own = 1 + self._options.biased
        weight, bias, _ = self._options.shared(shared[:own])
        scores = self._options.scores(hidden, weight, bias)
        reference = None
        if self._reference is not None:
            weight, bias, _ = self._reference.shared(shared[own:])
            reference = self._reference.scores(other[0], weight, bias)
        return statistics_of(scores, targets, reference, ignore_index=self._options.ignore_index), ()


def statistics_of(
    scores: Float[Tensor, "n V"],
    targets: Int[Tensor, " n"],
    reference: Float[Tensor, "n V"] | None,
    *,
    ignore_index: int,
) -> Tensors:
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
    log_other = torch.log_softmax(reference.to(scores.dtype), -1)
    return *found, kl_divergence(log_prob, log_other)


def kl_divergence(log_p: Float[Tensor, "n V"], log_q: Float[Tensor, "n V"]) -> Float[Tensor, " n"]:
    """`sum p (log p - log q)`; a class of probability 0 under p adds nothing, also where q has none."""
    gone = log_p == -torch.inf
    gap = torch.where(gone, 0.0, log_p) - torch.where(gone, 0.0, log_q)
    return (log_p.exp() * gap).sum(-1)
