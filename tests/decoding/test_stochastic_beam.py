"""Stochastic beam search against enumeration of draws without replacement."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import mpmath
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from unembed.decoding import FunctionScorer, Generation, History, NoRepeatNgram, StochasticBeam, TopK, generate
from unembed.decoding._plan import Plan
from unembed.decoding._stochastic_beam import conditioned
from unembed.decoding.filters import Chain


def drawn(function: Any, width: int, prompts: Sequence[Sequence[int]], limit: int, **options: Any) -> Generation:
    longest = max(map(len, prompts))
    padded = torch.tensor([[-1] * (longest - len(one)) + list(one) for one in prompts])
    if "filters" in options:
        options["filters"] = Chain(tuple(options["filters"]))
    plan = Plan(padded, torch.full((len(prompts),), limit), **options)
    return StochasticBeam(width).run(FunctionScorer(function), plan)


def rows(found: Generation, row: int) -> list[tuple[int, ...]]:
    lengths = found.lengths[row][: len(found.finish[row])].tolist()
    return [tuple(found.tokens[row, r, :length].tolist()) for r, length in enumerate(lengths)]


def without_replacement(leaves: dict[tuple[int, ...], float], count: int) -> dict[tuple[tuple[int, ...], ...], float]:
    """The probability of each ordered sample."""
    found = {}
    for sample in itertools.permutations(leaves, min(count, len(leaves))):
        probability, left = 1.0, 1.0
        for one in sample:
            own = math.exp(leaves[one])
            probability, left = probability * own / left, left - own
        found[sample] = probability
    return found


@pytest.mark.parametrize(
    ("noise", "draws"),
    [
        ("seeds", 30_000),
        pytest.param("seeds", 100_000, marks=pytest.mark.slow),
        pytest.param("generator", 100_000, marks=pytest.mark.slow),
    ],
)
def test_ordered_samples_have_the_probabilities_of_draws_without_replacement(toy, leaves, chi_square, noise, draws):
    function = toy(3, 11, 1.0)
    options: dict[str, Any] = {"eos_ids": (0,)}
    if noise == "seeds":
        options["seeds"] = np.arange(draws, dtype=np.uint64)
    else:
        options["generator"] = torch.Generator().manual_seed(5)
    found = drawn(function, 2, [[1]] * draws, 2, **options)
    counts = Counter(zip(*(map(tuple, _keys(found, rank)) for rank in range(2)), strict=True))
    every = {_key(one): log_prob for one, log_prob in leaves(function, [1], 2, (0,)).items()}
    wanted = without_replacement(every, 2)
    assert chi_square(counts, wanted) > 1e-4
    inclusion = Counter(one for pair in counts.elements() for one in pair)
    for one in every:
        p = sum(chance for pair, chance in wanted.items() if one in pair)
        assert abs(inclusion[one] - draws * p) < 4.5 * math.sqrt(draws * p * (1 - p))
    # The first is an exact draw. The largest of log p + Gumbel is Gumbel, whichever sequence has it.
    first = Counter(pair[0] for pair in counts.elements())
    assert chi_square(first, {one: math.exp(log_prob) for one, log_prob in every.items()}) > 1e-4
    assert stats.kstest(found.extra["perturbed_log_probs"][:, 0].numpy(), "gumbel_r").pvalue > 1e-4


def _key(one: tuple[int, ...]) -> tuple[int, ...]:
    """Two tokens, -1 after the end."""
    return (*one, -1)[:2]


def _keys(found: Generation, rank: int) -> list[list[int]]:
    place = torch.arange(found.tokens.shape[-1])
    return found.tokens[:, rank].masked_fill(place >= found.lengths[:, rank, None], -1).tolist()


def test_importance_weights_from_the_perturbed_log_probabilities_are_unbiased(toy, leaves):
    """With the smallest G as threshold, `sum p / q` over the others estimates the number 1, and each f without bias."""
    function, count = toy(3, 8, 1.0), 3_000
    found = drawn(function, 4, [[1]] * count, 3, seeds=np.arange(count, dtype=np.uint64), eos_ids=(0,))
    perturbed, log_p = found.extra["perturbed_log_probs"], found.scores
    inclusion = -torch.expm1(-(log_p[:, :-1] - perturbed[:, -1:]).exp())
    weights = log_p[:, :-1].exp() / inclusion
    lengths = found.lengths[:, :-1].double()
    for values, wanted in (
        (torch.ones_like(weights), 1.0),
        (lengths, sum(len(one) * math.exp(own) for one, own in leaves(function, [1], 3, (0,)).items())),
    ):
        estimate = (weights * values).sum(1)
        assert abs(float(estimate.mean()) - wanted) < 4.5 * float(estimate.std()) / math.sqrt(count)


@settings(deadline=None, max_examples=30)
@given(
    vocabulary=st.integers(2, 5),
    limit=st.integers(1, 4),
    ends=st.sets(st.integers(0, 4), max_size=2),
    widths=st.tuples(st.integers(1, 4), st.integers(1, 12)),
    seed=st.integers(0, 10**6),
)
def test_a_wider_search_begins_with_the_narrower_one_and_neighbours_do_not_matter(
    *, toy, leaves, vocabulary, limit, ends, widths, seed
):
    function, ends = toy(vocabulary, seed), tuple(one for one in ends if one < vocabulary)
    narrow, wide = min(widths), max(widths)
    seeds = np.array([seed, 7, 9], dtype=np.uint64)
    options: dict[str, Any] = {"eos_ids": ends}
    together = drawn(function, wide, [[1, 0], [0], [1]], limit, seeds=seeds, **options)
    alone = drawn(function, narrow, [[0]], limit, seeds=seeds[1:2], **options)
    every = leaves(function, [0], limit, ends)
    assert rows(together, 1)[:narrow] == rows(alone, 0)
    assert len(rows(together, 1)) == len(set(rows(together, 1))) == min(wide, len(every))
    perturbed = together.extra["perturbed_log_probs"][1][: len(rows(together, 1))].tolist()
    assert perturbed == sorted(perturbed, reverse=True)
    for one, score in zip(rows(together, 1), together.scores[1].tolist(), strict=False):
        assert score == pytest.approx(every[one], abs=1e-9)


def test_filters_mask_and_dead_ends_are_those_of_the_distribution(toy, leaves, chi_square):
    """No token twice, and nothing after a 3: a sequence that cannot go on is one of the sequences."""
    function, count = toy(4, 2, 1.0), 3_000

    def blocked(history: History) -> Tensor:
        return (history.tokens[:, -1:] != 3).expand(-1, 4)

    def allowed(scores: Tensor, written: list[int]) -> Tensor:
        if written and written[-1] == 3:
            return torch.full_like(scores, -torch.inf)
        return scores.index_fill(1, torch.tensor(written, dtype=torch.int64), -torch.inf)

    found = drawn(
        function,
        2,
        [[1]] * count,
        3,
        seeds=np.arange(count, dtype=np.uint64),
        filters=[NoRepeatNgram(1, scope="written"), TopK(4)],
        mask=blocked,
    )
    every = leaves(function, [1], 3, (), allowed)
    counts = Counter(tuple(rows(found, row)) for row in range(count))
    assert chi_square(counts, without_replacement(every, 2)) > 1e-4
    ends = {finish for row in range(count) for finish in found.finish[row]}
    assert ends == {"length", "dead end"}
    for row in range(50):
        for one, finish in zip(rows(found, row), found.finish[row], strict=True):
            assert (finish == "dead end") == (len(one) < 3)


@given(
    noisy=st.lists(st.floats(-50, 50), min_size=1, max_size=8, unique=True),
    largest=st.floats(-50, 50),
)
def test_the_conditional_maximum_is_its_definition_and_keeps_the_order(noisy, largest):
    g = torch.tensor([sorted(noisy, reverse=True)], dtype=torch.float64)
    found = conditioned(g, torch.tensor([largest], dtype=torch.float64))
    assert float(found[0, 0]) == largest
    assert bool((found.diff() <= 0).all())
    with mpmath.workdps(80):
        for own, got in zip(g[0].tolist(), found[0].tolist(), strict=True):
            exact = -mpmath.log(
                mpmath.exp(-mpmath.mpf(largest))
                - mpmath.exp(-mpmath.mpf(g[0, 0].item()))
                + mpmath.exp(-mpmath.mpf(own))
            )
            assert got == pytest.approx(float(exact), abs=1e-9)


@torch.no_grad()
def test_with_a_cache_it_draws_what_it_draws_without():
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=30, **sizes, initializer_range=0.5)).double().eval()
    options: dict[str, Any] = {
        "max_new_tokens": 8,
        "eos_ids": [4, 7],
        "seeds": [5, 6, 7],
        "strategy": StochasticBeam(4),
    }
    prompts = [[3, 4, 5], [9], [1, 2]]
    found = generate(model, prompts, **options)
    again = generate(lambda tokens: model(tokens).logits, prompts, **options, pad_id=4)
    assert [rows(found, row) for row in range(3)] == [rows(again, row) for row in range(3)]
    torch.testing.assert_close(found.extra["perturbed_log_probs"], again.extra["perturbed_log_probs"])
    assert len({len(one) for row in range(3) for one in rows(found, row)}) > 1


def test_options_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match="`width` must be a whole number of at least 1, got 0"):
        StochasticBeam(0)
