"""A sum over tokens under a linear head whose gradients are made in the same pass: three products instead of four.

A training step asks for one number, so the upstream gradient of each token is known, up to one factor, as soon as its
scores are there.

Shapes: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from unembed.ops._linear_work import Exponentials, LinearOptions, Sums, Work, spread_of, terms_of
from unembed.ops._rows import Tensors, Wanted
from unembed.ops._summed import Summed
from unembed.ops._token_terms import token_terms, weighted


class LinearLoss(Summed):
    r"""$\sum_n a_n \mathrm{nll}_n + b_n \mathrm{lse}_n + c_n \mathrm{lse}_n^2 + d_n \sum_v s_v z_{nv}$.

    Tokens `(hidden, targets, coefficients [N, 4])`, shared `(weight, ...)`. A term with coefficient 0 counts as 0.

    Args:
        options: Of the head.
        chunk: Tokens at a time.
        asked: Inputs whose gradients to make; that of the spread is made from the definition only.
    """

    def __init__(self, options: LinearOptions, chunk: int, asked: Wanted) -> None:
        super().__init__(chunk, asked)
        self.options = options

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The definition."""
        hidden, targets, coefficients = tokens
        options = self.options
        weight, bias, spread = options.shared(shared)
        scores = options.scores(hidden, weight, bias)
        nll, lse, *mean = token_terms(scores, targets, ignore_index=options.ignore_index, spread=spread)
        return (), (weighted((nll, lse, lse.square(), *mean), coefficients),)

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """In place, one chunk of scores alive."""
        hidden, targets, coefficients = tokens
        options = self.options
        weight, bias, spread = options.shared(shared)
        work = Work(options, hidden, weight, bias, self.chunk)
        asked = (self.asked[0][0], self.asked[1][0], options.biased and self.asked[1][1])
        sums = Sums(work, hidden, asked)
        counts = targets != options.ignore_index
        safe = torch.where(counts, targets, 0)
        place, made = safe[:, None], Exponentials(hidden, len(hidden), work.wide)
        coefficients = coefficients.to(work.wide)
        terms = hidden.new_zeros(len(hidden), 4, dtype=work.wide)
        factor, on_target = hidden.new_empty(2, len(hidden), dtype=work.wide)
        steep = hidden.new_ones(len(hidden), 1, dtype=work.wide)
        dense = spread is not None and options.curved

        def finish(at: slice) -> None:
            """Terms and upstream gradients of tokens whose exponentials are made."""
            peak, own, rest = made.of(at)
            terms[at, 0], terms[at, 1], total = terms_of(peak, own, rest)
            on_nll, on_lse = _upstream(coefficients[at], terms[at, 1], counts[at])
            share = torch.where(total == 0, 0.0, 1 / total)
            factor[at] = (on_nll + on_lse) * share
            on_target[at] = (on_lse * own.exp() - on_nll * rest) * share

        for part in work.chunks(len(hidden)):
            products = work.fill(hidden[part])
            for at, scores, slope in work.pieces(part, products, slope=any(asked)):
                if spread is not None:
                    terms[at, 3] = spread_of(scores, spread)
                made.make(at, scores, place[at])
                if dense and spread is not None:
                    finish(at)
                    scores.mul_(factor[at, None]).addcmul_(coefficients[at, 3:], spread.to(scores.dtype))
                if slope is not None:
                    scores.mul_(slope)
                    torch.gather(slope, 1, place[at], out=steep[at])
            finish(part)
            if options.curved:
                on_target[part] *= steep[part, 0]
            if any(asked):
                ones = torch.ones_like(factor[part]) if dense else factor[part]
                sums.add(part, products, ones, on_target[part], safe[part])
        if spread is not None and not dense:
            sums.add_spread(coefficients[:, 3], spread)
        terms[:, 0].masked_fill_(~counts, 0.0)
        torch.mul(terms[:, 1], terms[:, 1], out=terms[:, 2])
        of_coefficients = terms if self.asked[0][2] else None
        kept = tuple(part for part in (sums.hidden, of_coefficients, sums.weight, sums.bias) if part is not None)
        return (), (weighted(terms.unbind(1), coefficients),), kept


def _upstream(coefficients: Tensor, lse: Tensor, counts: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of the sum with respect to `nll` and `lse`."""
    on_square = torch.where(coefficients[:, 2] == 0, 0.0, 2 * coefficients[:, 2] * lse)
    return torch.where(counts, coefficients[:, 0], 0.0), coefficients[:, 1] + on_square
