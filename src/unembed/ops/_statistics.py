"""Statistics of each token under a linear head and against another, with gradients from a second look at the scores.

Shapes: n tokens, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from unembed.ops._linear_work import LinearOptions, Sums, Work
from unembed.ops._rows import Pullback, Rows, Tensors, Wanted
from unembed.ops._token_terms import statistics_of

_LEAST = -1e30  # in the place of a log-probability of -inf, which times its probability would be NaN


class Statistics(Rows):
    """Tokens `(hidden, targets[, hidden of the reference])`, shared those of the head and of the reference.

    Gives `log_prob, entropy, argmax, lse[, kl]` of each token.

    Args:
        options: Of the head.
        reference: Of the head that it is held against; None for none.
        chunk: Tokens at a time.
    """

    def __init__(self, options: LinearOptions, reference: LinearOptions | None, chunk: int) -> None:
        super().__init__(chunk, 4 + (reference is not None), 0)
        self.options, self.reference = options, reference

    def split(self, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The shared tensors of the head, and of the reference."""
        own = 1 + self.options.biased
        return shared[:own], shared[own:]

    def __call__(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors]:
        """The definition."""
        hidden, targets, *other = tokens
        own, others = self.split(shared)
        weight, bias, _ = self.options.shared(own)
        scores = self.options.scores(hidden, weight, bias)
        reference = None
        if self.reference is not None:
            weight, bias, _ = self.reference.shared(others)
            reference = self.reference.scores(other[0], weight, bias)
        return statistics_of(scores, targets, reference, ignore_index=self.options.ignore_index), ()

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """In place, one chunk of scores of each head alive."""
        hidden, targets, *other = tokens
        work, against = self.works(tokens, shared)
        if self._excludes_all(shared) or (against is not None and against.wide != work.wide):
            return super().run(tokens, shared)
        counts = targets != self.options.ignore_index
        place = torch.where(counts, targets, 0)[:, None]
        peak, rest, own, inner = hidden.new_empty(4, len(hidden), 1, dtype=work.wide)
        peak_other, rest_other, kl = hidden.new_empty(3, len(hidden), 1, dtype=work.wide)
        top, room = torch.empty_like(place), work.scratch()
        lost = self._lost(shared)
        for part in _chunks(work, against, len(hidden)):
            for at, (scores, _), reference in _pieces(work, against, part, _filled(work, against, part, hidden, other)):
                exponentials = room[: len(scores)]
                torch.argmax(scores, 1, keepdim=True, out=top[at])
                torch.gather(scores, 1, top[at], out=peak[at])
                torch.gather(scores.sub_(peak[at]), 1, place[at], out=own[at])
                torch.exp(scores, out=exponentials).scatter_(1, top[at], 0.0)  # the largest is 1, the others are `rest`
                torch.sum(exponentials, 1, keepdim=True, out=rest[at])
                scores.sub_(torch.log1p(rest[at])).clamp_(min=_LEAST)
                if reference is not None:
                    log_q = _log_softmax_(reference[0], peak_other[at], rest_other[at])
                    gap = torch.sub(scores, log_q, out=log_q)
                    at_top = gap.gather(1, top[at])
                    kl[at] = (gap.mul_(exponentials).sum(1, keepdim=True) + at_top) / (1 + rest[at])
                    if lost is not None:
                        given = exponentials[:, lost].amax(1, keepdim=True) > 0
                        kl[at] = kl[at].masked_fill_(given | torch.isin(top[at], lost), torch.inf)
                torch.sum(scores.mul_(exponentials), 1, keepdim=True, out=inner[at])
        log_total = torch.log1p(rest)
        log_prob = torch.where(counts[:, None], own - log_total, 0.0)
        columns = (
            log_prob,
            (log_total - inner) / (1 + rest),
            top,
            peak + log_total,
            *(() if against is None else (kl,)),
        )
        found = tuple(column.squeeze(1).clone() for column in columns)  # forward mode takes no views
        return found, (), (peak, rest, *(() if against is None else (peak_other, rest_other)))

    def pullback(self, wanted: Wanted, outputs: Tensors, kept: Tensors) -> tuple[Rows, Tensors, Tensors]:
        """By hand, from the numbers and what `run` kept."""
        if not kept:
            return super().pullback(wanted, outputs, kept)
        return _StatisticsGradients(self, wanted), (*outputs[:2], *outputs[4:], *kept), ()

    def works(self, tokens: Tensors, shared: Tensors) -> tuple[Work, Work | None]:
        """Where the scores of the head and of the reference come from."""
        own, others = self.split(shared)
        weight, bias, _ = self.options.shared(own)
        work = Work(self.options, tokens[0], weight, bias, self.chunk)
        if self.reference is None:
            return work, None
        weight, bias, _ = self.reference.shared(others)
        return work, Work(self.reference, tokens[2], weight, bias, self.chunk)

    def _excludes_all(self, shared: Tensors) -> bool:
        return any(bias is not None and bool((bias == -torch.inf).all()) for bias in self._biases(shared))

    def _lost(self, shared: Tensors) -> Tensor | None:
        """Classes that only the reference takes out: what the head gives them is infinitely far from it."""
        bias, other = self._biases(shared)
        if other is None:
            return None
        lost = (other == -torch.inf) if bias is None else (other == -torch.inf) & (bias != -torch.inf)
        return lost.nonzero()[:, 0] if bool(lost.any()) else None

    def _biases(self, shared: Tensors) -> tuple[Tensor | None, Tensor | None]:
        own, others = self.split(shared)
        return self.options.shared(own)[1], None if self.reference is None else self.reference.shared(others)[1]


class _StatisticsGradients(Pullback):
    r"""Gradients of `Statistics`; takes log-probability, entropy, KL and what that kept beside its inputs.

    With a, b, c, d the upstream gradients of log-probability, entropy, KL and log-sum-exp, off the target
    $$\partial z_v = p_v (d - a - b H - c\,\mathrm{KL} + (c - b) \log p_v - c \log q_v)$$
    and on it $a (1 - p_y)$ in the place of $-a p_y$; of the reference's scores it is $c (q_v - p_v)$.
    """

    def __init__(self, function: Statistics, wanted: Wanted) -> None:
        super().__init__(function, wanted)
        self._statistics = function

    def run(self, tokens: Tensors, shared: Tensors) -> tuple[Tensors, Tensors, Tensors]:
        """In place, one chunk of scores of each head alive."""
        function, two = self._statistics, self._statistics.reference is not None
        hidden, _, *other = tokens[: 2 + two]
        work, against = function.works(tokens, shared)
        mix = _Mix(tokens[1:], function.options.ignore_index, two=two)
        own_sums, other_sums = self._sums(work, against, hidden, other)
        place, room = mix.safe[:, None], work.scratch()
        steep, log_p, log_q = hidden.new_ones(3, len(hidden), 1, dtype=work.wide)
        for part in _chunks(work, against, len(hidden)):
            products = _filled(work, against, part, hidden, other)
            for at, (scores, slope), reference in _pieces(work, against, part, products, slope=True):
                scores.sub_(mix.peak[at]).sub_(mix.log_total[at]).clamp_(min=_LEAST)
                torch.gather(scores, 1, place[at], out=log_p[at])
                probability = torch.exp(scores, out=room[: len(scores)])
                scores.mul_(mix.on_own[at]).add_(mix.constant[at])
                if reference is not None:
                    logs, bend = reference
                    logs.sub_(mix.peak_other[at]).sub_(mix.log_total_other[at]).clamp_(min=_LEAST)
                    torch.gather(logs, 1, place[at], out=log_q[at])
                    scores.addcmul_(logs, mix.on_other[at])
                    if other_sums is not None:
                        logs.exp_().sub_(probability)
                        if bend is not None:
                            logs.mul_(bend)
                scores.mul_(probability).scatter_(1, place[at], 0.0)
                if slope is not None:
                    scores.mul_(slope)
                    torch.gather(slope, 1, place[at], out=steep[at])
            on_target = mix.on_target(part, log_p[part], log_q[part]) * steep[part]
            own_sums.add(part, products[0], mix.size[part, 0], on_target[:, 0], mix.safe[part])
            if other_sums is not None:
                other_sums.add(part, products[1], mix.on_kl[part, 0], torch.zeros_like(on_target[:, 0]), mix.safe[part])
        return self._result(own_sums, other_sums, tokens, shared)

    def _sums(self, work: Work, against: Work | None, hidden: Tensor, other: list[Tensor]) -> tuple[Sums, Sums | None]:
        of_tokens, of_shared = self.wanted
        biased = self._statistics.options.biased
        sums = Sums(work, hidden, (of_tokens[0], of_shared[0], biased and of_shared[1]))
        if against is None or not (of_tokens[2] or any(of_shared[1 + biased :])):
            return sums, None
        rest = of_shared[1 + biased :]
        return sums, Sums(against, other[0], (of_tokens[2], rest[0], len(rest) > 1 and rest[1]))

    def _result(
        self, sums: Sums, other_sums: Sums | None, tokens: Tensors, shared: Tensors
    ) -> tuple[Tensors, Tensors, Tensors]:
        function = self._statistics
        count = len(self.wanted[1])
        own, others = function.split(shared[:count])
        weight, bias, _ = function.options.shared(own)
        of_tokens, of_shared = sums.result(tokens[0], weight, bias)
        if other_sums is not None and function.reference is not None:
            weight, bias, _ = function.reference.shared(others)
            more_tokens, more_shared = other_sums.result(tokens[2], weight, bias)
            of_tokens, of_shared = (*of_tokens, *more_tokens), (*of_shared, *more_shared)
        return of_tokens, of_shared, ()


class _Mix:
    """Columns of the upstream gradients as the loop over pieces takes them, each token's over their size.

    Args:
        tokens: Targets, hidden states of the reference where there is one, upstream gradients, then what was kept.
        ignore_index: Target of tokens whose log-probability does not count.
        two: Whether there is a reference.
    """

    def __init__(self, tokens: Tensors, ignore_index: int, *, two: bool) -> None:
        targets, *rest = tokens
        rest = rest[two:]  # hidden states of the reference
        ups, beside = [up[:, None] for up in rest[: 3 + two]], rest[3 + two :]
        on_log_prob, on_entropy, self._on_lse = ups[:3]
        log_prob, entropy, *kl = (one[:, None] for one in beside[: 2 + two])
        self.peak, rest_of_sum, *kept_other = beside[2 + two :]
        counts = (targets != ignore_index)[:, None]
        self.safe = torch.where(counts[:, 0], targets, 0)
        self.log_total = torch.log1p(rest_of_sum)
        self._on_log_prob, self._missing = torch.where(counts, on_log_prob, 0.0), -torch.expm1(log_prob)
        self._on_entropy, self._entropy = on_entropy, entropy
        self.on_kl = self._kl = torch.zeros_like(entropy)
        if two:  # a KL of infinity has no gradient
            live = torch.isfinite(kl[0])
            self.on_kl, self._kl = torch.where(live, ups[3], 0.0), torch.where(live, kl[0], 0.0)
            self.peak_other, self.log_total_other = kept_other[0], torch.log1p(kept_other[1])
        sizes = [part.abs() for part in (self._on_log_prob, on_entropy, self._on_lse, self.on_kl)]
        self.size = torch.stack(sizes).amax(0).clamp(min=torch.finfo(entropy.dtype).tiny)  # or float16 would underflow
        self._common = self._on_lse - on_entropy * entropy - self.on_kl * self._kl
        self.constant = (self._common - self._on_log_prob) / self.size
        self.on_own, self.on_other = (self.on_kl - on_entropy) / self.size, -self.on_kl / self.size

    def on_target(self, part: slice, log_p: Tensor, log_q: Tensor) -> Tensor:
        """The gradient of the target's score."""
        inside = (self.on_kl[part] - self._on_entropy[part]) * log_p - self.on_kl[part] * log_q
        return self._on_log_prob[part] * self._missing[part] + log_p.exp() * (self._common[part] + inside)


def _chunks(work: Work, against: Work | None, count: int) -> Iterator[slice]:
    """Chunks of both heads side by side."""
    if against is None:
        yield from work.chunks(count)
        return
    for part, _ in zip(work.chunks(count), against.chunks(count), strict=True):
        yield part


def _filled(work: Work, against: Work | None, part: slice, hidden: Tensor, other: list[Tensor]) -> list[Tensor]:
    """`h W^T` of a chunk, of the reference too."""
    found = [work.fill(hidden[part])]
    return found if against is None else [*found, against.fill(other[0][part])]


def _pieces(
    work: Work, against: Work | None, part: slice, products: list[Tensor], *, slope: bool = False
) -> Iterator[tuple[slice, tuple[Tensor, Tensor | None], tuple[Tensor, Tensor | None] | None]]:
    """Tokens, scores and slope of a piece of both heads."""
    if against is None:
        for at, scores, steep in work.pieces(part, products[0], slope=slope):
            yield at, (scores, steep), None
        return
    both = (work.pieces(part, products[0], slope=slope), against.pieces(part, products[1], slope=slope))
    for (at, scores, steep), (_, others, bend) in zip(*both, strict=True):
        yield at, (scores, steep), (others, bend)


def _log_softmax_(scores: Tensor, peak: Tensor, rest: Tensor) -> Tensor:
    """Log-probabilities in the place of scores; fills in the largest score, and the sum of the other exponentials.

    That sum without the largest, which is 1, is what keeps its digits where one class is almost certain.
    """
    top = torch.argmax(scores, 1, keepdim=True)
    torch.gather(scores, 1, top, out=peak)
    torch.sum(torch.exp(scores.sub_(peak)).scatter_(1, top, 0.0), 1, keepdim=True, out=rest)
    return scores.sub_(torch.log1p(rest)).clamp_(min=_LEAST)
