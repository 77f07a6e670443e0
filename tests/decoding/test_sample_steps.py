"""Sampling token by token: enumerated distributions, seeds that no neighbour moves, and settings of each row."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.decoding import (
    XTC,
    BannedIds,
    FrequencyPenalty,
    Greedy,
    MinP,
    RepetitionPenalty,
    Sample,
    Temperature,
    TopK,
    TopP,
    generate,
)
from unembed.ops._seeds import Stream, uniforms

V, ROWS = 5, 100_000


@pytest.fixture(scope="module")
def function(toy):
    return toy(V, 0, 1.5)


def _counted(found):
    """How often each sequence was written."""
    place = torch.arange(found.tokens.shape[-1])
    padded = found.tokens[:, 0].masked_fill(place >= found.lengths, -1)
    sequences, counts = padded.unique(dim=0, return_counts=True)
    return {
        tuple(token for token in sequence if token >= 0): count
        for sequence, count in zip(sequences.tolist(), counts.tolist(), strict=True)
    }


LIMITS = Temperature(1.3) | TopK(4) | TopP(0.93) | MinP(0.05)


@pytest.mark.parametrize(
    ("options", "rule"),
    [
        (
            {
                "filters": RepetitionPenalty(1.5) | BannedIds([3]),
                "temperature": 1.3,
                "top_k": 4,
                "top_p": 0.93,
                "min_p": 0.05,
            },
            RepetitionPenalty(1.5) | BannedIds([3]) | LIMITS,
        ),
        pytest.param({}, Temperature(1.0), marks=pytest.mark.slow),
        pytest.param({"temperature": 1.3, "top_p": 0.93}, Temperature(1.3) | TopP(0.93), marks=pytest.mark.slow),
        pytest.param({"filters": FrequencyPenalty(2.0, scope="all")}, FrequencyPenalty(2.0), marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("noise", ["seeds", pytest.param("generator", marks=pytest.mark.slow)])
def test_two_tokens_have_the_enumerated_joint_distribution(options, rule, noise, *, function, leaves, chi_square):
    prompt = [1, 2]
    noisy = {"seeds": torch.arange(ROWS)} if noise == "seeds" else {"generator": torch.Generator().manual_seed(3)}
    prompts = torch.tensor([prompt]).expand(ROWS, -1)
    found = generate(function, prompts, max_new_tokens=2, eos_ids=4, strategy=Sample(), **options, **noisy)
    expected = leaves(function, prompt, 2, (4,), lambda scores, written: rule(scores, torch.tensor([prompt + written])))
    counts = _counted(found)
    assert sum(counts.values()) == ROWS
    assert chi_square(counts, {one: math.exp(log_prob) for one, log_prob in expected.items()}) > 1e-4
    # What is told of a sequence is its log-probability.
    lengths, sequences, scores = found.lengths[:99, 0].tolist(), found.tokens[:99, 0].tolist(), found.scores[:99, 0]
    told = [expected[tuple(one[:length])] for one, length in zip(sequences, lengths, strict=True)]
    torch.testing.assert_close(scores, torch.tensor(told, dtype=torch.float64), rtol=1e-4, atol=1e-4)


def test_the_coin_of_random_filters_is_of_the_seed_and_the_place(function):
    seen = {}

    def mask(history):
        for row, place, coin in zip(
            *(one.tolist() for one in (history.rows, history.written, history.tossed())), strict=True
        ):
            seen[row, place] = coin
        return torch.ones(len(history.tokens), V, dtype=torch.bool)

    generate(function, [[1]] * 4, mask=mask, max_new_tokens=[3, 1, 1, 2], seeds=[5, 6, 7, -8], filters=XTC(0.1, 0.5))
    wanted = {(row, place): (5, 6, 7, -8)[row] for row, count in enumerate((3, 1, 1, 2)) for place in range(count)}
    coins = uniforms(list(wanted.values()), [place for _, place in wanted], stream=Stream.COIN)
    assert seen == dict(zip(wanted, coins.tolist(), strict=True))


@pytest.mark.slow
def test_xtc_tosses_its_coin_with_the_seed(function, chi_square):
    scores = function(torch.tensor([[1, 2]]))
    rule = XTC(0.15, 1.0)
    with_coin = rule(scores).softmax(-1)[0]
    assert int((with_coin == 0).sum()) >= 1
    found = generate(
        function,
        torch.tensor([[1, 2]]).expand(ROWS, -1),
        filters=XTC(0.15, 0.4),
        max_new_tokens=1,
        seeds=torch.arange(ROWS),
    )
    mixed = 0.4 * with_coin + 0.6 * scores.softmax(-1)[0]
    assert chi_square(_counted(found), {(one,): float(mixed[one]) for one in range(V)}) > 1e-4


@given(
    seed=st.integers(0, 2**64 - 1),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0, float("inf")]),
    limits=st.tuples(
        st.none() | st.integers(1, 8), st.none() | st.floats(0, 1.2), st.none() | st.floats(0, 1)
    ),  # top-k, top-p, min-p
    joint=st.booleans(),
    spread=st.sampled_from([0.0, 1.5]),
)
@settings(deadline=None)
def test_the_drawn_log_prob_is_that_of_the_filters(toy, *, seed, temperature, limits, joint, spread):
    top_k, top_p, min_p = limits
    function = toy(V, seed % 7, spread)
    found = generate(
        function,
        [[1, 2]],
        max_new_tokens=3,
        seeds=seed,
        strategy=Sample(joint=joint),
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        min_p=min_p,
    )
    tokens = [1, 2]
    for token, told, drawn in zip(
        *(one[0, 0].tolist() for one in (found.tokens, found.log_probs, found.drawn_log_probs)), strict=True
    ):
        scores = function(torch.tensor([tokens]))[0]
        warm = Temperature(temperature)(scores)
        kept = torch.ones(V, dtype=torch.bool)
        left = warm
        for limit, value in ((TopK, top_k), (TopP, top_p)):
            if value is not None:
                kept &= limit(value).keep((warm if joint else left)[None], None)[0]
                left = warm.masked_fill(~kept, -torch.inf)
        if min_p is not None:
            left = MinP(min_p)(left)
        assert drawn == pytest.approx(float(left.log_softmax(-1)[token]), abs=1e-5)
        assert told == pytest.approx(float(scores.log_softmax(-1)[token]), abs=1e-5)
        tokens.append(token)


@pytest.mark.parametrize(("joint", "kept"), [(False, [0.5, 0.3]), (True, [0.5, 0.3, 0.1])])
def test_joint_limits_worked_by_hand(joint, kept):
    """Before the third token comes 0.8 of all mass, and 0.889 of what top-k leaves."""
    scores = torch.tensor([0.5, 0.3, 0.1, 0.07, 0.03]).log()
    found = generate(
        lambda tokens: scores.expand(len(tokens), V),
        [[0]] * 99,
        strategy=Sample(joint=joint),
        top_k=3,
        top_p=0.85,
        max_new_tokens=1,
        seeds=range(99),
    )
    drawn, told = found.tokens.flatten(), found.drawn_log_probs.flatten()
    assert drawn.unique().tolist() == list(range(len(kept)))
    torch.testing.assert_close(told, (torch.tensor(kept) / sum(kept)).log()[drawn])


def test_d4_one_score_alone_is_drawn():
    scores = torch.full((1, 32_000), -torch.inf)
    scores[0, 31_337] = 1.0
    found = generate(lambda tokens: scores, [[1]], top_k=2**30, top_p=1.0, max_new_tokens=2, seeds=0)
    assert found.tokens.flatten().tolist() == [31_337, 31_337]


def test_d5_few_scores_and_none():
    def few(tokens):
        scores = torch.full((len(tokens), 50), -torch.inf)
        scores[tokens[:, -1] == 1, 7:9] = torch.tensor([1.0, 2.0])
        return scores

    for options in ({"top_k": 1, "seeds": [1, 2]}, {}):
        found = generate(few, [[1], [2]], max_new_tokens=3, **options)
        assert found.tokens[:, 0].tolist() == [[8], [0]]
        assert found.lengths.tolist() == [[1], [0]]
        assert found.finish == [["dead end"], ["dead end"]]


@pytest.fixture(scope="module")
def model(family_folder):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(family_folder("llama"), dtype=torch.float64).eval()


def _prompts(*lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 260, (length,), generator=generator).tolist() for length in lengths]


def test_d20_a_row_follows_its_own_seed(model):
    prompts, seeds = _prompts(3, 7, 1, 5, 4, 6, 2, 8), [11, 2**64 - 1, -4, 11, 0, 5, 6, 7]
    options: dict[str, Any] = {"max_new_tokens": 12, "eos_ids": (), "temperature": 1.5, "top_p": 0.95}

    def written(order, **more):
        found = generate(model, [prompts[row] for row in order], seeds=[seeds[row] for row in order], **options, **more)
        return dict(zip(order, found.tokens[:, 0].tolist(), strict=True))

    together = written(range(8))
    assert written([1, 0]) == {row: together[row] for row in (0, 1)}
    for row in range(8):
        assert written([row]) == {row: together[row]}
    assert len({tuple(one) for one in together.values()}) == 8
    beside = generate(model, [prompts[2], prompts[0]], seeds=[None, seeds[0]], **options)
    assert beside.tokens[1, 0].tolist() == together[0]
    again = generate(model, [prompts[2], prompts[0]], seeds=[None, seeds[0]], **options)
    assert not torch.equal(beside.tokens[0], again.tokens[0])


def test_rows_that_end_at_different_times_do_not_disturb_the_others(model):
    prompts, limits = _prompts(3, 7, 1, 5, 4, 6, 2, 8), [2, 9, 5, 1, 9, 4, 3, 7]
    options: dict[str, Any] = {"eos_ids": (), "filters": FrequencyPenalty(0.7), "alternatives": 2}
    together = generate(model, prompts, seeds=range(8), max_new_tokens=limits, **options)
    assert together.lengths.flatten().tolist() == limits
    for row, prompt in enumerate(prompts):
        alone = generate(model, [prompt], seeds=row, max_new_tokens=limits[row], **options)
        assert together.tokens[row, 0, : limits[row]].tolist() == alone.tokens.flatten().tolist()
        for name in ("log_probs", "drawn_log_probs", "alternative_ids", "alternative_log_probs"):
            torch.testing.assert_close(
                getattr(together, name)[row, 0, : limits[row]], getattr(alone, name)[0, 0], rtol=1e-4, atol=1e-4
            )


def test_settings_of_each_row_are_those_of_the_row_alone(model):
    prompts = _prompts(3, 3, 5, 4)
    each: dict[str, list[float]] = {
        "temperature": [0.0, 0.7, math.inf, 2.0],
        "top_k": [5, 264, 40, 3],
        "top_p": [1.0, 0.9, 0.5, 0.99],
        "min_p": [0.0, 0.05, 0.0, 0.1],
    }
    penalties, limits = [1.0, 1.5, 1.2, 3.0], [2, 8, 4, 7]
    together = generate(
        model,
        prompts,
        filters=RepetitionPenalty(torch.tensor(penalties)),
        seeds=range(4),
        max_new_tokens=limits,
        eos_ids=(),
        **each,
    )
    for row, prompt in enumerate(prompts):
        own: dict[str, Any] = {name: values[row] for name, values in each.items()}
        own |= {"filters": RepetitionPenalty(penalties[row]), "max_new_tokens": limits[row], "seeds": row}
        alone = generate(model, [prompt], eos_ids=(), **own)
        assert torch.equal(together.tokens[row, :, : limits[row]], alone.tokens[0])
        torch.testing.assert_close(
            together.drawn_log_probs[row, :, : limits[row]], alone.drawn_log_probs[0], rtol=1e-4, atol=1e-4
        )


def test_settings_of_each_row_hold_for_other_strategies():
    penalty = torch.tensor([1.0, 100.0])
    found = generate(
        lambda tokens: torch.tensor([3.0, 2.0, 1.0]).expand(len(tokens), 3),
        [[0], [0]],
        strategy=Greedy(),
        filters=RepetitionPenalty(penalty),
        temperature=[1.0, 2.0],
        max_new_tokens=[2, 3],
    )
    assert found.tokens[:, 0].tolist() == [[0, 0, 0], [1, 2, 0]]
    # After 0, then after 0 and 1: scores over the penalty, and over the temperature.
    second = torch.tensor([[0.03, 2.0, 1.0], [0.03, 0.02, 1.0]]).div(2).log_softmax(-1)
    torch.testing.assert_close(found.drawn_log_probs[1, 0, :2], second[[0, 1], [1, 2]])


def test_a_generator_repeats_a_batch_and_greedy_leaves_pytorchs_alone(model):
    def drawn(seed):
        return generate(model, _prompts(2, 3), generator=torch.Generator().manual_seed(seed), max_new_tokens=6).tokens

    assert torch.equal(drawn(1), drawn(1))
    assert not torch.equal(drawn(1), drawn(2))
    before = torch.get_rng_state()
    generate(model, _prompts(2, 3), filters=RepetitionPenalty(1.2), max_new_tokens=3)
    assert torch.equal(torch.get_rng_state(), before)


def test_what_is_sampled_and_what_is_greedy(function):
    greedy = generate(function, [[1, 2]] * 40, max_new_tokens=4).tokens
    assert len(greedy.unique(dim=0)) == 1
    for options in ({"temperature": 1.0}, {"top_p": 0.99}, {"seeds": range(40)}, {"strategy": Sample()}):
        assert len(generate(function, [[1, 2]] * 40, max_new_tokens=4, **options).tokens.unique(dim=0)) > 1
    cold = generate(function, [[1, 2]] * 40, max_new_tokens=4, temperature=0.0)
    assert torch.equal(cold.tokens, greedy)
    assert float(cold.drawn_log_probs.abs().max()) == 0
