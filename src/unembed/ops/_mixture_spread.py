"""Loss of a mixture of softmaxes with a sum over all classes, as label smoothing asks for; gradients in the same pass.

The sum needs `log p_v` of every class, so the components of a token are worked on together, a piece at a time.

Shapes: N tokens, K components, D hidden size, V vocabulary; t tokens of a piece.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unembed.ops._linear_work import LinearOptions, Sums, Work, terms_of
from unembed.ops._rows import Tensors, Wanted
from unembed.ops._summed import Summed
from unembed.ops._token_terms import logsumexp, weighted


class MixtureSpread(Summed):
    r"""$\sum_n a_n \mathrm{nll}_n + d_n \sum_v s_v \log p_{nv}$.

    Tokens `(hidden [N, K, D], log_prior [N, K], targets, coefficients [N, 2])`, shared `(weight[, bias], spread)`; s is
    0 where a score may be `-inf`.

    Args:
        options: Of the components; says that there is a spread.
        chunk: Tokens at a time.
        asked: Inputs whose gradients to make; that of the spread is made from the definition only.
    """

    def __init__(self, options: LinearOptions, chunk: int, asked: Wanted) -> None:
        super().__init__(chunk, asked)
        self.options = options

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The definition."""
        hidden, log_prior, targets, coefficients = tokens
        weight, bias, spread = self.options.shared(shared)
        assert spread is not None
        scores = self.options.scores(hidden.flatten(0, 1), weight, bias)
        scores = scores.to(coefficients.dtype).unflatten(0, log_prior.shape)
        lse = logsumexp(scores, -1)
        parts = scores - torch.where(lse == -torch.inf, 0.0, lse)[..., None] + log_prior[..., None]
        log_p = logsumexp(parts, 1)
        counts = targets != self.options.ignore_index
        own = log_p.gather(1, torch.where(counts, targets, 0)[:, None])[:, 0]
        finite = torch.where(log_p == -torch.inf, 0.0, log_p)
        return (), (weighted((torch.where(counts, -own, 0.0), finite @ spread.to(finite.dtype)), coefficients),)

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """In place, one chunk of scores alive."""
        hidden, log_prior, targets, coefficients = tokens
        weight, bias, spread = self.options.shared(shared)
        assert spread is not None
        count = hidden.shape[1]
        flat = hidden.reshape(-1, hidden.shape[-1])
        work = Work(self.options, flat, weight, bias, self.chunk * count, group=count)
        sums = Sums(work, flat, (self.asked[0][0], self.asked[1][0], self.options.biased and self.asked[1][1]))
        counts = targets != self.options.ignore_index
        safe = torch.where(counts, targets, 0).repeat_interleave(count)
        terms, on_prior = flat.new_empty(len(hidden), 2, dtype=work.wide), torch.empty_like(log_prior, dtype=work.wide)
        columns = torch.where(counts[:, None] | torch.tensor([False, True], device=hidden.device), coefficients, 0.0)
        columns = columns.to(work.wide)
        size = columns.abs().amax(1, keepdim=True).clamp(min=torch.finfo(work.wide).tiny)  # float16 would underflow
        on_target, piece = flat.new_empty(len(flat), 1, dtype=work.wide), _Piece(spread.to(work.wide), work)
        for part in work.chunks(len(flat)):
            products = work.fill(flat[part])
            for at, scores, slope in work.pieces(part, products, slope=any(sum(self.asked, ()))):
                whole = slice(at.start // count, at.stop // count)
                given = (log_prior[whole].to(work.wide), safe[at][:, None], (columns / size)[whole])
                terms[whole], on_prior[whole], on_target[at] = piece.work(scores, slope, *given)
            factor = size.repeat_interleave(count)[part]
            if any(sum(self.asked, ())):
                sums.add(part, products, factor, on_target[part, 0] * factor, safe[part])
        terms[:, 0].masked_fill_(~counts, 0.0)
        of_tokens = (
            None if sums.hidden is None else sums.hidden.view(hidden.shape),
            (on_prior * size).to(log_prior.dtype) if self.asked[0][1] else None,
            terms if self.asked[0][3] else None,
        )
        kept = tuple(part for part in (*of_tokens, sums.weight, sums.bias) if part is not None)
        return (), (weighted(terms.unbind(1), columns),), kept


class _Piece:
    """What is done to the scores of some tokens while they are in the cache."""

    def __init__(self, spread: Tensor, work: Work) -> None:
        self._spread, self._room = spread, work.scratch()

    def work(
        self, scores: Tensor, slope: Tensor | None, log_prior: Tensor, place: Tensor, coefficients: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        r"""Put the gradient in the place of the scores, 0 at the target.

        With $u_v = d s_v$ and the posterior $r_{kv} = \pi_k p_{kv} / p_v$, it is
        $r_{kv} u_v - p_{kv} \sum_w r_{kw} u_w + a\, r_{ky} p_{kv}$; on the target the last term is
        $-a\, r_{ky} (1 - p_{ky})$.

        Returns:
            Both terms of each token, the gradient of its log prior, and that of each component's target.
        """
        tokens, count = log_prior.shape
        exponentials = self._room[: len(scores)]
        peak = scores.amax(1, keepdim=True)
        peak.masked_fill_(peak == -torch.inf, 0.0)
        own = torch.gather(scores.sub_(peak), 1, place)
        torch.exp(scores, out=exponentials)
        at_own = exponentials.gather(1, place)
        rest = exponentials.scatter_(1, place, 0.0).sum(1, keepdim=True)
        nll, _, total = (part.view(tokens, count) for part in terms_of(peak, own, rest))
        share = torch.where(total == 0, 0.0, 1 / total)
        joint = log_prior - nll
        loss = -logsumexp(joint, 1)
        none = torch.isinf(loss)[:, None]
        posterior = torch.softmax(joint.masked_fill(none, 0.0), 1).masked_fill(none, 0.0) * coefficients[:, :1]

        parts = scores.view(tokens, count, -1)  # log pi_k + log p_kv
        parts.add_((log_prior + torch.where(total == 0, 0.0, share.log()))[..., None])
        top = parts.amax(1, keepdim=True)
        top.masked_fill_(top == -torch.inf, 0.0)
        together = parts.sub_(top).exp_().sum(1, keepdim=True).clamp_(min=torch.finfo(scores.dtype).tiny)
        spread = torch.mv((together.log() + top)[:, 0], self._spread)
        parts.mul_(coefficients[:, 1, None, None] * self._spread / together)
        pulled = parts.sum(-1)
        at_target = scores.gather(1, place)
        scores.addcmul_(exponentials, ((posterior - pulled) * share).view(-1, 1)).scatter_(1, place, 0.0)
        share, flat = share.view(-1, 1), posterior.view(-1, 1)
        on_target = at_target - pulled.view(-1, 1) * at_own * share - flat * rest * share
        if slope is not None:
            scores.mul_(slope)
            on_target *= slope.gather(1, place)
        return torch.stack([loss, spread], 1), pulled - posterior, on_target
