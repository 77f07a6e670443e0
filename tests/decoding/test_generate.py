"""`generate`: what it takes and refuses, and greedy choice against transformers' own."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from unembed.decoding import (
    XTC,
    AllowedIds,
    BannedIds,
    Contrastive,
    FrequencyPenalty,
    FunctionScorer,
    Greedy,
    History,
    PresencePenalty,
    RepetitionPenalty,
    Sample,
    Speculative,
    Temperature,
    TopK,
    generate,
)

V = 5


def _open(family_folder, name):
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(family_folder(name), dtype=torch.float64).eval()


@pytest.fixture(scope="module")
def model(family_folder):
    return _open(family_folder, "llama")


def _prompts(*lengths):
    generator = torch.Generator().manual_seed(5)
    return [torch.randint(3, 260, (length,), generator=generator).tolist() for length in lengths]


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3_text", "mistral", "mamba"])
@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_greedy_is_transformers_and_needs_no_cache(name, side, family_folder):
    model = _open(family_folder, name)
    prompts, steps = _prompts(4, 9, 1), 24  # windows are 16
    longest = max(map(len, prompts))
    rows = torch.tensor([[2] * (longest - len(one)) + one for one in prompts])
    real = torch.tensor([[0] * (longest - len(one)) + [1] * len(one) for one in prompts])
    theirs = model.generate(
        rows, attention_mask=real, do_sample=False, max_new_tokens=steps, min_new_tokens=steps, pad_token_id=2
    )[:, longest:]
    if side == "right":
        rows = torch.tensor([one + [2] * (longest - len(one)) for one in prompts])
        real = real.flip(1)
    found = generate(model, rows, attention_mask=real, max_new_tokens=steps, filters=BannedIds([1]))
    assert torch.equal(found.tokens[:, 0], theirs)
    plain = generate(
        lambda tokens: model(tokens, use_cache=False).logits, prompts, max_new_tokens=steps, filters=BannedIds([1])
    )
    assert torch.equal(plain.tokens, found.tokens)
    torch.testing.assert_close(plain.log_probs, found.log_probs, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_log_probs_and_alternatives_are_those_of_a_full_forward(model):
    prompts, rules = _prompts(3, 6), PresencePenalty(2.0) | BannedIds([7])
    found = generate(
        model, prompts, filters=rules, temperature=0.8, top_k=9, seeds=[1, 2], max_new_tokens=5, alternatives=4
    )
    for row, prompt in enumerate(prompts):
        count = int(found.lengths[row, 0])
        written = found.tokens[row, 0, :count].tolist()
        logits = model(torch.tensor([prompt + written])).logits[0, len(prompt) - 1 : -1]
        plain = logits.log_softmax(-1)
        place = torch.arange(count)
        close = {"rtol": 1e-4, "atol": 1e-4}
        torch.testing.assert_close(found.log_probs[row, 0, :count].double(), plain[place, written], **close)
        best = plain.topk(4)
        assert torch.equal(found.alternative_ids[row, 0, :count], best.indices)
        torch.testing.assert_close(found.alternative_log_probs[row, 0, :count].double(), best.values, **close)
        for step in place.tolist():
            history = History.of([prompt], [written[:step]])
            left = (rules | Temperature(0.8) | TopK(9))(logits[step : step + 1], history).log_softmax(-1)
            assert float(found.drawn_log_probs[row, 0, step]) == pytest.approx(float(left[0, written[step]]), abs=1e-4)


def test_d11_penalties_do_not_count_padding(model):
    prompts = _prompts(9, 2)
    for rule in (FrequencyPenalty(3.0, scope="all"), PresencePenalty(3.0, scope="all"), RepetitionPenalty(5.0)):
        together = generate(model, prompts, filters=rule, max_new_tokens=10, eos_ids=())
        for row, prompt in enumerate(prompts):
            assert torch.equal(
                together.tokens[row], generate(model, [prompt], filters=rule, max_new_tokens=10, eos_ids=()).tokens[0]
            )


def test_d24_only_what_is_allowed_is_written(model):
    allowed = [5, 6, 7, 8]
    for options in ({}, {"seeds": range(4), "temperature": 5.0}):
        found = generate(model, _prompts(3, 2, 4, 1), filters=AllowedIds(allowed), max_new_tokens=9, **options)
        assert set(found.tokens.flatten().tolist()) <= set(allowed)


def test_results_can_take_part_in_training(model):
    found = generate(model, _prompts(2), max_new_tokens=3)
    weight = torch.ones(264, 2, requires_grad=True)
    (nn.functional.embedding(found.tokens[0], weight) * found.log_probs[0, ..., None]).sum().backward()
    assert weight.grad is not None


def test_prompts_of_every_form_are_the_same(toy):
    def written(ids, **options):
        return generate(toy(V, 6), ids, max_new_tokens=4, **options).tokens[:, 0].tolist()

    wanted = written([[1, 2, 3]]) + written([[4, 1]])
    assert written([[1, 2, 3], [4, 1]]) == wanted
    assert written(torch.tensor([[1, 2, 3], [0, 4, 1]]), attention_mask=torch.tensor([[1, 1, 1], [0, 1, 1]])) == wanted
    assert written(torch.tensor([[1, 2, 3], [4, 1, 0]]), attention_mask=[[1, 1, 1], [1, 1, 0]]) == wanted
    assert written([np.array([1, 2, 3]), torch.tensor([4, 1])]) == wanted
    assert written([1, 2, 3]) == written(torch.tensor([1, 2, 3])) == wanted[:1]
    assert written(np.array([[1, 2, 3]])) == wanted[:1]


class Letters:
    """A tokenizer."""

    def decode(self, ids):
        return "".join(chr(97 + one) for one in ids)


@pytest.mark.parametrize(
    ("ids", "options", "message"),
    [
        ([], {}, "`input_ids` must hold at least one prompt, got none"),
        ([[1], []], {}, "Prompt 1 of `input_ids` is empty"),
        ([[1, -3]], {}, "`input_ids` must be at least 0, got -3 in prompt 0"),
        ([[1.5]], {}, r"`input_ids` must be whole numbers \[B, T\] or lists of them, got \[\[1.5\]\]"),
        ("text", {}, r"`input_ids` must be whole numbers \[B, T\] or lists of them, got 'text'"),
        (torch.ones(1, 2, 3, dtype=torch.int64), {}, r"got torch.int64 \(1, 2, 3\)"),
        (
            [[1, 2]],
            {"attention_mask": [[1]]},
            r"`attention_mask` must have the shape of `input_ids`, \[\(2,\)\], got \[\(1,\)\]",
        ),
        ([[1, 2]], {"attention_mask": [[0, 0]]}, "Prompt 0 of `input_ids` is empty"),
        ([[1, 2]], {"attention_mask": [[0, 2]]}, r"`attention_mask` must be 0 or 1, got \[0, 2\]"),
        (
            [[1]],
            {"max_new_tokens": 0},
            "`max_new_tokens` must be a whole number of at least 1, or one for each of 1 rows, got 0",
        ),
        ([[1]], {"max_new_tokens": [1, 2]}, r"one for each of 1 rows, got \[1, 2\]"),
        ([[1]], {"temperature": -1}, "`temperature` must be at least 0, got -1"),
        (
            [[1]],
            {"temperature": [1.0, 2.0]},
            r"`temperature` must be a number, or one for each of 1 rows, got \[1.0, 2.0\]",
        ),
        ([[1]], {"top_k": 2.5}, "`top_k` must be whole, got 2.5"),
        ([[1]], {"min_p": 3}, "`min_p` must be at least 0 and at most 1, got 3"),
        (
            [[1]],
            {"filters": RepetitionPenalty(torch.ones(2))},
            r"`RepetitionPenalty.penalty` must be a number or have shape \[1\], got \(2,\)",
        ),
        ([[1]], {"max_new_tokens": "a"}, "one for each of 1 rows, got 'a'"),
        ([[1]], {"max_new_tokens": [1, None]}, r"one for each of 1 rows, got \[1, None\]"),
        ([[1]], {"filters": 3}, "`filters` must be a filter or a list of them, got 3"),
        ([[1]], {"stop": None, "tokenizer": Letters()}, "`stop` must be strings that are not empty, got None"),
        ([[1]], {"seeds": 1.5}, "`seeds` must be whole numbers of 64 bits, one a row, got 1.5"),
        ([[1]], {"eos_ids": 1.5}, "`eos_ids` must be whole numbers of at least 0, got 1.5"),
        ([[1]], {"mask": "x"}, "`mask` must be a function of the `History`, got 'x'"),
        ([[1]], {"filters": ["greedy"]}, "A chain takes filters, got str"),
        (
            [[1]],
            {"mask": lambda history: torch.ones(1, 3)},
            r"`mask` must return booleans \(1, 5\), got torch.float32 \(1, 3\)",
        ),
        ([[1]], {"stop": "x"}, "`stop` is looked for in the text: pass `tokenizer` too"),
        (
            [[1]],
            {"stop": ["x", ""], "tokenizer": Letters()},
            r"`stop` must be strings that are not empty, got \['x', ''\]",
        ),
        ([[1]], {"tokenizer": str}, "`tokenizer` must have `decode`, from ids to a string, got type"),
        ([[1]], {"seeds": [1, 2]}, "`seeds` must have one number for each of 1 rows, got 2"),
        ([[1]], {"seeds": [0.5]}, "`seeds` must be whole numbers of 64 bits"),
        ([[1]], {"seeds": 1, "generator": torch.Generator()}, "Give `seeds` or `generator`, not both"),
        ([[1]], {"alternatives": -1}, "`alternatives` must be a whole number of at least 0, got -1"),
        ([[1]], {"alternatives": 6}, "`alternatives` must be at most 5, the number of classes, got 6"),
        ([[1]], {"strategy": "beam"}, r"`strategy` must be a strategy such as Greedy\(\) or Sample\(\), got 'beam'"),
        ([[1]], {"eos_ids": [-1]}, r"`eos_ids` must be whole numbers of at least 0, got \[-1\]"),
        ([[1]], {"pad_id": 0.5}, "`pad_id` must be a whole number, got 0.5"),
    ],
)
def test_mistakes_are_told_in_one_line(toy, ids, options, message):
    with pytest.raises(ValueError, match=message) as caught:
        generate(toy(V, 0), ids, **options)
    assert "\n" not in str(caught.value)


def test_ends_may_be_a_tensor_and_a_seed_a_number_of_numpy(toy):
    plain = generate(toy(V, 0), [[1]], eos_ids=[3, 0], seeds=5, max_new_tokens=20)
    other = generate(toy(V, 0), [[1]], eos_ids=torch.tensor([3, 0]), seeds=np.int64(5), max_new_tokens=20)
    assert torch.equal(plain.tokens, other.tokens)
    assert plain.finish == [["eos"]]


def test_rules_without_chance_leave_the_draws_of_a_generator(toy):
    def drawn(**options):
        generator = torch.Generator().manual_seed(3)
        found = generate(toy(V, 0), [[1], [2]], generator=generator, max_new_tokens=12, **options)
        return found.tokens.tolist(), generator.get_state().tolist()

    plain = drawn()
    assert drawn(mask=lambda history: torch.ones(len(history.tokens), V, dtype=torch.bool)) == plain
    assert drawn(filters=RepetitionPenalty(1.0)) == plain
    coins = drawn(filters=XTC(0.1, 0.0))  # excludes nothing, but looks at its coin
    assert coins[1] != plain[1]


@torch.no_grad()
def test_more_tokens_than_positions_are_warned_of(family_folder):
    transformers = pytest.importorskip("transformers")
    folder = family_folder("llama", max_position_embeddings=16)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    with pytest.warns(UserWarning, match="made for 16 tokens, and prompt and `max_new_tokens` are up to 17") as caught:
        generate(model, [[3, 4, 5], [6]], max_new_tokens=[15, 3], eos_ids=())
    assert len(caught) == 1
    generate(model, [[3, 4, 5], [6]], max_new_tokens=[14, 16], eos_ids=())  # all are read at a place that there is


class Bare:
    """A scorer that forgets nothing and keeps no hidden states."""

    def start(self, tokens, real):
        return torch.zeros(len(tokens), V)

    def extend(self, tokens):
        return torch.zeros(*tokens.shape, V)

    def select(self, rows):
        """Nothing is kept."""


def test_scorers_that_lack_what_a_strategy_needs(toy):
    assert generate(Bare(), [[1]], max_new_tokens=2).tokens.tolist() == [[[0, 0]]]
    with pytest.raises(ValueError, match="`model` must have `rewind` for Speculative, but Bare has none"):
        generate(Bare(), [[1]], strategy=Speculative(toy(V, 0)))
    with pytest.raises(ValueError, match="`draft` must have `rewind` for Speculative, but Bare has none"):
        generate(toy(V, 0), [[1]], strategy=Speculative(Bare()))
    with pytest.raises(ValueError, match="`model` must have `hidden` for Contrastive, but Bare has none"):
        generate(Bare(), [[1]], strategy=Contrastive())
    with pytest.raises(ValueError, match="This strategy needs hidden states, and FunctionScorer keeps none"):
        generate(FunctionScorer(toy(V, 0)), [[1]], strategy=Contrastive())


class EncoderDecoder(nn.Module):
    """What transformers' own say of themselves."""

    config = SimpleNamespace(is_encoder_decoder=True)


def test_models_that_cannot_write_on(model):
    with pytest.raises(ValueError, match=r"`input_ids` must be in \[0, 264\), got 264 in prompt 0"):
        generate(model, [[3, 264]])
    with pytest.raises(
        ValueError, match="`alternatives` must be a whole number of at least 0 and at most 264, got 265"
    ):
        generate(model, [[3]], alternatives=265)
    with pytest.raises(
        ValueError, match="must be a causal language model, but EncoderDecoder is an encoder with a decoder"
    ):
        generate(EncoderDecoder(), [[3]])
    with pytest.raises(ValueError, match="`model` must be a model, a function of tokens, or a Scorer, got int"):
        generate(3, [[3]])
    other = nn.Linear(2, 2)
    other.config = None
    with pytest.raises(ValueError, match="`model` must take `input_ids`, but Linear does not: pass a function"):
        generate(other, [[3]])


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("strategy", [Greedy(), Sample()])
def test_scores_that_are_no_numbers(value, strategy):
    with pytest.raises(ValueError, match=f"The model's scores hold {value}: expected finite scores or -inf"):
        generate(lambda tokens: torch.tensor([[0.0, value]]), [[1]], strategy=strategy)
