"""Self-speculation with the offsets of a head: drafts are the head's, what is written is the model's."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from unembed.decoding import CachedScorer, FunctionScorer, Generation, RepetitionPenalty, Temperature, TopK
from unembed.decoding._multi_token import SelfSpeculative, _Offsets
from unembed.decoding._plan import Plan
from unembed.decoding._reader import Reader
from unembed.decoding._speculation import Row
from unembed.decoding._steps import Greedy
from unembed.decoding.filters import Chain
from unembed.heads import MultiTokenPrediction

EXAMPLES = (0, 1, 2)
D, V = 4, 3


def made(example: int, seed: int = 0) -> MultiTokenPrediction:
    torch.manual_seed(seed)
    head = MultiTokenPrediction.examples(D, V)[example].double()
    with torch.no_grad():
        head.weight.mul_(4)
    return head.requires_grad_(False)


def model_of(head: MultiTokenPrediction, toy: Callable[..., Any], seed: int = 0) -> Callable[[Tensor], Any]:
    """A body of random hidden states that depend on all tokens so far, under the head."""
    body = toy(D, seed, 1.0)

    def model(tokens: Tensor) -> tuple[Tensor, Tensor]:
        hidden = torch.stack([body(tokens[:, : t + 1]) for t in range(tokens.shape[1])], 1)
        return head(hidden), hidden

    return model


def plan_of(prompts: Sequence[Sequence[int]], limit: int, **options: Any) -> Plan:
    width = max(map(len, prompts))
    padded = torch.tensor([[-1] * (width - len(one)) + list(one) for one in prompts])
    options["filters"] = Chain(tuple(options.get("filters", ())))
    return Plan(padded, torch.full((len(prompts),), limit), **options)


def rows(found: Generation) -> list[tuple[int, ...]]:
    return [
        tuple(row[0, :length].tolist()) for row, length in zip(found.tokens, found.lengths[:, 0].tolist(), strict=True)
    ]


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("read", [0, 2])
def test_drafts_are_drawn_from_the_offsets_of_the_head(toy, example, read):
    """q of each draft is the head's own probability of it, by `nll` with all tokens known."""
    head, prompt = made(example), [2, 0, 1, 1]
    model, plan = model_of(head, toy), plan_of([prompt], 9, seeds=np.array([3], dtype=np.uint64))
    target, row = Reader(FunctionScorer(model, keep_hidden=True), torch.device("cpu"), memory=None), Row(plan, 0)
    target.start(row.prompt)
    written = [1, 2, 0][: read + 1] if read else []
    if read:
        target.after(written[:-1], 1)
    drafter = _Offsets(head, plan)
    drafter.start(row, target)
    drafts = drafter.drafts(written, 9)
    unread = 1 if read else 0
    assert len(drafts) == head.n - unread
    tokens = torch.tensor([[*prompt, *written, *(one.token for one in drafts)]])
    _, hidden = model(tokens)
    known = hidden[:, : len(prompt) + read]
    targets = head.targets_of(tokens)[:, : known.shape[1]]
    nll = head.nll(known, targets)[0, -1]
    for place, one in enumerate(drafts):
        assert float(one.q[0, one.token]) == pytest.approx(math.exp(-float(nll[unread + place])), abs=1e-9)
        assert float(one.q.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("example", EXAMPLES)
def test_over_all_noise_sequences_have_the_distribution_of_the_model(toy, leaves, choices, example):
    head = made(example)
    model, options = model_of(head, toy), {"eos_ids": (0,), "filters": [RepetitionPenalty(1.5), TopK(2)]}

    def ruled(scores: Tensor, written: list[int]) -> Tensor:
        return TopK(2)(RepetitionPenalty(1.5)(scores, torch.tensor([[1, 2, *written]])))

    wanted = leaves(lambda tokens: model(tokens)[0][:, -1], [1, 2], 4, (0,), ruled)
    accepted = []

    def run() -> tuple[int, ...]:
        plan = plan_of([[1, 2]], 4, **options)
        found = SelfSpeculative(head).run(FunctionScorer(model, keep_hidden=True), plan)
        accepted.append(int(found.extra["accepted"]))
        return rows(found)[0]

    found = choices(run)
    assert found == pytest.approx({one: math.exp(log_p) for one, log_p in wanted.items()}, abs=1e-12)
    assert max(accepted) >= 2


@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES)
def test_sequences_are_drawn_from_the_distribution_of_the_model(toy, leaves, chi_square, example):
    head, draws = made(example), 20_000
    model, plan = model_of(head, toy), plan_of([[1]] * draws, 3, seeds=np.arange(draws, dtype=np.uint64))
    found = SelfSpeculative(head).run(FunctionScorer(model, keep_hidden=True), plan)
    every = leaves(lambda tokens: model(tokens)[0][:, -1], [1], 3)
    assert chi_square(Counter(rows(found)), {one: math.exp(log_p) for one, log_p in every.items()}) > 1e-4


@pytest.mark.parametrize("lookahead", [None, 1])
@pytest.mark.parametrize("example", EXAMPLES)
def test_d23_at_temperature_0_it_is_greedy_decoding(toy, example, lookahead):
    for seed in range(6):
        head = made(example, seed)
        model, options = model_of(head, toy, seed), {"filters": [Temperature(0)], "eos_ids": (0,) if seed < 3 else ()}
        plan = plan_of([[1, 2], [0]], 9, **options)
        found = SelfSpeculative(head, lookahead).run(FunctionScorer(model, keep_hidden=True), plan)
        greedy = Greedy().run(FunctionScorer(model), plan)
        assert rows(found) == rows(greedy)
        torch.testing.assert_close(found.log_probs, greedy.log_probs)
        if not options["eos_ids"]:
            # Drafts at most: a call of the model writes no more than those and one.
            most = 1 + (lookahead or head.n)
            assert bool((found.extra["target_calls"] >= 9 / most).all())


@torch.no_grad()
@pytest.mark.parametrize("mode", ["parallel", "sequential"])
def test_with_a_cache_and_a_head_that_starts_as_the_models(mode):
    """Parallel offsets start as the head of the next token, so a model that repeats itself keeps all drafts."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=20, **sizes, initializer_range=0.3, eos_token_id=None)
    model = LlamaForCausalLM(config).double().eval()
    head = MultiTokenPrediction.from_linear(model.lm_head, n=4, mode=mode)
    plan = plan_of([[3, 4, 5], [7]], 20, filters=[Temperature(0)])
    found = SelfSpeculative(head).run(CachedScorer(model, rewindable=True, keep_hidden=True), plan)
    greedy = Greedy().run(CachedScorer(model), plan)
    assert rows(found) == rows(greedy)
    torch.testing.assert_close(found.log_probs, greedy.log_probs)
    assert int(found.extra["tested"].min()) > 0
    if mode == "parallel":
        repeats = [sum(a == b for a, b in itertools.pairwise(one)) for one in rows(found)]
        assert max(repeats) > 0
        assert int(found.extra["accepted"].max()) > 0


def test_what_does_not_fit_is_refused(toy):
    head = made(0)
    with pytest.raises(ValueError, match="`head` must be a MultiTokenPrediction, got Linear"):
        SelfSpeculative(torch.nn.Linear(2, 3))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"`lookahead` must lie in \[1, 3\], got 4"):
        SelfSpeculative(head, 4)
    with pytest.raises(ValueError, match="hidden states, which the model does not give"):
        SelfSpeculative(head).run(FunctionScorer(toy(V, 0)), plan_of([[1]], 3))
    wide = MultiTokenPrediction(5, V, n=2).double()
    with pytest.raises(ValueError, match=r"`head` has sizes \(5, 3\), but the model's .* are \(4, 3\)"):
        SelfSpeculative(wide).run(FunctionScorer(model_of(head, toy), keep_hidden=True), plan_of([[1]], 3))
