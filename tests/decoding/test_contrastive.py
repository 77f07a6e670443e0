"""Contrastive search against its definition, without a cache and one candidate at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unembed.decoding import AllowedIds, Contrastive, History, RepetitionPenalty, generate

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", params=["llama", "gpt2"])
def model(request, family_folder):
    folder = family_folder(request.param)
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()


def _states(model, tokens):
    found = model(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return found.logits[0], found.hidden_states[-1][0]


def _reference(model, prompt, k, alpha, steps, *, eos=(), rules=None):
    """Tokens, log-probabilities as the model has them, and after the rules."""
    tokens, plain, drawn = list(prompt), [], []
    for _ in range(steps):
        logits, _ = _states(model, tokens)
        scores = logits[-1]
        if rules is not None:
            scores = rules(scores[None], torch.tensor([tokens]))[0]
        log_probs = scores.log_softmax(-1)
        order = sorted(range(len(scores)), key=lambda v: (-float(scores[v]), v))
        candidates = [v for v in order[:k] if scores[v] > -torch.inf]
        worth = []
        for v in candidates:
            _, hidden = _states(model, [*tokens, v])
            likeness = torch.cosine_similarity(hidden[-1:], hidden[:-1], dim=-1)
            worth.append(float((1 - alpha) * log_probs[v].exp() - alpha * likeness.max()))
        best = candidates[worth.index(max(worth))]
        tokens.append(best)
        plain.append(float(logits[-1].log_softmax(-1)[best]))
        drawn.append(float(log_probs[best]))
        if best in eos:
            break
    return tokens[len(prompt) :], plain, drawn


def _prompts(lengths):
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 260, (length,), generator=generator).tolist() for length in lengths]


@settings(max_examples=8, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    k=st.integers(1, 5),
    alpha=st.sampled_from([0.0, 0.3, 0.6, 1.0]),
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3),
)
@torch.no_grad()
def test_cached_and_batched_is_the_definition(model, k, alpha, lengths):
    prompts = _prompts(lengths)
    found = generate(
        model, prompts, strategy=Contrastive(k=k, alpha=alpha), max_new_tokens=5, eos_ids=(), alternatives=3
    )
    for row, prompt in enumerate(prompts):
        tokens, plain, drawn = _reference(model, prompt, k, alpha, 5)
        assert found.tokens[row, 0].tolist() == tokens
        torch.testing.assert_close(found.log_probs[row, 0], torch.tensor(plain), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(found.drawn_log_probs[row, 0], torch.tensor(drawn), rtol=1e-4, atol=1e-4)
        logits, _ = _states(model, [*prompt, *tokens])
        best = logits[len(prompt) - 1 : -1].log_softmax(-1).topk(3)
        assert found.alternative_ids[row, 0].tolist() == best.indices.tolist()
        torch.testing.assert_close(found.alternative_log_probs[row, 0].double(), best.values, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_rules_hold_and_each_row_ends_on_its_own(model):
    prompts = _prompts([2, 5, 3])
    rules = AllowedIds(list(range(3, 200))) | RepetitionPenalty(1.3)
    plain = [_reference(model, prompt, 4, 0.6, 7, rules=rules)[0] for prompt in prompts]
    ends = (plain[0][1], plain[2][4])
    found = generate(
        model, prompts, strategy=Contrastive(4, 0.6), max_new_tokens=[9, 7, 9], filters=rules, eos_ids=ends, pad_id=0
    )
    for row, prompt in enumerate(prompts):
        tokens, _, drawn = _reference(model, prompt, 4, 0.6, (9, 7, 9)[row], eos=ends, rules=rules)
        count = len(tokens)
        assert found.tokens[row, 0].tolist() == tokens + [0] * (found.tokens.shape[-1] - count)
        assert found.finish[row] == ["eos" if tokens[-1] in ends else "length"]
        assert float(found.scores[row, 0]) == pytest.approx(sum(drawn), abs=1e-3)
    assert found.finish[0] == ["eos"]


def test_without_a_penalty_or_a_choice_it_is_greedy(model):
    prompts = _prompts([4, 2])
    greedy = generate(model, prompts, max_new_tokens=8, eos_ids=())
    for strategy in (Contrastive(k=1, alpha=0.9), Contrastive(k=6, alpha=0.0)):
        found = generate(model, prompts, strategy=strategy, max_new_tokens=8, eos_ids=())
        assert torch.equal(found.tokens, greedy.tokens)


def test_the_penalty_changes_the_choice(model):
    prompts = _prompts([4, 2])
    found = generate(model, prompts, strategy=Contrastive(k=6, alpha=1.0), max_new_tokens=8, eos_ids=())
    assert not torch.equal(found.tokens, generate(model, prompts, max_new_tokens=8, eos_ids=()).tokens)


def test_a_function_with_hidden_states_worked_by_hand():
    """Hidden states are unit vectors of the token; the more probable token repeats one, the other does not."""
    hidden = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    log_probs = torch.tensor([0.2, 0.3, 0.5]).log()

    def function(tokens):
        return log_probs.expand(*tokens.shape, 3), hidden[tokens]

    def found(alpha):
        return generate(function, [[0]], strategy=Contrastive(k=2, alpha=alpha), max_new_tokens=1).tokens.item()

    # Token 2: (1 - a) 0.5 - a; token 1: (1 - a) 0.3. They are equal at a = 1 / 6.
    assert (found(0.16), found(0.17)) == (2, 1)


def test_a_dead_end_ends_the_row_alone(model):
    def mask(history: History):
        allowed = torch.ones(len(history.tokens), 264, dtype=torch.bool)
        allowed[(history.rows == 0) & (history.lengths() == 2)] = False
        return allowed

    found = generate(model, _prompts([3, 3]), strategy=Contrastive(), mask=mask, max_new_tokens=4, eos_ids=())
    assert found.lengths.tolist() == [[2], [4]]
    assert found.finish == [["dead end"], ["length"]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, "`k` must be a whole number of at least 1, got 0"),
        ({"alpha": 1.5}, "`alpha` must be from 0 to 1, got 1.5"),
        ({"alpha": "x"}, "`alpha` must be from 0 to 1, got 'x'"),
    ],
)
def test_options_out_of_range(options, message):
    with pytest.raises(ValueError, match=message):
        Contrastive(**options)
