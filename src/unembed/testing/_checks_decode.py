"""Checks of what decoding needs: exact `topk` and exact `sample`."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor

from unembed.testing._case import Case, FailedError, NotApplicableError, close, expect, log_prob
from unembed.testing._checks_scores import needs_bias, without
from unembed.testing._registry import check

SIGNIFICANCE = 1e-4
_DRAWS, _STATES = 40_000, 2
_FEWEST = 5.0  # classes expected less often than this are counted as one


def chi_square(counts: Tensor, probabilities: Tensor) -> float:
    """Chance that draws from `probabilities` [V] stray as far as `counts` [V] do (Pearson's chi-square).

    Rare classes count as one, with the rarest of the others where they are too rare even so. It is 0 where a class of
    probability 0 was drawn.
    """
    if bool((counts[probabilities == 0] > 0).any()):
        return 0.0
    expected = probabilities.double() / probabilities.double().sum() * counts.sum()
    rare = expected < _FEWEST
    if not rare.all() and 0 < expected[rare].sum() < _FEWEST:
        rare[expected.masked_fill(rare, torch.inf).argmin()] = True
    cells = [(expected[~rare], counts[~rare])]
    if rare.any():
        cells.append((expected[rare].sum()[None], counts[rare].sum()[None]))
    want, got = (torch.cat(parts).double() for parts in zip(*cells, strict=True))
    want, got = want[want > 0], got[want > 0]
    statistic = ((got - want).square() / want).sum()
    freedom = torch.tensor(max(len(want) - 1, 1), dtype=torch.float64, device=want.device)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


@check("topk", after=("law",))
def topk(case: Case) -> None:
    """`topk(hidden, k)` gives the k largest log-probabilities in falling order and their tokens, for k = 1 to V.

    Hidden states are small, as drawn, and large: where a head is sure it may leave most scores out.
    """
    case.has("topk")
    head, given = case.head(), case.hidden()
    for hidden in (given, given / 8, given * 4):
        truth = log_prob(head, hidden)
        for k in sorted({1, min(3, case.classes), case.classes}):
            _is_topk(head, hidden, truth, k)
    for k in (0, case.classes + 1):
        try:
            head.topk(given.clone(), k)
        except ValueError:
            continue
        raise FailedError(f"k={k}: expected a ValueError, got an answer")


def _is_topk(head: Any, hidden: Tensor, truth: Tensor, k: int) -> None:
    """Fail unless `topk` gives what log-probabilities have."""
    values, indices = head.topk(hidden.clone(), k)
    # Ties may come in any order, so values are compared and each index by the value it points at.
    close(values, truth.topk(k, dim=-1).values, 1e-5, f"values of topk, k={k}")
    expect(tuple(indices.shape) == tuple(values.shape), f"k={k}: indices have shape {tuple(indices.shape)}")
    expect(not indices.is_floating_point(), f"k={k}: indices are {indices.dtype}")
    close(truth.gather(-1, indices), values, 1e-5, f"log_prob at the indices of topk, k={k}")
    ordered = indices.sort(-1).values
    expect(bool((ordered[..., 1:] != ordered[..., :-1]).all()), f"k={k}: a token comes twice")


@check("sample", after=("law", "shapes"))
def sample(case: Case) -> None:
    """Draws of `sample` follow the enumerated distribution: chi-square of 40,000 draws at 1e-4, for two states."""
    case.has("sample")
    head = case.head()
    for _ in range(_STATES):
        hidden = case.hidden((1,))
        _follows(case, head, hidden)


def _follows(case: Case, head: Any, hidden: Tensor, **options: Any) -> None:
    """Fail unless draws of one hidden state follow its distribution."""
    many = hidden.repeat(_DRAWS, *[1] * (hidden.ndim - 1))
    options = options or {"generator": torch.Generator(case.device).manual_seed(1)}
    with torch.no_grad():
        drawn = head.sample(many, **options)
        truth = log_prob(copy.deepcopy(head).double(), hidden.double()).exp().reshape(-1)
    expect(drawn.numel() == _DRAWS, f"expected {_DRAWS} draws, got {drawn.numel()}")
    inside = (drawn >= 0) & (drawn < case.classes)
    expect(bool(inside.all()), f"expected classes in [0, {case.classes}), drew {drawn.min()} to {drawn.max()}")
    counts = torch.bincount(drawn.flatten(), minlength=case.classes)
    never = (truth == 0) & (counts > 0)
    expect(not bool(never.any()), f"drew classes {never.nonzero().flatten().tolist()} of probability 0")
    chance = chi_square(counts, truth)
    worst = int((counts / _DRAWS - truth).abs().argmax())
    expect(
        chance >= SIGNIFICANCE / _STATES,
        f"draws do not follow the distribution: chi-square p = {chance:.1e}; "
        f"class {worst} has probability {truth[worst]:.4f} and came {counts[worst] / _DRAWS:.4f} of the time",
    )


@check("sample_zero", after=("law", "shapes", "sample", "impossible_class"))
def sample_zero(case: Case) -> None:
    """A class of probability 0 is never drawn, and the others as often as they should be."""
    case.has("sample")
    needs_bias(case)
    _follows(case, without(case, torch.float32, (0, case.classes - 1)), case.hidden((1,)))


@check("sample_seeded", after=("law", "shapes"))
def sample_seeded(case: Case) -> None:
    """The same generator gives the same draws, another state of it others; shapes are those of the tokens."""
    case.has("sample")
    head, hidden = case.head(), case.hidden()
    wide = case.hidden((200,))
    first = torch.Generator(case.device).manual_seed(7)
    one, later = head.sample(wide, generator=first), head.sample(wide, generator=first)
    again = head.sample(wide, generator=torch.Generator(case.device).manual_seed(7))
    expect(torch.equal(one, again), "two generators with the same seed give different draws")
    expect(case.classes == 1 or not torch.equal(one, later), "a generator gives the same draws twice running")
    for tokens in (hidden, hidden[:0]):
        shape = tuple(head.sample(tokens).shape)
        expect(shape == tuple(log_prob(head, tokens).shape[:-1]), f"draws have shape {shape}")


@check("sample_seeds", after=("law", "shapes", "sample"))
def sample_seeds(case: Case) -> None:
    """With `seeds=` a draw is a function of seed, position and hidden state, the same in any batch, and exact."""
    case.has("sample")
    head, hidden = case.head(), case.hidden((60,))
    if "seeds" not in inspect.signature(head.sample).parameters:
        raise NotApplicableError("`sample` takes no `seeds`")
    seeds = torch.arange(60) * 7 - 100
    drawn = head.sample(hidden, seeds=seeds)
    expect(torch.equal(drawn, head.sample(hidden, seeds=seeds)), "the same seeds give different draws")
    for name, rows in (("alone", slice(9, 10)), ("in a smaller batch", slice(20, 43)), ("in reverse", slice(None))):
        which = torch.arange(60)[rows].flip(0)
        part = head.sample(hidden[which], seeds=seeds[which])
        expect(torch.equal(part, drawn[which]), f"a token drawn {name} is another than with all others")
    later = head.sample(hidden, seeds=seeds, positions=[1] * 60)
    expect(case.classes == 1 or not torch.equal(later, drawn), "another position gives the same draws")
    one, many = case.hidden((1,)), torch.arange(_DRAWS)
    for options in ({"seeds": many}, {"seeds": [5] * _DRAWS, "positions": many}):
        _follows(case, head, one, **options)
    for options in ({"seeds": [1]}, {"positions": many[:60]}, {"seeds": many[:60], "generator": torch.Generator()}):
        try:
            head.sample(hidden, **options)
        except ValueError:
            continue
        raise FailedError(f"sample({', '.join(options)}) that do not fit: expected a ValueError, got draws")
