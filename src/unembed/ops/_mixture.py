"""Negative log-likelihood of a mixture of softmaxes over one matrix, never tokens x components x vocabulary.

The loss of a token needs of each component its own loss only: `nll = -logsumexp_k (log pi_k - nll_k)`. So a mixture is
K linear losses a token, and everything that holds for those holds for it.

Shapes: N tokens, K components, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.ops._linear_nll import chunk_rows, prepared, requiring
from unembed.ops._linear_terms import LinearTerms
from unembed.ops._linear_work import Exponentials, LinearOptions, Sums, Work, terms_of
from unembed.ops._mixture_spread import MixtureSpread
from unembed.ops._rows import Tensors, Wanted, evaluate
from unembed.ops._summed import Summed
from unembed.ops._token_terms import logsumexp, token_terms, weighted


def mixture_nll(
    hidden: Float[Tensor, "*N K D"],
    log_prior: Float[Tensor, "*N K"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "*N"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    sigsoftmax: bool = False,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Float[Tensor, "*N"]:
    r"""$-\log \sum_k \pi_k\, \mathrm{softmax}(W h_k + b)_t$ of each token, in nats, float32 or wider.

    Args:
        hidden: Hidden state of each component.
        log_prior: Log of the component weights.
        weight: The matrix of all components.
        targets: Next tokens.
        bias: Added to the scores of each component.
        sigsoftmax: Components are `softmax(u + log sigmoid(u))` of their scores u.
        ignore_index: Target of tokens that do not count: their loss is 0.
        chunk: Tokens whose scores are alive at once. Chosen from V and K when None.
    """
    components = hidden.shape[-2]
    targets_of_all = targets[..., None].expand(hidden.shape[:-1])
    options, hidden, shared = prepared(
        hidden, weight, targets_of_all, bias=bias, sigsoftmax=sigsoftmax, ignore_index=ignore_index
    )
    rows = chunk_rows(components * len(weight), hidden.device, chunk) * components
    flat, each = targets.reshape(-1).long(), targets_of_all.reshape(-1).long()
    (nll, _), _ = evaluate(LinearTerms(options, rows), (hidden.reshape(-1, hidden.shape[-1]), each), shared)
    total = combined(log_prior.reshape(-1, components), nll.reshape(-1, components), flat != ignore_index)
    return total.reshape(targets.shape)


def mixture_loss(
    hidden: Float[Tensor, "N K D"],
    log_prior: Float[Tensor, "N K"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " N"],
    coefficients: Float[Tensor, "N 2"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    sigsoftmax: bool = False,
    ignore_index: int = -100,
    spread: Float[Tensor, " V"] | None = None,
    chunk: int | None = None,
) -> Float[Tensor, ""]:
    r"""$\sum_n a_n \mathrm{nll}_n + d_n \sum_v s_v \log p_{nv}$.

    Where gradients will be asked for, they are made in the forward pass.

    Args:
        hidden: Hidden state of each component.
        log_prior: Log of the component weights.
        weight: The matrix of all components.
        targets: Next tokens.
        coefficients: a and d of each token.
        bias: Added to the scores of each component.
        sigsoftmax: Components are `softmax(u + log sigmoid(u))` of their scores u.
        ignore_index: Target of tokens that do not count; their a is taken for 0.
        spread: s, 0 where a score may be `-inf`; no second term when None.
        chunk: Tokens whose scores are alive at once. Chosen from V and K when None.
    """
    targets_of_all = targets[..., None].expand(hidden.shape[:-1])
    options, hidden, shared = prepared(
        hidden, weight, targets_of_all, bias=bias, sigsoftmax=sigsoftmax, ignore_index=ignore_index, spread=spread
    )
    rows = chunk_rows(hidden.shape[1] * len(weight), hidden.device, chunk)
    if spread is None:
        tokens = (hidden, log_prior, targets.long(), coefficients[:, 0])
        function: Summed = _MixtureLoss(options, rows, (requiring(tokens), requiring(shared)))
    else:
        tokens = (hidden, log_prior, targets.long(), coefficients)
        asked = (requiring(tokens), (*requiring(shared[:-1]), False))
        function = MixtureSpread(options, rows, asked)
    _, (total,) = evaluate(function, tokens, shared)
    return total


def combined(log_prior: Float[Tensor, "N K"], nll: Float[Tensor, "N K"], counts: Tensor) -> Float[Tensor, " N"]:
    """`-logsumexp_k (log pi_k - nll_k)` of the tokens that count, 0 of the others."""
    joint = torch.where(counts[:, None], log_prior.to(nll.dtype) - nll, 0.0)
    total = -logsumexp(joint, 1)
    return torch.where(counts, total, 0.0)


class _MixtureLoss(Summed):
    """Tokens `(hidden, log_prior, targets, coefficients)`, shared `(weight[, bias])`; one sum."""

    def __init__(self, options: LinearOptions, chunk: int, asked: Wanted) -> None:
        super().__init__(chunk, asked)
        self.options = options

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The definition."""
        hidden, log_prior, targets, coefficients = tokens
        weight, bias, _ = self.options.shared(shared)
        ignored = self.options.ignore_index
        scores = self.options.scores(hidden.flatten(0, 1), weight, bias)
        nll, _ = token_terms(scores, targets.repeat_interleave(hidden.shape[1]), ignore_index=ignored)
        total = combined(log_prior, nll.reshape(log_prior.shape), targets != ignored)
        return (), (weighted((total,), coefficients[:, None]),)

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """In place, one chunk of scores alive."""
        hidden, log_prior, targets, coefficients = tokens
        weight, bias, _ = self.options.shared(shared)
        count = hidden.shape[1]
        flat = hidden.reshape(-1, hidden.shape[-1])
        work = Work(self.options, flat, weight, bias, self.chunk * count)
        asked = (self.asked[0][0], self.asked[1][0], any(self.asked[1][1:]))
        sums = Sums(work, flat, asked)
        counts = targets != self.options.ignore_index
        safe = torch.where(counts, targets, 0).repeat_interleave(count)
        place, made = safe[:, None], Exponentials(flat, len(flat), work.wide)
        steep = flat.new_ones(len(flat), 1, dtype=work.wide)
        totals = flat.new_empty(len(hidden), dtype=work.wide)
        on_prior = log_prior.new_empty(log_prior.shape, dtype=work.wide)
        weights = torch.where(counts, coefficients.to(work.wide), 0.0)
        for part in work.chunks(len(flat)):
            products = work.fill(flat[part])
            for at, scores, slope in work.pieces(part, products, slope=any(asked)):
                made.make(at, scores, place[at])
                if slope is not None:
                    scores.mul_(slope)
                    torch.gather(slope, 1, place[at], out=steep[at])
            peak, own, rest = made.of(part)
            nll, _, total = terms_of(peak, own, rest)
            whole = slice(part.start // count, part.stop // count)
            joint = log_prior[whole].to(work.wide) - nll.view(-1, count)
            totals[whole] = -logsumexp(joint, 1)
            # A target without a probability in any component has an infinite loss and no gradient.
            none = torch.isinf(totals[whole])
            posterior = torch.softmax(joint.masked_fill_(none[:, None], 0.0), dim=1) * weights[whole, None]
            posterior.masked_fill_(none[:, None], 0.0)
            on_prior[whole] = -posterior
            factor = posterior.flatten() * torch.where(total == 0, 0.0, 1 / total)
            if any(asked):
                sums.add(part, products, factor, -factor * rest * steep[part, 0], safe[part])
        totals.masked_fill_(~counts, 0.0)
        of_hidden = None if sums.hidden is None else sums.hidden.view(hidden.shape)
        of_tokens = (
            of_hidden,
            on_prior if self.asked[0][1] else None,
            totals if self.asked[0][3] else None,
        )
        kept = tuple(part for part in (*of_tokens, sums.weight, sums.bias) if part is not None)
        return (), (weighted((totals,), weights[:, None]),), kept
