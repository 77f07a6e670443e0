"""Contrastive search: probable tokens whose hidden state is unlike those before.

Shapes: n running rows, T tokens so far, k candidates, D hidden size, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import ClassVar

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from unembed.decoding._generation import Generation
from unembed.decoding._largest import largest
from unembed.decoding._plan import Plan
from unembed.decoding._scorer import Scorer
from unembed.decoding._steps import Choice, check_finite, put
from unembed.decoding._strategy import Strategy
from unembed.decoding._writer import Writer
from unembed.ops import widened
from unembed.ops._whole import is_whole


@dataclass(frozen=True)
class Contrastive(Strategy):
    r"""Probable tokens whose hidden state is unlike those before (Su et al., 2022, arXiv:2202.06417).

    Of the k most probable ones it takes the one with the largest

    $$(1 - \alpha)\, p(v \mid x_{<t}) - \alpha \max_{j < t} \cos(h_v, h_{x_j}),$$

    where $h_v$ is the last hidden state after v, and j runs over the prompt and what was written. Needs a model that
    gives hidden states. The first of equal ones, in the order of probability; `alpha=0` and `k=1` are greedy.

    Args:
        k: Candidates; each is read by the model at every step.
        alpha: Weight of the penalty, from 0 to 1.
    """

    keep_hidden: ClassVar[bool] = True
    k: int = 4
    alpha: float = 0.6

    def __post_init__(self) -> None:
        if not is_whole(self.k) or self.k < 1:
            raise ValueError(f"`k` must be a whole number of at least 1, got {self.k!r:.80}.")
        if not isinstance(self.alpha, Real) or not 0 <= self.alpha <= 1:
            raise ValueError(f"`alpha` must be from 0 to 1, got {self.alpha!r:.80}.")

    def run(self, scorer: Scorer, plan: Plan) -> Generation:
        """Write until each row ends."""
        writer, written = Writer(plan), plan.prompts[:, :0]
        rows = torch.arange(len(plan.prompts), device=plan.prompts.device)
        scores, real = scorer.start(plan.prompts, plan.prompts >= 0), plan.prompts >= 0
        past = _directions(scorer)
        while True:
            scores = scores.to(widened(scores.dtype))
            history = plan.history(rows, written) if plan.ruled else None
            allowed = plan.allowed(scores, history)
            best = largest(allowed, min(self.k, allowed.shape[-1]))
            check_finite(best.values[:, 0])
            k = best.indices.shape[1]
            scorer.select(torch.arange(len(rows), device=rows.device).repeat_interleave(k))
            after = scorer.extend(best.indices.reshape(-1, 1))[:, -1].unflatten(0, (-1, k))
            own = _directions(scorer).unflatten(0, (-1, k)).squeeze(2)
            log_probs = best.values - allowed.logsumexp(-1, keepdim=True)
            picked = _picked(log_probs, _likeness(own, past, real), self.alpha)
            tokens = best.indices.gather(1, picked).squeeze(1).masked_fill(best.values[:, 0] == -torch.inf, -1)
            choice = Choice(tokens, log_probs.gather(1, picked).squeeze(1))
            going = put(writer, plan, scores, rows, choice)
            if not going:
                return writer.generation()
            keep = torch.tensor(going, device=rows.device)
            picked = picked[keep].squeeze(1)
            scorer.select(keep * k + picked)
            rows, scores = rows[keep], after[keep, picked]
            written = torch.cat([written[keep], tokens[keep, None]], 1)
            past = torch.cat([past[keep], own[keep, picked][:, None]], 1)
            real = torch.cat([real[keep], torch.ones_like(real[keep, :1])], 1)


def _directions(scorer: Scorer) -> Float[Tensor, "n t D"]:
    """Hidden states of the last call, of length 1.

    Raises:
        ValueError: If the scorer keeps none.
    """
    hidden = scorer.hidden
    if hidden is None:
        name = type(scorer).__name__
        raise ValueError(f"This strategy needs hidden states, and {name} keeps none: pass `keep_hidden=True` to it.")
    return torch.nn.functional.normalize(hidden.to(widened(hidden.dtype)), dim=-1)


def _likeness(
    own: Float[Tensor, "n k D"], past: Float[Tensor, "n T D"], real: Bool[Tensor, "n T"]
) -> Float[Tensor, "n k"]:
    """The largest cosine of each candidate with a token before it; padding does not count."""
    return (own @ past.mT).masked_fill(~real[:, None], -torch.inf).amax(-1)


def _picked(log_probs: Float[Tensor, "n k"], likeness: Float[Tensor, "n k"], alpha: float) -> Tensor:
    """The place of the best candidate of each row; never one that is excluded."""
    worth = (1 - alpha) * log_probs.exp() - alpha * likeness.to(log_probs.dtype)
    return worth.masked_fill(~(log_probs > -torch.inf), -torch.inf).max(-1, keepdim=True).indices
