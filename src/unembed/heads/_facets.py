"""Facets of a block of hidden states: the recent positions and layers that a token may read, and a split vocabulary.

Shapes: T positions, L layers, D hidden size, V vocabulary, J partitions.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unembed import ops
from unembed.heads._product import product


def block_input(
    hidden: Float[Tensor, "*B T L D"],
    block: Float[Tensor, "D W L D"],
    bias: Float[Tensor, " D"],
    *,
    document_ids: Int[Tensor, "*B T"] | None = None,
) -> Float[Tensor, "*B T 2*D"]:
    r"""$q_t = [h_t^L;\ \mathrm{gelu}(\sum_{w<W} \sum_l B_{wl} h_{t-w}^l + b)]$; before the start there are zeros.

    A position is projected first and shifted after, so the W times larger block of states is never held. With
    `document_ids` there are zeros in the place of another document's states too.
    """
    flat = hidden.flatten(-2)
    total = product(flat, block[:, 0].flatten(1), bias)
    for back in range(1, min(block.shape[1], hidden.shape[-3])):
        earlier = product(flat[..., :-back, :], block[:, back].flatten(1))
        if document_ids is not None:  # 1 where the token `back` ahead lies in the same document
            ones = torch.ones_like(document_ids)
            same = ops.tokens_ahead(ones, back, document_ids=document_ids, ignore_index=0) == 1
            earlier = torch.where(same[..., None], earlier, 0.0)
        total = total + nn.functional.pad(earlier, (0, 0, back, 0))
    return torch.cat([hidden[..., -1, :].to(total.dtype), nn.functional.gelu(total)], dim=-1)


def split_scores(
    facets: Float[Tensor, "*n J D"], weight: Float[Tensor, "V D"], bias: Float[Tensor, " V"] | None
) -> Float[Tensor, "*n V"]:
    """Scores of all tokens, token v by facet `v mod J`."""
    count = facets.shape[-2]
    parts = []
    for part in range(count):
        own = None if bias is None else bias[part::count]
        scores = product(facets[..., part, :], weight[part::count], own)
        parts.append(nn.functional.pad(scores, (0, -(-len(weight) // count) - scores.shape[-1])))
    return torch.stack(parts, dim=-1).flatten(-2)[..., : len(weight)]


def split_nll(
    facets: Float[Tensor, "n J D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " n"],
    *,
    bias: Float[Tensor, " V"] | None,
    ignore_index: int,
    chunk: int | None,
) -> Float[Tensor, " n"]:
    r"""Negative log-likelihood under the softmax of `split_scores`, a chunk of one partition's scores alive.

    $$\mathrm{nll} = \mathrm{nll}_j + \log\sum_i e^{\mathrm{lse}_i - \mathrm{lse}_j}, \qquad j = t \bmod J$$

    from the loss of the target within its partition and the normaliser of each.
    """
    count = facets.shape[-2]
    counts = targets != ignore_index
    classes = torch.where(counts, targets, 0)
    within, own = classes // count, classes % count
    total: Tensor | None = None
    normalisers = []
    for part in range(count):
        nll, lse = ops.linear_terms(
            facets[:, part],
            weight[part::count],
            torch.where(counts & (own == part), within, -1),
            bias=None if bias is None else bias[part::count],
            ignore_index=-1,
            chunk=chunk,
        )
        total = nll if total is None else total + nll
        normalisers.append(lse)
    assert total is not None
    lse = torch.stack(normalisers, dim=1)
    base = lse.gather(1, own[:, None])
    dead = base.squeeze(1) == -torch.inf  # no class of the partition has a probability: its loss is infinite already
    gap = lse - torch.where(base == -torch.inf, 0.0, base)
    rest = ops.logsumexp(torch.where(dead[:, None], 0.0, gap), dim=1)
    return torch.where(counts, total + rest, 0.0)
