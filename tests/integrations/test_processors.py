"""Filters as logits processors: equal to transformers' own where they agree, and where they do not.

The second half is the list in docs/decoding.md.
"""

from __future__ import annotations

import math
import warnings

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation import logits_process as theirs

from unembed.decoding import (
    XTC,
    BannedIds,
    Epsilon,
    Eta,
    FrequencyPenalty,
    MinLength,
    MinP,
    NoRepeatNgram,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    Typical,
)
from unembed.decoding._orders import ordered
from unembed.integrations._processors import processor

INF = math.inf
EOS = [4, 9]


def spread(seed: int, rows: int = 3, width: int = 60) -> torch.Tensor:
    """Scores without ties."""
    return 3 * torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), length=st.integers(1, 20), value=st.floats(0.01, 0.99), least=st.integers(1, 4))
def test_equal_to_transformers_where_the_definitions_agree(seed, length, value, least):
    scores = spread(seed)
    tokens = torch.randint(0, 8, (3, length), generator=torch.Generator().manual_seed(seed))
    k, n = 1 + int(value * 70), 1 + int(value * 4)
    keep = {"min_tokens_to_keep": least}
    pairs = [
        (Temperature(value), theirs.TemperatureLogitsWarper(value)),
        (TopK(k, min_keep=least), theirs.TopKLogitsWarper(k, **keep)),
        (TopP(value, min_keep=least), theirs.TopPLogitsWarper(value, **keep)),
        (MinP(value, min_keep=least), theirs.MinPLogitsWarper(value, **keep)),
        (Typical(value, min_keep=least), theirs.TypicalLogitsWarper(value, **keep)),
        (Epsilon(value / 9, min_keep=least), theirs.EpsilonLogitsWarper(value / 9, **keep)),
        (Eta(value / 9, min_keep=least), theirs.EtaLogitsWarper(value / 9, **keep)),
        (RepetitionPenalty(1 + value), theirs.RepetitionPenaltyLogitsProcessor(1 + value)),
        (NoRepeatNgram(n), theirs.NoRepeatNGramLogitsProcessor(n)),
        (MinLength(3, EOS), theirs.MinNewTokensLengthLogitsProcessor(max(0, length - 2), 3, EOS)),
        (BannedIds([3, 8]), theirs.SuppressTokensLogitsProcessor([3, 8])),
    ]
    for ours, other in pairs:
        found = processor(ours, prompt_length=max(0, length - 2))(tokens, scores)
        torch.testing.assert_close(found, other(tokens, scores.clone()), msg=lambda text, ours=ours: f"{ours}: {text}")


# transformers' own `generate`.


@pytest.fixture(scope="module")
def model():
    config = transformers.LlamaConfig(
        vocab_size=60,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        initializer_range=0.5,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=2,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return transformers.LlamaForCausalLM(config).eval()


PROMPTS = torch.tensor([[5, 7, 9, 11], [2, 2, 6, 6]])
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])


def generated(model, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # transformers on its own defaults
        torch.manual_seed(3)
        return model.generate(PROMPTS, attention_mask=MASK, max_new_tokens=24, **options)


FLAGS = [
    {"temperature": 0.7, "top_k": 12, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.8, "min_p": 0.02},
    {"typical_p": 0.6},
    {"epsilon_cutoff": 0.02},
    {"eta_cutoff": 0.02},
    {"repetition_penalty": 1.4, "top_k": 9},
    {
        "repetition_penalty": 1.2,
        "no_repeat_ngram_size": 2,
        "temperature": 0.9,
        "top_k": 20,
        "top_p": 0.95,
        "min_p": 0.01,
    },
]
OWN = {"epsilon_cutoff": "epsilon", "eta_cutoff": "eta", "no_repeat_ngram_size": "no_repeat_ngram"}


@pytest.mark.parametrize("flags", FLAGS, ids="-".join)
def test_generate_draws_the_same_tokens_as_with_its_own_flags(model, flags):
    wanted = generated(model, do_sample=True, **{"top_k": 0, **flags})
    chain = ordered(order="transformers", **{OWN.get(name, name): value for name, value in flags.items()})
    own = processor(chain, attention_mask=MASK)
    found = generated(model, do_sample=True, top_k=0, logits_processor=[own])
    assert torch.equal(found, wanted)
    assert len(wanted[0].unique()) > 5


def test_generate_with_beams_reads_the_mask_of_the_prompt_of_each_beam(model):
    options = {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2}
    wanted = generated(model, num_beams=3, num_return_sequences=2, do_sample=False, **options)
    own = processor(RepetitionPenalty(1.3) | NoRepeatNgram(2), attention_mask=MASK)
    found = generated(model, num_beams=3, num_return_sequences=2, do_sample=False, logits_processor=[own])
    assert torch.equal(found, wanted)
    plain = generated(model, num_beams=3, num_return_sequences=2, do_sample=False)
    assert not torch.equal(found, plain)


def test_generate_penalises_what_was_written_alone(model):
    found = generated(model, do_sample=False, logits_processor=[processor(PresencePenalty(1e9), attention_mask=MASK)])
    written = found[:, PROMPTS.shape[1] :]
    for row in written.tolist():
        until = row[: row.index(1) + 1] if 1 in row else row
        assert len(set(until)) == len(until)


def test_a_row_padded_in_front_is_the_row_alone():
    scores, filters = spread(0, rows=2, width=20), FrequencyPenalty(0.7) | RepetitionPenalty(1.2)
    tokens = torch.cat([PROMPTS, torch.tensor([[5, 5, 3], [6, 4, 4]])], 1)
    found = processor(filters, attention_mask=MASK)(tokens, scores)
    alone = processor(filters, prompt_length=2)(tokens[1:, 2:], scores[1:])
    assert torch.equal(found[1:], alone)
    assert torch.equal(processor(filters, prompt_length=4, pad_id=2)(tokens, scores), found)
    beams = processor(filters, attention_mask=MASK)(tokens.repeat_interleave(3, 0), scores.repeat_interleave(3, 0))
    assert torch.equal(beams, found.repeat_interleave(3, 0))


def test_padding_ends_where_the_prompt_begins():
    own = processor(RepetitionPenalty(1.2), prompt_length=4, pad_id=2)
    history = own.history(torch.tensor([[2, 2, 5, 2, 2], [2, 2, 2, 2, 7]]))
    assert history.tokens.tolist() == [[-1, -1, 5, 2, 2], [-1, -1, -1, -1, 7]]
    assert history.written.tolist() == [1, 1]


def test_coins_are_a_function_of_seed_and_place():
    scores, own = torch.zeros(2, 4), processor(XTC(0.1, 0.5), prompt_length=2, seeds=[5, 6])
    tokens = torch.zeros(2, 30, dtype=torch.int64)
    first = torch.stack([own(tokens[:, :width], scores) for width in range(2, 30)])
    again = torch.stack([own(tokens[:, :width], scores) for width in range(2, 30)])
    assert torch.equal(first, again)
    tossed = (first == -INF).any(-1)
    assert 0 < int(tossed.sum()) < tossed.numel()
    assert not torch.equal(tossed[:, 0], tossed[:, 1])
    swapped = processor(XTC(0.1, 0.5), prompt_length=2, seeds=[6, 5])
    assert torch.equal(torch.stack([swapped(tokens[:, :width], scores) for width in range(2, 30)]), first.flip(1))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: processor(TopK(3) | PresencePenalty(0.5)),
            "PresencePenalty asks what the model wrote: give `attention_mask` or `prompt_length`.",
        ),
        (
            lambda: processor([MinLength(3, [1])]),
            "MinLength asks what the model wrote: give `attention_mask` or `prompt_length`.",
        ),
        (
            lambda: processor(TopK(3), attention_mask=MASK, pad_id=2),
            "`attention_mask` says where prompts lie: give it, or `prompt_length` and `pad_id`, not both.",
        ),
        (lambda: processor(TopK(3), pad_id=2), "`pad_id` is for prompts of a known width: give `prompt_length` too."),
        (lambda: processor(TopK(3), attention_mask=MASK[0]), "`attention_mask` must be [B, T], got (4,)."),
        (
            lambda: processor(TopK(3), attention_mask=MASK)(PROMPTS[:1], torch.zeros(1, 9)),
            "`attention_mask` has 2 rows, which 1 rows cannot share.",
        ),
        (
            lambda: processor(TopK(3), prompt_length=5)(PROMPTS, torch.zeros(2, 9)),
            "`input_ids` has 4 columns, fewer than the prompts' 5.",
        ),
        (
            lambda: processor(TopK(3), prompt_length=4, seeds=[1])(PROMPTS, torch.zeros(2, 9)),
            "`seeds` must have one number for each of 2 rows, got 1.",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(make, message):
    with pytest.raises(ValueError) as told:  # noqa: PT011
        make()
    assert str(told.value) == message


# Where transformers differs from MATH 5: one test a line of the list in docs/decoding.md.

NONE = torch.zeros(1, 0, dtype=torch.int64)


def left(found: torch.Tensor) -> list[int]:
    return (found[0] > -INF).nonzero().squeeze(-1).tolist()


def test_differs_top_k_keeps_all_that_tie_with_the_last():
    flat = torch.zeros(1, 1000)  # case D8
    assert len(left(theirs.TopKLogitsWarper(50)(NONE, flat))) == 1000
    assert left(processor(TopK(50))(NONE, flat)) == list(range(50))


def test_differs_top_p_breaks_ties_by_the_order_of_a_sort_and_not_by_the_id():
    flat = torch.zeros(1, 10)
    assert left(processor(TopP(0.35))(NONE, flat)) == [0, 1, 2, 3]
    assert left(theirs.TopPLogitsWarper(0.35)(NONE, flat)) != [0, 1, 2, 3]


def test_differs_top_p_at_a_mass_that_rounding_decides():
    # At 1000 equal scores a mass of j / 1000 is that of j; transformers often keeps one more.
    uniform = torch.zeros(1, 1000)
    steps = range(1, 1000, 7)
    ours = [len(left(processor(TopP(j / 1000))(NONE, uniform))) for j in steps]
    assert ours == list(steps)
    other = [len(left(theirs.TopPLogitsWarper(j / 1000)(NONE, uniform))) - j for j in steps]
    assert set(other) == {0, 1}
    assert sum(other) > 10


def test_differs_top_p_of_half_precision_sums_in_half_precision():
    torch.manual_seed(0)
    scores = (2 * torch.randn(1, 131_072)).bfloat16()  # case D3
    exact = len(left(theirs.TopPLogitsWarper(0.9)(NONE, scores.double())))
    assert len(left(processor(TopP(0.9))(NONE, scores))) == exact
    assert len(left(theirs.TopPLogitsWarper(0.9)(NONE, scores))) < exact - 50


def test_differs_typical_keeps_all_that_are_as_near_as_the_last():
    flat = torch.zeros(1, 10)
    assert left(processor(Typical(0.35))(NONE, flat)) == [0, 1, 2, 3]
    assert len(left(theirs.TypicalLogitsWarper(0.35)(NONE, flat))) == 10


def test_differs_epsilon_keeps_all_that_tie_with_the_best():
    flat = torch.zeros(1, 10)
    assert left(processor(Epsilon(0.5))(NONE, flat)) == [0]
    assert len(left(theirs.EpsilonLogitsWarper(0.5)(NONE, flat))) == 10


def test_differs_temperature_0_infinity_and_whole_numbers_are_refused():
    for value in (0.0, 0, 2):
        with pytest.raises(ValueError, match="strictly positive float"):
            theirs.TemperatureLogitsWarper(value)
    scores = torch.tensor([[1.0, 3.0, -INF]])
    assert processor(Temperature(0))(NONE, scores).tolist() == [[-INF, 0.0, -INF]]
    assert processor(Temperature(2))(NONE, scores).tolist() == [[0.5, 1.5, -INF]]
    assert bool(theirs.TemperatureLogitsWarper(INF)(NONE, scores).isnan().any())
    assert processor(Temperature(INF))(NONE, scores).tolist() == [[0.0, 0.0, -INF]]


def test_differs_a_low_temperature_overflows():
    scores = torch.tensor([[10.0, 20.0, 30.0]])  # case D7
    assert bool(theirs.TemperatureLogitsWarper(1e-38)(NONE, scores).softmax(-1).isnan().any())
    assert processor(Temperature(1e-38))(NONE, scores).softmax(-1).tolist() == [[0.0, 0.0, 1.0]]


def test_differs_padding_counts_as_tokens_in_n_grams():
    # Two paddings and a 2 that the model wrote: transformers has seen "2 2" and bans 2.
    tokens, scores = torch.tensor([[2, 2, 5, 2]]), torch.zeros(1, 6)
    mask = torch.tensor([[0, 0, 1]])
    assert left(theirs.NoRepeatNGramLogitsProcessor(2)(tokens, scores)) == [0, 1, 3, 4]
    assert left(processor(NoRepeatNgram(2), attention_mask=mask)(tokens, scores)) == [0, 1, 2, 3, 4, 5]


def test_differs_rules_may_exclude_every_token():
    tokens, scores = torch.tensor([[0, 1, 2]]), torch.zeros(1, 3)
    assert left(theirs.NoRepeatNGramLogitsProcessor(1)(tokens, scores)) == []
    assert left(processor(NoRepeatNgram(1))(tokens, scores)) == [0, 1, 2]
    only = torch.tensor([[0.0, -INF, -INF]])
    assert left(theirs.MinNewTokensLengthLogitsProcessor(0, 9, [0])(tokens, only)) == []
    assert left(processor(MinLength(9, [0]), prompt_length=0)(tokens, only)) == [0]


def test_differs_min_length_counts_the_prompt_and_its_padding():
    tokens, scores = torch.tensor([[2, 2, 2, 2, 5]]), torch.zeros(1, 6)
    assert left(theirs.MinLengthLogitsProcessor(5, [0])(tokens, scores)) == [0, 1, 2, 3, 4, 5]
    assert left(processor(MinLength(5, [0]), prompt_length=5)(tokens, scores)) == [1, 2, 3, 4, 5]


def test_differs_half_precision_comes_out_as_it_came_in():
    scores = spread(0).half()
    assert theirs.TopKLogitsWarper(3)(NONE, scores).dtype == torch.float16
    assert processor(TopK(3))(torch.zeros(3, 0, dtype=torch.int64), scores).dtype == torch.float32
