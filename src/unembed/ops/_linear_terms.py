"""Terms of each token under a linear head, with gradients from a second look at the scores.

The target's part of a gradient is kept apart, so `p_y - 1` is never formed: off the target the gradient of `nll` is
`p_v`, on it `-s` with `s` the sum of the others.

Shapes: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

from unembed.ops._linear_work import Exponentials, LinearOptions, Sums, Work, spread_of, terms_of
from unembed.ops._rows import Pullback, Rows, Tensors, Wanted
from unembed.ops._token_terms import token_terms


class LinearTerms(Rows):
    """`nll`, `lse` and the weighted sum of scores of each token; tokens `(hidden, targets)`, shared `(weight, ...)`."""

    def __init__(self, options: LinearOptions, chunk: int) -> None:
        super().__init__(chunk, 2 + options.spread, 0)
        self.options = options

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The definition."""
        weight, bias, spread = self.options.shared(shared)
        scores = self.options.scores(tokens[0], weight, bias)
        return token_terms(scores, tokens[1], ignore_index=self.options.ignore_index, spread=spread), ()

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """In place, one chunk of scores alive."""
        hidden, targets = tokens
        weight, bias, spread = self.options.shared(shared)
        work = Work(self.options, hidden, weight, bias, self.chunk)
        terms = tuple(hidden.new_empty(len(hidden), dtype=work.wide) for _ in range(self.outputs))
        counts = targets != self.options.ignore_index
        place = torch.where(counts, targets, 0)[:, None]
        made = Exponentials(hidden, len(hidden), work.wide)
        for part in work.chunks(len(hidden)):
            for at, scores, _ in work.pieces(part, work.fill(hidden[part])):
                if spread is not None:
                    terms[2][at] = spread_of(scores, spread)
                made.make(at, scores, place[at])
        peak, own, rest = made.of(slice(0, len(hidden)))
        terms[0][:], terms[1][:], total = terms_of(peak, own, rest)
        # Of curved scores the slope would be needed too, which the exponentials do not tell.
        kept = (peak, own, rest, total, torch.tensor(0, device="cpu") if self.options.curved else work.ticket())
        return (terms[0].masked_fill_(~counts, 0.0), *terms[1:]), (), kept

    def pullback(self, wanted: Wanted, outputs: Tensors, kept: Tensors) -> tuple[Rows, Tensors, Tensors]:
        """By hand, from what `run` kept."""
        if not kept:  # a batch of gradients went through the definition
            return super().pullback(wanted, outputs, kept)
        return _LinearGradients(self, wanted), kept[:4], kept[4:]


class _LinearGradients(Pullback):
    """Gradients of `LinearTerms`; takes what that kept of its exponentials beside its inputs.

    Of the last chunk the exponentials may still be in the scores memory; then they are not made again.
    """

    def __init__(self, function: LinearTerms, wanted: Wanted) -> None:
        super().__init__(function, wanted)
        self._options = function.options

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """In place, one chunk of scores alive."""
        options = self._options
        hidden, targets, on_nll, on_lse, *on_spread, peak, own, rest, total = tokens
        weight, bias, spread = options.shared(shared)
        if any(self.wanted[1][1 + options.biased :]):  # of the spread: rarely asked for, so the definition does it
            return super().run(tokens, shared)
        work = Work(options, hidden, weight, bias, self.chunk)
        sums = Sums(work, hidden, (self.wanted[0][0], self.wanted[1][0], options.biased and self.wanted[1][1]))
        counts, live = targets != options.ignore_index, total != 0
        safe, share = torch.where(counts, targets, 0), torch.where(live, 1 / total, 0.0)
        place, base = safe[:, None], peak[:, None]
        on_nll, on_lse = torch.where(counts & live, on_nll, 0.0), torch.where(live, on_lse, 0.0)
        factor = (on_nll + on_lse) * share
        on_target = (on_lse * own.exp() - on_nll * rest) * share
        steep = hidden.new_empty(len(hidden), 1, dtype=work.wide)
        dense = spread is not None and options.curved
        # The order is the same whether the last chunk is there or not, so the bits of the sums are too.
        for part in work.chunks(len(hidden), last_first=True, ticket=shared[-1]):
            if work.ready and part.stop == len(hidden):
                products = work.left(part)
            else:
                products = work.fill(hidden[part])
                for at, scores, slope in work.pieces(part, products, slope=True):
                    scores.sub_(base[at]).exp_().scatter_(1, place[at], 0.0)
                    if dense and spread is not None:
                        scores.mul_(factor[at, None]).addcmul_(on_spread[0][at, None], spread.to(scores.dtype))
                    if slope is not None:
                        scores.mul_(slope)
                        torch.gather(slope, 1, place[at], out=steep[at])
            if options.curved:
                on_target[part] *= steep[part, 0]
            ones = torch.ones_like(factor[part])
            sums.add(part, products, ones if dense else factor[part], on_target[part], safe[part])
        if spread is not None and not dense:
            sums.add_spread(on_spread[0], spread)
        return *sums.result(hidden, weight, bias), ()
