"""Speculation: tokens that something cheaper drafts are read at once, and the distribution stays the model's.

A draft d, drawn from q, is kept with probability `min(1, p(d) / q(d))`; in the place of the first one that is not, a
token is drawn from `max(p - q, 0)`; after drafts that are all kept, one from p (Leviathan et al., 2023,
arXiv:2211.17192; Chen et al., 2023, arXiv:2302.01318). Then each token has the distribution p, whatever q is.

Shapes: n draws, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from unembed.decoding._drawing import at_rows
from unembed.decoding._generation import Generation
from unembed.decoding._plan import Plan
from unembed.decoding._reader import Reader
from unembed.decoding._steps import check_finite
from unembed.decoding._writer import Writer
from unembed.decoding.filters._base import Chain
from unembed.ops import Stream
from unembed.ops._draw import block_sums, picked


class Draft(NamedTuple):
    """A token, and the distribution that it was really drawn from."""

    token: int
    q: Float[Tensor, "1 V"]


def verified(
    p: Float[Tensor, "n V"],
    q: Float[Tensor, "n V"],
    drafts: Int[Tensor, " n"],
    accept: Float[Tensor, " n"],
    redraw: Float[Tensor, " n"],
) -> tuple[Int[Tensor, " n"], Bool[Tensor, " n"]]:
    """Tokens distributed as p from drafts distributed as q, and where they are the drafts.

    Args:
        p: The target's probabilities.
        q: Probabilities that the drafts were drawn with.
        drafts: Tokens.
        accept: Uniform on [0, 1), independent of the drafts.
        redraw: The same, independent of both.
    """
    place = drafts[:, None]
    taken = (accept[:, None] * q.gather(1, place) < p.gather(1, place)).squeeze(1)
    if bool(taken.all()):
        return drafts, taken
    rest = (p - q).clamp(min=0)
    # p = q keeps every draft, but for roundings of p / q. A refused draft is not in the rest: q is larger there.
    taken |= ~(rest > 0).any(-1)
    rest = torch.where(taken[:, None], p, rest)
    return torch.where(taken, drafts, _drawn(rest, redraw)), taken


def _drawn(weights: Float[Tensor, "n V"], uniform: Float[Tensor, " n"]) -> Int[Tensor, " n"]:
    return picked(weights, block_sums(weights), uniform)


@dataclass(frozen=True)
class Row:
    """One row of a request: what may follow its tokens, and its noise.

    Args:
        plan: The request.
        number: Which row.
    """

    plan: Plan
    number: int

    @property
    def prompt(self) -> Int[Tensor, " T"]:
        """Its prompt without padding."""
        prompt = self.plan.prompts[self.number]
        return prompt[prompt >= 0]

    def chances(
        self, scores: Float[Tensor, " V"], written: Sequence[int], further: Chain | None = None
    ) -> Float[Tensor, "1 V"] | None:
        """Probabilities of the next token, float64; None where nothing is allowed.

        Args:
            scores: Of a model, after the prompt and `written`.
            written: Tokens after the prompt.
            further: Filters after those of the request.
        """
        place = self.plan.prompts.device
        which = torch.tensor([self.number], device=place)
        history = None
        if self.plan.ruled or further:
            history = self.plan.history(which, torch.tensor([written], dtype=torch.int64, device=place))
        allowed = self.plan.allowed(scores[None], history)
        if further:
            allowed = at_rows(further, which)(allowed, history)
        best = allowed.amax(-1)
        check_finite(best)
        wide = torch.float32 if allowed.device.type == "mps" else torch.float64
        return torch.softmax(allowed.to(wide), -1) if bool(best > -torch.inf) else None

    def uniform(self, position: int, stream: Stream, like: Tensor) -> Float[Tensor, " 1"]:
        """A draw at a place, of its own for each use."""
        which, where = torch.tensor([self.number]), torch.tensor([position])
        return self.plan.uniforms(which, where, stream).to(like.device, like.dtype)

    def draft(self, scores: Float[Tensor, " V"], written: Sequence[int], further: Chain | None = None) -> Draft | None:
        """A draft of the next token; None where nothing is allowed."""
        q = self.chances(scores, written, further)
        return None if q is None else Draft(int(_drawn(q, self.uniform(len(written), Stream.DRAFT, q))), q)

    def token(self, p: Float[Tensor, "1 V"], draft: Draft | None, position: int) -> tuple[int, bool]:
        """A token distributed as p, and whether it is the draft."""
        if draft is None:
            return int(_drawn(p, self.uniform(position, Stream.TOKEN, p))), False
        noise = [self.uniform(position, stream, p) for stream in (Stream.ACCEPT, Stream.RESIDUAL)]
        found, taken = verified(p, draft.q.to(p), torch.tensor([draft.token], device=p.device), *noise)
        return int(found), bool(taken)


class Drafter(Protocol):
    """What drafts tokens."""

    def start(self, row: Row, target: Reader) -> None:
        """Begin a row, whose prompt the target has read."""
        ...

    def drafts(self, written: Sequence[int], count: int) -> list[Draft]:
        """At most so many tokens after what is written, none after one that ends a text.

        The target has read the prompt and what is written, except perhaps the last token.
        """
        ...


@dataclass
class _Counts:
    drafted: int = 0
    tested: int = 0
    accepted: int = 0
    target_calls: int = 0


def speculate(target: Reader, drafter: Drafter, plan: Plan, lookahead: int) -> Generation:
    """Write the rows of a plan one after the other; `extra` says how many drafts were kept.

    Rows do not go together: they would keep different numbers of drafts, and a batch forgets as many of each.
    """
    writer, counts = Writer(plan), [_Counts() for _ in plan.prompts]
    for number, limit in enumerate(plan.max_new_tokens.tolist()):
        row = Row(plan, number)
        target.start(row.prompt)
        drafter.start(row, target)
        written = writer.rows[number].tokens
        while True:
            target.keep(written)
            drafts = drafter.drafts(list(written), min(lookahead, limit - len(written) - 1))
            scores = target.after([*written, *(one.token for one in drafts)], len(drafts) + 1)
            counts[number].drafted += len(drafts)
            if not _settle(row, drafts, scores, writer, counts[number]):
                break
        counts[number].target_calls = target.calls
    extra = {
        name: torch.tensor([getattr(one, name) for one in counts])
        for name in ("drafted", "tested", "accepted", "target_calls")
    }
    rate = extra["accepted"] / extra["tested"]  # NaN where none was tested
    return writer.generation(extra={**extra, "acceptance_rate": rate})


def _settle(row: Row, drafts: Sequence[Draft], scores: Float[Tensor, "m V"], writer: Writer, counts: _Counts) -> bool:
    """Write the drafts that are kept, and one token more; whether the row goes on."""
    plan, written = row.plan, writer.rows[row.number].tokens
    for draft, own in zip([*drafts, None], scores, strict=True):
        p = row.chances(own, written)
        if p is None:
            writer.dead_end(row.number)
            return False
        token, taken = row.token(p, draft, len(written))
        counts.tested += draft is not None
        counts.accepted += taken
        told = float(plan.told(own[None], torch.tensor([token], device=own.device)))
        drawn = float(p[0, token].log())
        if not writer.put(row.number, token, told, drawn, plan.others(own[None])[0]):
            return False
        if not taken:
            break
    return True
