"""Negative log-likelihood of a mixture of softmaxes over one matrix, never tokens x components x vocabulary.

The loss of a token needs of each component its own loss only: `nll = -logsumexp_k (log pi_k - nll_k)`. So a mixture is
K linear losses a token, and everything that holds for those holds for it.

Shapes: N tokens, K components, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.ops._linear_nll import as_autocast, check_targets, chunk_rows, linear_options
from unembed.ops._linear_terms import LinearTerms
from unembed.ops._linear_work import LinearOptions, Sums, Work, exponentials, terms_of
from unembed.ops._rows import Pullback, Rows, Tensors, Wanted, evaluate
from unembed.ops._token_terms import token_terms


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
    hidden, weight, bias = as_autocast(hidden, weight, bias)
    check_targets(targets, len(weight), ignore_index)
    options, shared = linear_options(
        hidden[..., 0, :], weight, targets, bias=bias, sigsoftmax=sigsoftmax, ignore_index=ignore_index
    )
    rows = chunk_rows(components * len(weight), hidden.device, chunk) * components
    flat = targets.reshape(-1).long()
    each = flat.repeat_interleave(components)
    (nll, _), _ = evaluate(LinearTerms(options, rows), (hidden.reshape(-1, hidden.shape[-1]), each), shared)
    total = combined(log_prior.reshape(-1, components), nll.reshape(-1, components), flat != ignore_index)
    return total.reshape(targets.shape)


def mixture_loss(
    hidden: Float[Tensor, "N K D"],
    log_prior: Float[Tensor, "N K"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " N"],
    coefficients: Float[Tensor, " N"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    sigsoftmax: bool = False,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Float[Tensor, ""]:
    r"""$\sum_n a_n \mathrm{nll}_n$; where gradients will be asked for, they are made in the forward pass.

    Args:
        hidden: Hidden state of each component.
        log_prior: Log of the component weights.
        weight: The matrix of all components.
        targets: Next tokens.
        coefficients: a of each token.
        bias: Added to the scores of each component.
        sigsoftmax: Components are `softmax(u + log sigmoid(u))` of their scores u.
        ignore_index: Target of tokens that do not count.
        chunk: Tokens whose scores are alive at once. Chosen from V and K when None.
    """
    hidden, weight, bias = as_autocast(hidden, weight, bias)
    check_targets(targets, len(weight), ignore_index)
    options, shared = linear_options(
        hidden[..., 0, :], weight, targets, bias=bias, sigsoftmax=sigsoftmax, ignore_index=ignore_index
    )
    alive = torch.is_grad_enabled()
    wants = [alive and tensor is not None and tensor.requires_grad for tensor in (hidden, weight, bias)]
    rows = chunk_rows(hidden.shape[1] * len(weight), hidden.device, chunk)
    function = _MixtureLoss(options, rows, (wants[0] or (alive and log_prior.requires_grad), wants[1], wants[2]))
    _, (total,) = evaluate(function, (hidden, log_prior, targets.long(), coefficients), shared)
    return total


def combined(log_prior: Float[Tensor, "N K"], nll: Float[Tensor, "N K"], counts: Tensor) -> Float[Tensor, " N"]:
    """`-logsumexp_k (log pi_k - nll_k)` of the tokens that count, 0 of the others."""
    joint = log_prior.to(nll.dtype) - nll
    joint = torch.where(counts[:, None], joint, 0.0)
    total = -torch.logsumexp(joint, dim=1)
    return torch.where(counts, total, 0.0)


class _MixtureLoss(Rows):
    """Tokens `(hidden, log_prior, targets, coefficients)`, shared `(weight[, bias])`; one sum."""

    def __init__(self, options: LinearOptions, chunk: int, asked: tuple[bool, bool, bool]) -> None:
        super().__init__(chunk, 0, 1)
        self.options, self.asked = options, asked

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The definition."""
        hidden, log_prior, targets, coefficients = tokens
        weight, bias, _ = self.options.shared(shared)
        ignored = self.options.ignore_index
        scores = self.options.scores(hidden.flatten(0, 1), weight, bias)
        nll, _ = token_terms(scores, targets.repeat_interleave(hidden.shape[1]), ignore_index=ignored)
        total = combined(log_prior, nll.reshape(log_prior.shape), targets != ignored)
        return (), (_sum(total, coefficients),)

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """In place, one chunk of scores alive."""
        hidden, log_prior, targets, coefficients = tokens
        weight, bias, _ = self.options.shared(shared)
        count = hidden.shape[1]
        flat = hidden.reshape(-1, hidden.shape[-1])
        work = Work(self.options, flat, weight, bias, self.chunk * count)
        sums = Sums(work, flat, self.asked)
        counts = targets != self.options.ignore_index
        safe = torch.where(counts, targets, 0).repeat_interleave(count)
        nll, rest, share = flat.new_empty(3, len(flat), dtype=work.wide)
        on_target = torch.empty_like(nll)
        totals = flat.new_empty(len(hidden), dtype=work.wide)
        on_prior = log_prior.new_empty(log_prior.shape, dtype=work.wide)
        weights = torch.where(counts, coefficients.to(work.wide), 0.0)
        for part in work.chunks(len(flat)):
            products = work.fill(flat[part])
            for at, scores, slope in work.pieces(part, products, slope=any(self.asked)):
                peak, own, rest[at] = exponentials(scores, safe[at])
                nll[at], _, total = terms_of(peak, own, rest[at])
                share[at] = torch.where(total == 0, 0.0, 1 / total)
                if slope is not None:
                    scores.mul_(slope)
                    rest[at] *= slope.gather(1, safe[at, None]).squeeze(1)
            whole = slice(part.start // count, part.stop // count)
            joint = log_prior[whole].to(work.wide) - nll[part].view(-1, count)
            totals[whole] = -torch.logsumexp(joint, dim=1)
            posterior = torch.softmax(joint, dim=1) * weights[whole, None]
            on_prior[whole] = -posterior
            factor = posterior.flatten() * share[part]
            on_target[part] = -factor * rest[part]
            if any(self.asked):
                sums.add(part, products, factor, on_target[part], safe[part])
        totals.masked_fill_(~counts, 0.0)
        of_hidden = () if sums.hidden is None else (sums.hidden.view(hidden.shape),)
        made = tuple(part for part in (sums.weight, sums.bias) if part is not None)
        return (), (_sum(totals, weights),), (totals, on_prior, *of_hidden, *made)

    def pullback(self, wanted: Wanted, outputs: Tensors, kept: Tensors) -> tuple[Rows, Tensors, Tensors]:
        """From what the pass made, where that is all that is wanted."""
        split = 2 + self.asked[0]
        return _MixtureGradients(self, wanted), kept[:split], kept[split:]


class _MixtureGradients(Pullback):
    """The gradients that `_MixtureLoss` made, times the upstream one."""

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """All products already done."""
        assert isinstance(self.function, _MixtureLoss)
        asked = self.function.asked
        (hidden, prior, _, coefficient), (weight, *bias) = self.wanted
        wants = (hidden, weight, any(bias))
        if any(want and not made for want, made in zip(wants, asked, strict=True)) or (prior and not any(asked)):
            return super().run(tokens, shared)
        totals, on_prior, *of_hidden = tokens[len(self.wanted[0]) :]
        upstream, *made = shared[len(self.wanted[1]) :]
        outputs = [(part * upstream).to(tokens[0].dtype) for part in of_hidden if hidden]
        if prior:
            outputs.append((on_prior * upstream).to(tokens[1].dtype))
        if coefficient:
            outputs.append((totals * upstream).to(tokens[3].dtype))
        pairs = zip([want for want, has in zip(wants[1:], asked[1:], strict=True) if has], made, strict=True)
        return tuple(outputs), tuple((part * upstream).to(shared[0].dtype) for want, part in pairs if want), ()


def _sum(nll: Tensor, coefficients: Tensor) -> Tensor:
    coefficients = coefficients.to(nll.dtype)
    blank = (coefficients == 0) & ~torch.isfinite(nll)
    return (torch.where(blank, 0.0, nll) * coefficients).sum()
