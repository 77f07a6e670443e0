"""What policy-gradient and preference training need of each token, without tokens x vocabulary.

Shapes: * tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.ops._linear_nll import chunk_rows, prepared
from unembed.ops._rows import evaluate
from unembed.ops._statistics import Statistics


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
    rows = chunk_rows((1 + (reference is not None)) * len(weight), hidden.device, chunk)
    found, _ = evaluate(Statistics(options, reference, rows), tokens, shared)
    log_prob, entropy, argmax, lse, *kl = (part.reshape(targets.shape) for part in found)
    return TokenStatistics(log_prob, entropy, kl[0] if kl else None, argmax, lse)


def linear_kl(
    hidden: Float[Tensor, "*N D"],
    weight: Float[Tensor, "V D"],
    other_hidden: Float[Tensor, "*N E"],
    other_weight: Float[Tensor, "V E"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    other_bias: Float[Tensor, " V"] | None = None,
    other_softcap: float | None = None,
    other_scale: float = 1.0,
    chunk: int | None = None,
) -> Float[Tensor, "*N"]:
    r"""$\mathrm{KL}(p \,\|\, q)$ of two linear heads for each token, in nats, q being the other.

    Args:
        hidden: Hidden states of p.
        weight: Matrix of p.
        other_hidden: Hidden states of q for the same tokens.
        other_weight: Matrix of q.
        bias: Added before scale and soft-cap; `-inf` takes a class out.
        softcap: Cap of the scores of p.
        scale: Factor on them.
        other_bias: As `bias`, of q. A class that q alone takes out makes the divergence infinite, without a gradient.
        other_softcap: As `softcap`, of q.
        other_scale: As `scale`, of q.
        chunk: Tokens whose scores are alive at once. Chosen from V when None.

    Raises:
        ValueError: If shapes do not fit.
    """
    none = torch.zeros(hidden.shape[:-1], dtype=torch.int64, device=hidden.device)
    options, hidden, shared = prepared(hidden, weight, none, bias=bias, softcap=softcap, scale=scale)
    other, other_hidden, more = prepared(
        other_hidden, other_weight, none, bias=other_bias, softcap=other_softcap, scale=other_scale
    )
    tokens = (hidden.flatten(0, -2), none.flatten(), other_hidden.flatten(0, -2))
    rows = chunk_rows(2 * len(weight), hidden.device, chunk)
    found, _ = evaluate(Statistics(options, other, rows), tokens, (*shared, *more))
    return found[4].reshape(none.shape)
