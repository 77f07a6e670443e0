"""Small random language models whose sequences can be counted out, for tests of strategies.

- `toy(vocabulary, seed, spread=2.0)` gives a function from tokens [n, t] to float64 scores [n, V] that depend on all
  tokens and their order.
- `leaves(function, prompt, limit, ends, allowed=None)` gives every sequence after a prompt with its log-probability:
  those that end with one of `ends`, and those of `limit` tokens. `allowed` maps scores [1, V] and the tokens written so
  far to scores; where it leaves nothing, a sequence ends.
- `chi_square(counts, probabilities)` gives the p-value of counts of drawn outcomes, a dictionary each, by the one test
  of the package, `testing._checks_decode.chi_square`, which test_sample.py holds to scipy and to D27.
- `way` runs the tests of a module twice, with what is compiled by numba and without: `pytest.mark.usefixtures("way")`.
- `plainly(run)` gives what a function gives without what is compiled.
- `choices(run)` gives the exact distribution of what `run` returns, when it writes one row by speculation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from unembed.decoding import _compiled
from unembed.testing._checks_decode import chi_square

_STATES = 997


@pytest.fixture(scope="module", params=["compiled", "plain"])
def way(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "compiled":
        pytest.importorskip("numba")
        yield request.param
        return
    with _plain():
        yield request.param


@pytest.fixture(scope="session")
def plainly() -> Callable[[Callable[[], Any]], Any]:
    def run(function: Callable[[], Any]) -> Any:
        with _plain():
            return function()

    return run


@contextmanager
def _plain() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compiled, "kernels", lambda: None)
        yield


@pytest.fixture(scope="session")
def toy() -> Callable[..., Any]:
    return _toy


@pytest.fixture(scope="session")
def leaves() -> Callable[..., Any]:
    return _leaves


@pytest.fixture(scope="session", name="chi_square")
def _given_chi_square() -> Callable[..., Any]:
    return _chi_square


def _toy(vocabulary: int, seed: int, spread: float = 2.0) -> Callable[[Tensor], Tensor]:
    table = spread * torch.randn(
        _STATES, vocabulary, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )

    def scores(tokens: Tensor) -> Tensor:
        state = torch.ones(len(tokens), dtype=torch.int64)
        for column in tokens.unbind(1):
            state = (31 * state + column + 1) % _STATES
        return table[state]

    return scores


def _leaves(
    function: Callable[[Tensor], Tensor],
    prompt: Sequence[int],
    limit: int,
    ends: Sequence[int] = (),
    allowed: Callable[[Tensor, list[int]], Tensor] | None = None,
) -> dict[tuple[int, ...], float]:
    found: dict[tuple[int, ...], float] = {}

    def go_on(written: list[int], log_prob: float) -> None:
        scores = function(torch.tensor([[*prompt, *written]]))
        scores = scores if allowed is None else allowed(scores, written)
        if not bool((scores > -torch.inf).any()):
            found[tuple(written)] = log_prob
            return
        for token, own in enumerate(scores[0].log_softmax(-1).tolist()):
            if own > -torch.inf:
                after = [*written, token]
                if token in ends or len(after) == limit:
                    found[tuple(after)] = log_prob + own
                else:
                    go_on(after, log_prob + own)

    go_on([], 0.0)
    return found


def _chi_square(counts: Mapping[Any, int], probabilities: Mapping[Any, float]) -> float:
    assert set(counts) <= {one for one, p in probabilities.items() if p > 0}, "something of probability 0 was drawn"
    seen = torch.tensor([counts.get(one, 0) for one in probabilities])
    return chi_square(seen, torch.tensor(list(probabilities.values()), dtype=torch.float64))


class Choices:
    """Takes every way in which the choices of a program can fall, one after the other, with its probability.

    Call it with `run`, which calls `choose`; it gives the exact distribution of what `run` returns.
    """

    def __call__(self, run: Callable[[], Any]) -> dict[Any, float]:
        found: dict[Any, float] = {}
        self._path: list[int] = []
        while True:
            self._at, self._probability, self._next = 0, 1.0, []
            outcome = run()
            found[outcome] = found.get(outcome, 0.0) + self._probability
            while self._next and self._next[-1] is None:
                self._next.pop()
            if not self._next:
                return found
            self._path = [*self._path[: len(self._next) - 1], self._next[-1]]

    def choose(self, weights: Sequence[float]) -> int:
        """One of the choices of positive weight."""
        possible = [one for one, weight in enumerate(weights) if weight > 0]
        if self._at == len(self._path):
            self._path.append(possible[0])
        chosen = self._path[self._at]
        later = possible[possible.index(chosen) + 1 :]
        self._next.append(later[0] if later else None)
        self._at += 1
        self._probability *= weights[chosen] / sum(weights)
        return chosen


@pytest.fixture
def choices(monkeypatch: pytest.MonkeyPatch) -> Choices:
    """`Choices` in the place of the numbers that speculative sampling draws with; what they mean it says itself.

    A draw sees the middle of the part of [0, 1) that is a token's, a verdict a number close to where it must change.
    """
    from unembed.decoding import _speculation

    found, close = Choices(), 1e-9
    draw, verify = _speculation._drawn, _speculation.verified

    def drawn(weights: Tensor, uniform: Tensor) -> Tensor:
        ends = (weights[0] / weights.sum()).cumsum(0)
        chosen = found.choose(weights[0].tolist())
        return draw(weights, (ends[chosen] - weights[0, chosen] / weights.sum() / 2)[None].to(uniform))

    def verified(p: Tensor, q: Tensor, drafts: Tensor, accept: Tensor, redraw: Tensor) -> tuple[Tensor, Tensor]:
        kept = min(1.0, float(p[0, drafts[0]] / q[0, drafts[0]]))
        number = kept - close if found.choose([1.0 - kept, kept]) else kept + close
        return verify(p, q, drafts, torch.full_like(accept, max(number, 0.0)), redraw)

    monkeypatch.setattr(_speculation, "_drawn", drawn)
    monkeypatch.setattr(_speculation, "verified", verified)
    return found
