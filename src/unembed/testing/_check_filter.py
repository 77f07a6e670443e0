"""The public conformance suite for decoding filters: laws that anybody's filter must hold.

Shapes: B rows, V vocabulary, T tokens so far.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float
from torch import Tensor

from unembed.decoding import Filter, History
from unembed.decoding._drawing import at_rows
from unembed.testing._case import FailedError, NotApplicableError, brief
from unembed.testing._registry import Outcome

ROWS, TOKENS = 6, 9
_STREAM = 0xF117E5


class FilterError(AssertionError):
    """A filter failed checks; `outcomes` holds those of all checks."""

    def __init__(self, given: Filter, outcomes: list[Outcome]) -> None:
        self.outcomes = outcomes
        failed = [one for one in outcomes if one.status == "failed"]
        lines = [f"{type(given).__name__} failed {len(failed)} of {len(outcomes)} checks."]
        for one in failed:
            lines += [f"  {one.name}: {one.message}", f"    ({one.meaning})"]
        super().__init__("\n".join(lines))


@dataclass(frozen=True)
class _Trial:
    """A filter and what it is tried on: ties, excluded scores, one score alone, and in the last row none."""

    given: Filter
    scores: Float[Tensor, "B V"]
    history: History

    def __call__(self, scores: Tensor | None = None) -> Tensor:
        """Filtered scores, of a copy: a filter that writes to its input must not spoil the other laws."""
        return self.given(self.scores.clone() if scores is None else scores, self.history)

    def at(self, rows: Tensor) -> _Trial:
        """The trial of some rows alone."""
        history = self.history
        parts = {name: getattr(history, name)[rows] for name in ("tokens", "written", "coin", "rows")}
        return _Trial(at_rows(self.given, rows), self.scores[rows], History(**parts))


def check_filter(
    given: Filter,
    *,
    classes: int = 40,
    skip: Collection[str] | Mapping[str, str] = (),
    seed: int = 0,
    raises: bool = True,
) -> list[Outcome]:
    """Run a filter through laws that every filter must hold; a fraction of a second.

    It is tried on 6 rows of 40 classes, with tokens so far, so parameters that differ by row need 6 numbers and ids lie
    below 40; a filter with another way for wide rows is tried on more classes too. Random filters must take the
    history's `coin`. A filter that cannot hold a law says so by `skip`: the classical repetition penalty depends on a
    constant added to all scores (`offset`); a constraint on ids may leave nothing (`one_kept`).

    Args:
        given: The filter.
        classes: Of each row, from 8 on.
        skip: Names of laws to leave out, or a dictionary from name to reason. `FILTER_CHECKS` lists them.
        seed: Of the scores and tokens.
        raises: Whether to raise when a law does not hold; the outcomes are returned otherwise.

    Returns:
        The outcome of each check, in order.

    Raises:
        FilterError: An AssertionError that lists all failures.
        ValueError: If a name in `skip` is no check.
    """
    if isinstance(skip, str) or set(skip) - set(FILTER_CHECKS):
        raise ValueError(f"`skip` must be a collection of {', '.join(FILTER_CHECKS)}, got {skip!r:.80}.")
    if classes < 8:
        raise ValueError(f"`classes` must be at least 8, got {classes}.")
    reasons = dict(skip) if isinstance(skip, Mapping) else dict.fromkeys(skip, "skipped by the caller")
    outcomes = []
    with torch.random.fork_rng(devices=[]):
        for name, function in FILTER_CHECKS.items():
            meaning = (function.__doc__ or "").strip()
            if name in reasons:
                outcomes.append(Outcome(name, meaning, "not applicable", reasons[name]))
            else:
                outcomes.append(_run(name, meaning, function, _trial(given, classes, seed)))
    if raises and any(one.status == "failed" for one in outcomes):
        raise FilterError(given, outcomes)
    return outcomes


def _run(name: str, meaning: str, function: Callable[[_Trial], None], trial: _Trial) -> Outcome:
    try:
        function(trial)
    except NotApplicableError as reason:
        return Outcome(name, meaning, "not applicable", str(reason))
    except FailedError as failure:
        return Outcome(name, meaning, "failed", str(failure))
    except Exception as error:
        # A filter may raise anything, and the other laws are still worth trying.
        return Outcome(name, meaning, "failed", f"raised {type(error).__name__}: {brief(error)}")
    return Outcome(name, meaning, "passed")


def _trial(given: Filter, classes: int, seed: int) -> _Trial:
    """Scores in steps of 1/16 below 8, exact in every dtype and after an offset, and with ties."""
    random = torch.Generator().manual_seed(_STREAM + seed)
    scores = torch.randint(-128, 128, (ROWS, classes), generator=random).float() / 16
    scores[1, ::3] = -torch.inf
    scores[2] = 0.5
    scores[3] = -torch.inf
    scores[3, 7] = -2.0
    scores[-1] = -torch.inf
    tokens = torch.randint(0, 5, (ROWS, TOKENS), generator=random)  # few ids, so that they repeat
    padding = torch.arange(TOKENS) < torch.arange(ROWS)[:, None]
    written = torch.tensor([6, 3, 0, 4, 2, 1])
    coin = torch.rand(ROWS, dtype=torch.float64, generator=random)
    return _Trial(given, scores, History(tokens.masked_fill(padding, -1), written, coin, torch.arange(ROWS)))


def _expect(holds: bool, message: str) -> None:
    if not holds:
        raise FailedError(message)


def _same(found: Tensor, wanted: Tensor, what: str, tolerance: float = 1e-6) -> None:
    near = torch.isclose(found.double(), wanted.double(), rtol=tolerance, atol=tolerance)
    if not bool(near.all()):
        row = int((~near).any(-1).flatten().nonzero()[0])
        raise FailedError(f"{what}, first in row {row}")


def _shape(trial: _Trial) -> None:
    """Scores come out in the shape they came in: [V], [B, V] and [2, 3, V]."""
    whole, width = trial(), trial.scores.shape[1]
    _expect(whole.shape == trial.scores.shape, f"expected {tuple(trial.scores.shape)}, got {tuple(whole.shape)}")
    cubed = trial(trial.scores.reshape(2, 3, -1))
    _expect(tuple(cubed.shape) == (2, 3, width), f"expected (2, 3, {width}), got {tuple(cubed.shape)}")
    _same(cubed.flatten(0, 1), whole, "[2, 3, V] gives other scores than [6, V]")
    alone = trial.at(torch.tensor([0]))
    line = alone(alone.scores[0])
    _expect(tuple(line.shape) == (width,), f"expected ({width},), got {tuple(line.shape)}")
    _same(line[None], whole[:1], "[V] gives other scores than its row of [B, V]")


def _dtype(trial: _Trial) -> None:
    """Half precision comes out as float32, float32 and float64 as they are."""
    for dtype in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        found, wanted = trial(trial.scores.to(dtype)).dtype, torch.promote_types(dtype, torch.float32)
        _expect(found == wanted, f"expected {wanted} for {dtype}, got {found}")


def _pure(trial: _Trial) -> None:
    """The input is not written to, and the same input gives the same scores."""
    given, tokens = trial.scores.clone(), trial.history.tokens.clone()
    first = trial(given).clone()  # which may be what was given
    _expect(torch.equal(given, trial.scores), "the scores that were given have changed")
    _expect(torch.equal(trial.history.tokens, tokens), "the history that was given has changed")
    torch.manual_seed(1)  # another state of PyTorch's generator: what is random must take the coin
    _same(trial(given), first, "a second call gives other scores")


def _excluded(trial: _Trial) -> None:
    """A score of `-inf` stays `-inf`, and no score becomes NaN or `+inf`."""
    found = trial()
    _expect(not bool(found.isnan().any()), "a score is NaN")
    _expect(not bool((found == torch.inf).any()), "a score is +inf")
    _expect(bool((found[trial.scores == -torch.inf] == -torch.inf).all()), "a score of -inf came back")


def _one_kept(trial: _Trial) -> None:
    """A row with a score keeps at least one."""
    left = (trial() > -torch.inf).any(-1) | ~(trial.scores > -torch.inf).any(-1)
    _expect(bool(left.all()), f"nothing is left of row {int((~left).float().argmax())}")


def _rows(trial: _Trial) -> None:
    """A row's scores depend on this row alone: not on the others, nor on its place among them."""
    whole, order = trial(), torch.tensor([4, 2, 0, 5, 3, 1])
    _same(trial.at(order)(), whole[order], "rows in another order give other scores")
    for row in range(ROWS):
        _same(trial.at(torch.tensor([row]))(), whole[row : row + 1], f"row {row} alone gives other scores")


def _empty(trial: _Trial) -> None:
    """No rows give no rows."""
    none = trial.at(torch.zeros(0, dtype=torch.int64))
    found, width = none(), trial.scores.shape[1]
    _expect(tuple(found.shape) == (0, width), f"expected (0, {width}), got {tuple(found.shape)}")


def _strided(trial: _Trial) -> None:
    """Where scores lie in memory does not matter."""
    whole = trial()
    _same(trial(trial.scores.t().contiguous().t()), whole, "column by column, scores come out otherwise")
    wide = torch.stack([trial.scores, trial.scores + 1], -1)
    _same(trial(wide[..., 0]), whole, "every second number, scores come out otherwise")


def _offset(trial: _Trial) -> None:
    """A constant added to the scores of a row changes no probability."""
    scores = trial.scores.double()
    before = torch.softmax(trial(scores), -1)
    some = ~before.isnan().any(-1)  # a row without any score has no distribution
    for amount in (-37.0, 1024.0):
        after = torch.softmax(trial(scores + amount), -1)
        _same(after[some], before[some], f"{amount:g} added to every score changes probabilities", 1e-9)


def _gradient(trial: _Trial) -> None:
    """Gradients are finite, and 0 where a score is excluded."""
    scores = trial.scores.double().requires_grad_()
    found = trial(scores)
    kept = found > -torch.inf
    if not found.requires_grad:
        raise NotApplicableError("the filter does not pass gradients")
    (slope,) = torch.autograd.grad(torch.where(kept, found, 0.0).square().sum(), scores)
    _expect(bool(slope.isfinite().all()), "a gradient is not finite")
    _expect(bool((slope[trial.scores == -torch.inf] == 0).all()), "an excluded score has a gradient")


def _padding(trial: _Trial) -> None:
    """Padding in front of the tokens so far changes nothing."""
    history = trial.history
    padded = torch.cat([torch.full((ROWS, 3), -1), history.tokens], 1)
    _same(replace(trial, history=replace(history, tokens=padded))(), trial(), "three more in front change scores")


FILTER_CHECKS: dict[str, Callable[[_Trial], None]] = {
    "shape": _shape,
    "dtype": _dtype,
    "pure": _pure,
    "excluded": _excluded,
    "one_kept": _one_kept,
    "rows": _rows,
    "empty": _empty,
    "strided": _strided,
    "offset": _offset,
    "gradient": _gradient,
    "padding": _padding,
}
