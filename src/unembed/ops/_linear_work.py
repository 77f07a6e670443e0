"""Memory and products that the fast forms of the linear head share.

Scores of a chunk are one product into memory used again, and are worked on in place, in pieces that stay in a core's
cache. Low-precision scores are widened a piece at a time.

Shapes: n tokens of a chunk, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import secrets
import threading
from collections.abc import Generator, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from unembed.ops._scores import linear_scores, widened

_CACHED = 1 << 19  # scores in a piece on a CPU: 2 MiB in float32


_held = threading.local()  # the last scores memory of a thread, so that a training loop need not fault it in each step
_HOLD = 144 << 20  # bytes kept at most: the scores of the fewest rows at V = 262,144


def _is_held(device: torch.device) -> bool:
    """Whether scores memory is kept: on a CPU, and where no mode traces or fakes."""
    return device.type == "cpu" and not torch._C._len_torch_dispatch_stack()


@contextlib.contextmanager
def _scores_memory(
    shape: tuple[int, int], dtype: torch.dtype, device: torch.device, ticket: int = 0
) -> Generator[tuple[Tensor, bool]]:
    """Memory for the scores of a chunk: that of the last call where it is kept and large enough.

    With it comes whether it is as it was left when `ticket` was given. Memory and ticket are one object and taken in
    one step, should another call come in between.
    """
    if not _is_held(device):
        yield torch.empty(shape, dtype=dtype, device=device), False
        return
    count = shape[0] * shape[1]
    held, _held.scores = getattr(_held, "scores", None), None
    memory, given = held or (None, 0)
    if memory is None or memory.dtype != dtype or len(memory) < count:
        memory, given = torch.empty(count, dtype=dtype, device=device), 0
    try:
        yield memory[:count].view(shape), ticket != 0 and ticket == given
    finally:
        _held.scores = (memory, 0) if memory.nbytes <= _HOLD else None


@dataclass(frozen=True)
class LinearOptions:
    """What turns `h W^T` into scores, which targets count, and which optional shared tensors there are."""

    softcap: float | None = None
    scale: float = 1.0
    sigsoftmax: bool = False
    ignore_index: int = -100
    biased: bool = False
    spread: bool = False

    @property
    def curved(self) -> bool:
        """Whether the scores are no linear function of the hidden state."""
        return self.softcap is not None or self.sigsoftmax

    def scores(self, hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """The definition: `cap(s (h W^T + b))`, and `z + log sigmoid(z)` of that for sigsoftmax."""
        scores = linear_scores(hidden, weight, bias=bias, softcap=self.softcap, scale=self.scale)
        if self.softcap is not None and bias is not None:  # the cap lifts -inf; what is taken out stays out
            scores = torch.where(bias == -torch.inf, -torch.inf, scores)
        return scores + torch.nn.functional.logsigmoid(scores) if self.sigsoftmax else scores

    def shared(self, shared: tuple[Tensor, ...]) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Weight, bias and spread."""
        rest = list(shared[1:])
        bias = rest.pop(0) if self.biased else None
        return shared[0], bias, rest.pop(0) if self.spread else None


class Work:
    """Scores of one chunk after another.

    Args:
        options: Of the head.
        hidden: All hidden states, for shape, dtype and device.
        weight: The unembedding matrix.
        bias: Its bias.
        chunk: Tokens at a time.
        group: A piece has a multiple of this many.
    """

    def __init__(
        self,
        options: LinearOptions,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        chunk: int,
        *,
        group: int = 1,
    ) -> None:
        self.options = options
        self.dtype = torch.promote_types(hidden.dtype, weight.dtype)
        self.wide = widened(self.dtype)
        self.weight = weight.to(self.dtype)
        self._bias = None if bias is None else bias.to(self.wide)
        gone = None if bias is None or options.softcap is None else bias == -torch.inf
        self._gone = gone if gone is not None and bool(gone.any()) else None
        vocab = len(weight)
        self._rows = min(chunk, len(hidden))
        cached = max(1, _CACHED // (vocab * group)) * group
        self._piece = cached if hidden.device.type == "cpu" else max(1, self._rows)
        self._shape, self._device = (self._rows, vocab), hidden.device
        self._buffer, self.ready = hidden.new_empty(0, dtype=self.dtype), False
        small = (min(self._piece, self._rows), vocab)
        self._room = None if self.dtype == self.wide else hidden.new_empty(small, dtype=self.wide)
        self._slope = None if not options.curved else hidden.new_empty(small, dtype=self.wide)

    def fill(self, hidden: Tensor) -> Tensor:
        """`h W^T` of a chunk, in the dtype of the product; good until the next one."""
        return torch.mm(hidden.to(self.dtype), self.weight.T, out=self._buffer[: len(hidden)])

    def chunks(self, tokens: int, *, last_first: bool = False, ticket: Tensor | None = None) -> Iterator[slice]:
        """Tokens of each chunk; the memory of the scores is there from the first one to the end of the last.

        Args:
            tokens: In all.
            last_first: Whether the last chunk comes before the others.
            ticket: Of a run over the same tokens; `ready` says whether what that left is still there.
        """
        starts = list(range(0, tokens, max(self._rows, 1)))
        number = 0 if ticket is None or not _is_held(self._device) else int(ticket)
        with _scores_memory(self._shape, self.dtype, self._device, number) as (self._buffer, self.ready):
            for start in [*starts[-1:], *starts[:-1]] if last_first else starts:
                yield slice(start, min(start + self._rows, tokens))

    def ticket(self) -> Tensor:
        """A number for what the last chunk left in the memory of the scores; 0 where that is not kept.

        Nobody can guess it, and a hook that rounds saved tensors makes no other ticket of it.
        """
        held = getattr(_held, "scores", None) if _is_held(self._device) else None
        if held is None:
            return torch.tensor(0, device="cpu")
        ticket = secrets.randbits(62) | 1
        _held.scores = (held[0], ticket)
        return torch.tensor(ticket, device="cpu")

    def left(self, part: slice) -> Tensor:
        """What the last chunk left, before anything else is filled."""
        return self._buffer[: part.stop - part.start]

    def scratch(self) -> Tensor:
        """Uninitialised memory for one piece."""
        return self.weight.new_empty(min(self._piece, self._rows), self._shape[1], dtype=self.wide)

    def pieces(
        self, part: slice, products: Tensor, *, slope: bool = False
    ) -> Iterator[tuple[slice, Tensor, Tensor | None]]:
        """Tokens of a piece of chunk `part`, their scores to be overwritten, and the slope of its curve there.

        What is left in the scores after a step of the loop is stored as the chunk's, rounded to its dtype.
        """
        options = self.options
        for start in range(0, len(products), self._piece):
            inside = products[start : start + self._piece]
            scores = inside if self._room is None else self._room[: len(inside)].copy_(inside)
            if self._bias is not None:
                scores.add_(self._bias)
            if options.scale != 1.0:
                scores.mul_(options.scale)
            steep = None
            if options.softcap is not None:
                scores.div_(options.softcap)
                if slope and self._slope is not None:  # 1 - tanh^2 would be 0 in float32 from 9 c on
                    steep = torch.cosh(scores, out=self._slope[: len(inside)]).square_().reciprocal_()
                scores.tanh_().mul_(options.softcap)
                if self._gone is not None:
                    scores.masked_fill_(self._gone, -torch.inf)
            if options.sigsoftmax:
                if slope and self._slope is not None:
                    shrink = torch.sigmoid(-scores).add_(1)
                    steep = shrink if steep is None else steep.mul_(shrink)
                scores.add_(torch.nn.functional.logsigmoid(scores))
            first = part.start + start
            yield slice(first, first + len(inside)), scores, steep
            if self._room is not None:
                inside.copy_(scores)


class Sums:
    """Gradients of hidden states, weight and bias out of chunks of `c_n E_nv + t_n [v = y_n]`; None where not wanted.

    Args:
        work: Where the chunks come from.
        hidden: All hidden states.
        wanted: Whether the gradient of hidden states, weight, bias is wanted.
    """

    def __init__(self, work: Work, hidden: Tensor, wanted: tuple[bool, bool, bool]) -> None:
        self._work, self._hidden = work, hidden
        vocab, width = work.weight.shape
        self.hidden = hidden.new_empty(hidden.shape, dtype=work.wide) if wanted[0] else None
        make = hidden.new_empty if len(hidden) else hidden.new_zeros  # the first chunk writes, the others add
        self.weight = make(vocab, width, dtype=work.wide) if wanted[1] else None
        self._first = True
        self.bias = hidden.new_zeros(vocab, dtype=work.wide) if wanted[2] else None

    def add(
        self,
        rows: slice,
        matrix: Tensor,
        factor: Tensor,
        on_target: Tensor,
        targets: Tensor,
        *,
        columns: Tensor | None = None,
    ) -> None:
        """One chunk: E in the dtype of the products, c, t and y of its rows.

        The factor goes to the small side of each product, so E is never multiplied through.

        Args:
            rows: Of the chunk.
            matrix: E.
            factor: c.
            on_target: t.
            targets: y.
            columns: Classes where E is not 0; all when None.
        """
        work = self._work
        factor, on_target = factor * work.options.scale, on_target * work.options.scale
        hidden = self._hidden[rows].to(work.wide)
        matrix = matrix if columns is None else matrix.index_select(1, columns)
        if self.hidden is not None:
            others = work.weight if columns is None else work.weight.index_select(0, columns)
            part = (matrix @ others).to(work.wide).mul_(factor[:, None])
            own_rows = work.weight.index_select(0, targets).to(work.wide)
            self.hidden[rows] = part.addcmul_(on_target[:, None], own_rows)
        if self.weight is not None:
            self._add_weight(matrix, factor, hidden, columns)
            self.weight.index_add_(0, targets, on_target[:, None] * hidden)
        if self.bias is not None:
            on_bias = torch.mv(matrix.T.to(work.wide), factor)
            self.bias.add_(on_bias) if columns is None else self.bias.index_add_(0, columns, on_bias)
            self.bias.index_add_(0, targets, on_target)

    def _add_weight(self, matrix: Tensor, factor: Tensor, hidden: Tensor, columns: Tensor | None) -> None:
        work, total = self._work, self.weight
        assert total is not None
        first, self._first = self._first, False
        if columns is not None:
            if first:
                total.zero_()
            # Low-precision numbers are widened: there are few of them.
            total.index_add_(0, columns, matrix.T.to(work.wide) @ (factor[:, None] * hidden))
            return
        if work.dtype == work.wide:
            torch.addmm(total, matrix.T, factor[:, None] * hidden, beta=0 if first else 1, out=total)
            return
        if first:
            total.zero_()
        size = factor.abs().amax().clamp(min=torch.finfo(torch.float32).tiny)  # or float16 would underflow
        scaled = ((factor / size)[:, None] * hidden).to(work.dtype)
        step = max(1, _CACHED // hidden.shape[1])
        for start in range(0, len(total), step):
            block = slice(start, start + step)
            total[block].addcmul_((matrix[:, block].T @ scaled).to(work.wide), size)

    def add_spread(self, upstream: Tensor, spread: Tensor) -> None:
        """The gradients of `sum_n u_n sum_v s_v z_nv` without a soft-cap: of rank one, so no scores are needed."""
        work, hidden = self._work, self._hidden.to(self._work.wide)
        upstream, spread = upstream * work.options.scale, spread.to(work.wide)
        if self.hidden is not None:
            direction = torch.mv(work.weight.T, spread.to(work.dtype)).to(work.wide)
            self.hidden.addcmul_(upstream[:, None], direction)
        if self.weight is not None:
            self.weight.addr_(spread, torch.mv(hidden.T, upstream))
        if self.bias is not None:
            self.bias.add_(spread * upstream.sum())

    def result(
        self, hidden: Tensor, weight: Tensor, bias: Tensor | None
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """What was wanted, in the dtypes of the inputs: of tokens, of shared tensors."""
        found = ((self.weight, weight), (self.bias, bias))
        of_tokens = () if self.hidden is None else (self.hidden.to(hidden.dtype),)
        return of_tokens, tuple(total.to(of.dtype) for total, of in found if total is not None and of is not None)


class Exponentials:
    """`E = exp(z - m)` made of scores in place, zero at the target; for each token m, `z_y - m`, and the row sum of E.

    The maximum m counts as 0 in a row of only `-inf`. Columns, so that they are what a piece takes at once.

    Args:
        like: Tensor whose device they take.
        tokens: Tokens in all.
        dtype: Of the numbers.
    """

    def __init__(self, like: Tensor, tokens: int, dtype: torch.dtype) -> None:
        self._peak, self._own, self._rest = like.new_empty(3, tokens, 1, dtype=dtype)

    def make(self, at: slice, scores: Tensor, targets: Tensor) -> None:
        """Of one piece; `targets` is a column."""
        peak = torch.amax(scores, 1, keepdim=True, out=self._peak[at])
        peak.masked_fill_(peak == -torch.inf, 0.0)
        torch.gather(scores.sub_(peak), 1, targets, out=self._own[at])
        torch.sum(scores.exp_().scatter_(1, targets, 0.0), 1, keepdim=True, out=self._rest[at])

    def of(self, part: slice) -> tuple[Tensor, Tensor, Tensor]:
        """m, `z_y - m` and row sums of some tokens."""
        return self._peak[part, 0], self._own[part, 0], self._rest[part, 0]


def terms_of(peak: Tensor, own: Tensor, rest: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`nll`, `lse` and the sum of all exponentials, out of what `exponentials` gives."""
    total = own.exp() + rest
    empty = total == 0
    log_total = torch.where(own == 0, torch.log1p(rest), torch.where(empty, 1.0, total).log())
    nll = torch.where(empty, torch.inf, log_total - own)
    return nll, torch.where(empty, -torch.inf, log_total + peak), total


def spread_of(scores: Tensor, spread: Tensor) -> Tensor:
    """`sum_v s_v z_v`; a score of `-inf` has weight zero."""
    return torch.mv(scores.clamp(min=torch.finfo(scores.dtype).min), spread.to(scores.dtype))
