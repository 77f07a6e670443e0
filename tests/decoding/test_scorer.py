"""Scorers: a model with its cache against the same model called on all tokens, padded or not, and in any order."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from unembed.decoding import CachedScorer, FunctionScorer

transformers = pytest.importorskip("transformers")

CLOSE = {"rtol": 1e-5, "atol": 1e-5}  # norms are float32 whatever the weights are, and round a last bit the other way
ROUGH = {"rtol": 1e-4, "atol": 1e-4}  # Mamba computes more of it so
FAMILIES = ("gpt2", "llama", "gemma3_text", "mistral", "mamba")
_MODELS: dict[str, Any] = {}


@pytest.fixture
def model(request, family_folder):
    name = request.param
    if name not in _MODELS:
        folder = family_folder(name)
        _MODELS[name] = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64).eval()
    return _MODELS[name]


def _function(model):
    """The definition: no cache, no padding."""

    def called(tokens):
        found = model(tokens, use_cache=False, output_hidden_states=True)
        return found.logits, found.hidden_states[-1]

    return called


def _padded(*rows):
    longest = max(map(len, rows))
    tokens = torch.tensor([[-1] * (longest - len(row)) + list(row) for row in rows])
    return tokens, tokens >= 0


def _prompts(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 260, (length,), generator=generator).tolist() for length in lengths]


def _both(model, **options):
    return CachedScorer(model, **options), FunctionScorer(_function(model), keep_hidden=True)


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@torch.no_grad()
def test_cached_scores_are_those_without_a_cache_beyond_any_window(model):
    close = ROUGH if model.config.model_type == "mamba" else CLOSE
    fast, plain = _both(model, keep_hidden=True)
    tokens, real = _padded(*_prompts([5, 8, 1]))
    torch.testing.assert_close(fast.start(tokens, real), plain.start(tokens, real), **close)
    more = torch.tensor(_prompts([30, 30, 30], 1))  # windows are 16
    for step in range(30):
        found, wanted = fast.extend(more[:, step : step + 1]), plain.extend(more[:, step : step + 1])
        torch.testing.assert_close(found, wanted, **close)
        torch.testing.assert_close(fast.hidden, plain.hidden, **close)


@pytest.mark.parametrize("model", FAMILIES, indirect=True)
@torch.no_grad()
def test_d16_pads_in_front_change_no_score(model):
    close = ROUGH if model.config.model_type == "mamba" else CLOSE
    short, long = _prompts([4, 7])
    tokens, real = _padded(short, long)
    assert int((~real).sum()) == 3
    together, alone = CachedScorer(model, keep_hidden=True), CachedScorer(model, keep_hidden=True)
    scores = together.start(tokens, real)
    torch.testing.assert_close(scores[:1], alone.start(*_padded(short)), **close)
    assert together.hidden is not None
    assert alone.hidden is not None
    torch.testing.assert_close(together.hidden[:1, 3:], alone.hidden, **close)
    more = torch.tensor([[9], [12]])
    torch.testing.assert_close(together.extend(more)[:1], alone.extend(more[:1]), **close)


@pytest.mark.parametrize("model", ["llama", "mistral", "gemma3_text"], indirect=True)
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
@torch.no_grad()
def test_any_order_of_reading_choosing_and_forgetting(model, data):
    fast, plain = _both(model, rewindable=True, keep_hidden=True)
    lengths = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3))
    tokens, real = _padded(*_prompts(lengths))
    torch.testing.assert_close(fast.start(tokens, real), plain.start(tokens, real), **CLOSE)
    rows = len(lengths)
    for seed in range(data.draw(st.integers(1, 4))):
        count = data.draw(st.integers(1, 4))
        more = torch.tensor(_prompts([count] * rows, seed))
        torch.testing.assert_close(fast.extend(more), plain.extend(more), **CLOSE)
        torch.testing.assert_close(fast.hidden, plain.hidden, **CLOSE)
        back = data.draw(st.integers(0, count))
        fast.rewind(back)
        plain.rewind(back)
        chosen = torch.tensor(data.draw(st.lists(st.integers(0, rows - 1), min_size=1, max_size=4)))
        fast.select(chosen)
        plain.select(chosen)
        rows = len(chosen)


@pytest.mark.parametrize("model", ["mamba"], indirect=True)
@torch.no_grad()
def test_a_model_of_states_can_be_reordered_and_refuses_to_forget(model):
    fast, plain = _both(model)
    tokens, real = _padded(*_prompts([5, 3]))
    fast.start(tokens, real)
    plain.start(tokens, real)
    for one in (fast, plain):
        one.select(torch.tensor([1, 0, 1]))
    more = torch.tensor([[5], [6], [7]])
    torch.testing.assert_close(fast.extend(more), plain.extend(more), **ROUGH)
    with pytest.raises(ValueError, match="MambaForCausalLM folds tokens into a state and cannot forget the last ones"):
        CachedScorer(model, rewindable=True).start(tokens, real)


@pytest.mark.parametrize("model", ["gpt2"], indirect=True)
@torch.no_grad()
def test_more_tokens_than_learned_positions_are_told_in_one_line(model):
    scorer = CachedScorer(model)
    scorer.start(*_padded(*_prompts([128])))
    with pytest.raises(ValueError, match=r"^GPT2LMHeadModel has 128 positions, too few for 129 tokens: lower `max_new"):
        scorer.extend(torch.tensor([[5]]))


@pytest.mark.compile
@pytest.mark.parametrize("model", ["llama"], indirect=True)
def test_a_compiled_model_is_asked_for_what_it_wraps(model):
    assert CachedScorer(torch.compile(model))._takes == CachedScorer(model)._takes


def test_a_model_without_a_cache_is_refused():
    with pytest.raises(
        ValueError, match=r"Linear takes no cache: pass a function instead, `lambda ids: model\(ids\).logits`"
    ):
        CachedScorer(torch.nn.Linear(2, 2))


def test_a_function_of_the_next_token_is_called_once_a_position():
    calls = []

    def function(tokens):
        calls.append(tokens.tolist())
        return tokens.sum(1, keepdim=True) * torch.ones(3)

    scorer = FunctionScorer(function)
    tokens, real = _padded([5], [1, 2])
    assert scorer.start(tokens, real).tolist() == [[5.0] * 3, [3.0] * 3]
    assert scorer.extend(torch.tensor([[1, 1], [2, 2]])).tolist() == [[[6.0] * 3, [7.0] * 3], [[5.0] * 3, [7.0] * 3]]
    assert calls[2:] == [[[5, 1, 1]], [[5, 1]], [[1, 2, 2, 2]], [[1, 2, 2]]]  # rows of one length, and no padding


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (torch.zeros(1, 3), r"floating-point scores \[2, V\] or \[2, 2, V\], got torch.float32 \(1, 3\)"),
        (torch.zeros(2, 1, 3), r"\[2, V\] or \[2, 2, V\], got torch.float32 \(2, 1, 3\)"),
        (torch.zeros(2, 3, dtype=torch.int64), r"got torch.int64 \(2, 3\)"),
        ({"logits": 1}, "got dict"),
    ],
)
def test_a_function_that_gives_something_else(found, message):
    with pytest.raises(ValueError, match=message):
        FunctionScorer(lambda tokens: found).start(*_padded([1, 2], [3, 4]))


def test_a_function_without_hidden_states_where_they_are_needed():
    with pytest.raises(ValueError, match=r"must give \(scores \[n, t, V\], hidden \[n, t, D\]\)"):
        FunctionScorer(lambda tokens: torch.zeros(*tokens.shape, 3), keep_hidden=True).start(*_padded([1, 2]))
