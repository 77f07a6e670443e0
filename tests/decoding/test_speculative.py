"""Speculative sampling: the target's distribution whatever the draft, and greedy decoding at a temperature of 0."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from unembed.decoding import (
    AllowedIds,
    CachedScorer,
    FunctionScorer,
    Generation,
    History,
    MinP,
    NoRepeatNgram,
    RepetitionPenalty,
    Speculative,
    Temperature,
    TopK,
    TopP,
    generate,
)
from unembed.decoding._plan import Event, Plan
from unembed.decoding._speculation import verified
from unembed.decoding._steps import Greedy
from unembed.decoding.filters import Chain, Filter

DRAWS = 100_000
GREEDY = [Temperature(0)]


def plan_of(prompts: Sequence[Sequence[int]], limit: int | Sequence[int], **options: Any) -> Plan:
    width = max(map(len, prompts))
    limits = [limit] * len(prompts) if isinstance(limit, int) else list(limit)
    padded = torch.tensor([[-1] * (width - len(one)) + list(one) for one in prompts])
    options["filters"] = Chain(tuple(options.get("filters", ())))
    return Plan(padded, torch.tensor(limits), **options)


def spoken(
    function: Any, strategy: Speculative, prompts: Sequence[Sequence[int]], limit: Any, **options: Any
) -> Generation:
    return strategy.run(FunctionScorer(function), plan_of(prompts, limit, **options))


def rows(found: Generation) -> list[tuple[int, ...]]:
    return [
        tuple(row[0, :length].tolist()) for row, length in zip(found.tokens, found.lengths[:, 0].tolist(), strict=True)
    ]


def distributions(kind: str, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    p, q = torch.rand(2, 8, generator=generator, dtype=torch.float64).pow(3)
    if kind == "filtered":
        p, q = p * (p >= p.topk(5).values[-1]), q * (q >= q.topk(3).values[-1])
    if kind == "greedy":
        q = torch.where(q == q.max(), 1.0, 0.0).double()
    if kind == "disjoint":
        p, q = p * (torch.arange(8) < 4), q * (torch.arange(8) >= 4)
    if kind == "equal":
        q = p.clone()
    return p / p.sum(), q / q.sum()


KINDS = ("any", "filtered", "greedy", "disjoint", "equal")


def draws(p: Tensor, claimed: Tensor, drafts: Tensor, generator: torch.Generator) -> tuple[Counter[int], float]:
    """Tokens of many verified drafts, and the rate at which drafts were kept."""
    accept, redraw = torch.rand(2, DRAWS, generator=generator, dtype=torch.float64)
    tokens, taken = verified(p.expand(DRAWS, -1), claimed.expand(DRAWS, -1), drafts, accept, redraw)
    assert bool((tokens == drafts)[taken].all())
    return Counter(tokens.tolist()), float(taken.double().mean())


@pytest.mark.parametrize("kind", KINDS)
def test_d21_a_verified_draft_has_the_distribution_of_the_target(chi_square, kind):
    generator = torch.Generator().manual_seed(KINDS.index(kind))
    p, q = distributions(kind, generator)
    drafts = torch.multinomial(q, DRAWS, replacement=True, generator=generator)
    counts, rate = draws(p, q, drafts, generator)
    assert chi_square(counts, dict(enumerate(p.tolist()))) > 1e-4
    wanted = float(torch.minimum(p, q).sum())
    assert abs(rate - wanted) <= 4.5 * math.sqrt(wanted * (1 - wanted) / DRAWS) + 1e-12


def test_d21_the_test_rejects_a_q_that_was_not_sampled_from(chi_square):
    """Drafts by argmax that claim to be from softmax, and drafts from a filter that claim to be from all."""
    generator = torch.Generator().manual_seed(0)
    p, q = distributions("any", generator)
    counts, _ = draws(p, q, q.argmax().expand(DRAWS), generator)
    assert chi_square(counts, dict(enumerate(p.tolist()))) < 1e-9
    kept = q * (q >= q.topk(3).values[-1])
    counts, _ = draws(p, q, torch.multinomial(kept, DRAWS, replacement=True, generator=generator), generator)
    assert chi_square(counts, dict(enumerate(p.tolist()))) < 1e-9


def test_d22_noise_shared_by_draft_and_check_would_be_rejected(chi_square):
    """The residual drawn with the number that the draft was drawn with: biased, and the test says so."""
    generator = torch.Generator().manual_seed(0)
    p, q = distributions("any", generator)
    shared = torch.rand(DRAWS, generator=generator, dtype=torch.float64)
    drafts = torch.searchsorted(q.cumsum(0), shared, right=True).clamp(max=7)
    accept = torch.rand(DRAWS, generator=generator, dtype=torch.float64)
    tokens, _ = verified(p.expand(DRAWS, -1), q.expand(DRAWS, -1), drafts, accept, shared)
    assert chi_square(Counter(tokens.tolist()), dict(enumerate(p.tolist()))) < 1e-9


def warm(scores: Tensor, written: list[int]) -> Tensor:
    """A mask, a penalty on what is written, a temperature and top-k, as enumeration applies them."""
    scores = scores.masked_fill((torch.arange(3) == 1) & (len(written) == 1), -torch.inf)
    history = History(torch.tensor([[2, *written]]), torch.tensor([len(written)]))
    for one in RULES:
        scores = one(scores, history)
    return scores


RULES: list[Filter] = [RepetitionPenalty(1.6), Temperature(1.3), TopP(0.95)]


def no_one_second(history: History) -> Tensor:
    return ~((torch.arange(3) == 1) & (history.lengths() == 1)[:, None])


DRAFTS: dict[str, list[Filter]] = {"other": [], "greedy": GREEDY, "filtered": [TopK(2), Temperature(0.5)]}


@pytest.mark.parametrize("draft", DRAFTS)
def test_d21_over_all_noise_sequences_have_the_distribution_of_the_target(toy, leaves, choices, draft):
    """Exact: every draft, every verdict and every redraw, each with its probability."""
    target, strategy = toy(3, 1, 1.0), Speculative(toy(3, 2, 1.0), 2, draft_filters=DRAFTS[draft])
    wanted = leaves(target, [2], 3, (0,), warm)

    def run() -> tuple[int, ...]:
        found = spoken(target, strategy, [[2]], 3, eos_ids=(0,), filters=RULES, mask=no_one_second)
        (one,) = rows(found)
        assert float(found.drawn_log_probs.double().sum()) == pytest.approx(wanted[one], abs=1e-6)
        return one

    found = choices(run)
    assert set(found) == set(wanted)
    assert found == pytest.approx({one: math.exp(log_p) for one, log_p in wanted.items()}, abs=1e-12)


@pytest.mark.parametrize(
    ("noise", "draws"),
    [
        ("seeds", 1_000),
        pytest.param("seeds", DRAWS, marks=pytest.mark.slow),
        pytest.param("generator", 20_000, marks=pytest.mark.slow),
    ],
)
def test_d22_sequences_are_drawn_with_independent_noise(toy, leaves, chi_square, noise, draws):
    """Half of the drafts are refused. Noise of draft and residual in common would spare the last ids."""
    target = toy(4, 1, 0.3)

    def draft(tokens: Tensor) -> Tensor:
        return torch.tensor([0.7, 0.1, 0.1, 0.1], dtype=torch.float64).log().expand(len(tokens), -1)

    options: dict[str, Any] = {"generator": torch.Generator().manual_seed(2)}
    if noise == "seeds":
        options = {"seeds": np.arange(draws, dtype=np.uint64)}
    found = spoken(target, Speculative(draft, 2), [[2]] * draws, 3, eos_ids=(0,), **options)
    wanted = {one: math.exp(log_p) for one, log_p in leaves(target, [2], 3, (0,)).items()}
    assert chi_square(Counter(rows(found)), wanted) > 1e-4
    assert 0.3 < float(found.extra["accepted"].sum() / found.extra["tested"].sum()) < 0.7


@settings(deadline=None, max_examples=25)
@given(
    vocabulary=st.integers(2, 6),
    limits=st.lists(st.integers(1, 12), min_size=2, max_size=2),
    lookahead=st.integers(1, 5),
    ends=st.sets(st.integers(0, 5), max_size=2),
    further=st.sampled_from([(), GREEDY, [TopK(1)], [MinP(0.5)]]),
    seeds=st.tuples(st.integers(0, 10**6), st.integers(0, 10**6)),
)
def test_d23_at_temperature_0_it_is_greedy_decoding(*, toy, vocabulary, limits, lookahead, ends, further, seeds):
    function, ends = toy(vocabulary, seeds[0]), tuple(one for one in ends if one < vocabulary)
    options: dict[str, Any] = {"eos_ids": ends, "filters": [RepetitionPenalty(1.4), NoRepeatNgram(3), *GREEDY]}
    strategy = Speculative(toy(vocabulary, seeds[1]), lookahead, draft_filters=further)
    prompts = [[1, 0, 1], [0]]
    found = spoken(function, strategy, prompts, limits, seeds=np.arange(2, dtype=np.uint64), alternatives=2, **options)
    greedy = Greedy().run(FunctionScorer(function), plan_of(prompts, limits, alternatives=2, **options))
    assert rows(found) == rows(greedy)
    assert found.finish == greedy.finish
    torch.testing.assert_close(found.log_probs, greedy.log_probs)
    torch.testing.assert_close(found.drawn_log_probs, greedy.drawn_log_probs)
    torch.testing.assert_close(found.alternative_log_probs, greedy.alternative_log_probs)
    assert found.extra["accepted"].le(found.extra["tested"]).all()
    assert found.extra["tested"].le(found.extra["drafted"]).all()


@settings(deadline=None, max_examples=15)
@given(
    lookahead=st.integers(1, 4),
    limit=st.integers(1, 9),
    seed=st.integers(0, 10**6),
)
def test_a_row_follows_its_own_seed_in_any_batch(*, toy, lookahead, limit, seed):
    strategy = Speculative(toy(5, seed + 1), lookahead)
    prompts, seeds = [[1, 4], [0], [3, 3, 3]], np.array([seed, 3, 4], dtype=np.uint64)
    options: dict[str, Any] = {"eos_ids": (2,)}
    together = spoken(toy(5, seed), strategy, prompts, limit, seeds=seeds, **options)
    for row, prompt in enumerate(prompts):
        alone = spoken(toy(5, seed), strategy, [prompt], limit, seeds=seeds[row : row + 1], **options)
        assert rows(alone)[0] == rows(together)[row]


def test_through_the_front_door_settings_of_a_row_follow_the_row(toy):
    """Sample and Speculative choose from one distribution: greedy in the first row, drawn with top-k in the second."""
    options: dict[str, Any] = {"max_new_tokens": 6, "temperature": [0.0, 1.5], "top_k": [5, 2], "seeds": [1, 2]}
    strategy = Speculative(toy(5, 1), 3, draft_filters=Temperature(torch.tensor([1.0, 0.5])))
    found = generate(toy(5, 0), [[1, 4], [0]], strategy=strategy, **options)
    greedy = generate(toy(5, 0), [1, 4], max_new_tokens=6)
    assert rows(found)[0] == rows(greedy)[0]
    for place, token in enumerate(rows(found)[1]):
        scores = toy(5, 0)(torch.tensor([[0, *rows(found)[1][:place]]])) / 1.5
        best = scores.topk(2)
        assert token in best.indices[0].tolist()
        own = scores[0, token] - best.values.logsumexp(-1)
        torch.testing.assert_close(found.drawn_log_probs[1, 0, place].double(), own[0], atol=1e-6, rtol=1e-6)


def test_a_draft_that_is_the_target_is_always_kept(toy):
    strategy = Speculative(toy(5, 0), 3)
    found = spoken(toy(5, 0), strategy, [[1]], 12, generator=torch.Generator().manual_seed(0))
    assert found.extra["acceptance_rate"].tolist() == [1.0]
    assert found.extra["target_calls"].tolist() == [1 + 12 // 4]  # the prompt, then four tokens a call
    single = spoken(toy(5, 0), strategy, [[1]], 1)
    assert single.extra["acceptance_rate"].isnan().all()
    assert single.extra["target_calls"].tolist() == [1]


def test_stop_strings_and_events(toy):
    class Letters:
        def decode(self, ids: Sequence[int]) -> str:
            return "".join("abc"[one] for one in ids)

    events: list[Event] = []
    count = 40
    found = spoken(
        toy(3, 0),
        Speculative(toy(3, 1), 4),
        [[1]] * count,
        9,
        seeds=np.arange(count, dtype=np.uint64),
        stop=("ba",),
        tokenizer=Letters(),
        on_token=events.append,
    )
    assert found.texts is not None
    for row, one in enumerate(rows(found)):
        text = Letters().decode(one)
        assert "ba" not in text[:-1]
        assert found.finish[row] == (["stop"] if text.endswith("ba") else ["length"])
        assert found.texts[row] == [text.removesuffix("ba")]
        assert tuple(event.token for event in events if event.row == row) == one
    assert {finish for (finish,) in found.finish} == {"stop", "length"}


def test_a_dead_end_ends_the_row(toy):
    def short(history: History) -> Tensor:
        return (history.lengths() < 3)[:, None].expand(-1, 4)

    found = spoken(toy(4, 0), Speculative(toy(4, 1), 5), [[1], [2]], 9, mask=short)
    assert found.lengths.tolist() == [[3], [3]]
    assert found.finish == [["dead end"], ["dead end"]]


def test_another_number_of_ids_is_refused_or_taken_for_padding(toy, leaves, choices):
    with pytest.raises(ValueError, match="`draft` must score the 3 ids of the model, got 5"):
        spoken(toy(3, 0), Speculative(toy(5, 1)), [[1]], 3)
    wanted = {one: math.exp(log_p) for one, log_p in leaves(toy(3, 0, 1.0), [1], 2).items()}
    for classes in (2, 5):
        strategy = Speculative(toy(classes, 1), 2, same_ids=True)
        found = choices(lambda one=strategy: rows(spoken(toy(3, 0, 1.0), one, [[1]], 2))[0])
        assert found == pytest.approx(wanted)


@torch.no_grad()
def test_a_draft_with_fewer_ids_drafts_nothing_after_one_that_it_has_not():
    """Embeddings refuse what they have not: in the prompt of one row, and in what the model writes."""
    torch.manual_seed(0)
    target, small = nn.Embedding(30, 30, dtype=torch.float64), nn.Embedding(20, 20, dtype=torch.float64)
    strategy, prompts = Speculative(small, 3, same_ids=True), [[25], [3], [4, 29], [7]]
    options: dict[str, Any] = {"filters": GREEDY}
    found = spoken(target, strategy, prompts, 12, **options)
    greedy = Greedy().run(FunctionScorer(target), plan_of(prompts, 12, **options))
    assert rows(found) == rows(greedy)
    assert any(max(one) >= 20 for one in rows(found))
    assert found.extra["drafted"].tolist()[0::2] == [0, 0]
    assert int(found.extra["drafted"].sum()) > 0
    with pytest.raises(ValueError, match="`draft` must score the 30 ids of the model, got 20"):
        spoken(target, Speculative(small), [[25]], 3)


def test_draft_filters_for_other_rows_are_refused(toy):
    strategy = Speculative(toy(5, 1), draft_filters=Temperature(torch.tensor([1.0, 0.5, 1.0])))
    with pytest.raises(ValueError, match=r"`Temperature.temperature` must be a number or have shape \[2\], got \(3,\)"):
        generate(toy(5, 0), [[1], [2]], strategy=strategy, max_new_tokens=2)


def test_options_that_cannot_be_are_refused(toy):
    with pytest.raises(ValueError, match="`draft_filters` must be a filter or a list of them, got None"):
        Speculative(toy(3, 0), draft_filters=None)
    with pytest.raises(ValueError, match="`lookahead` must be a whole number of at least 1, got 0"):
        Speculative(toy(3, 0), 0)
    with pytest.raises(ValueError, match="takes filters"):
        Speculative(toy(3, 0), draft_filters=["greedy"])


def tiny(name: str, seed: int) -> Any:
    import transformers

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": 0, "eos_token_id": None, "pad_token_id": 2, "initializer_range": 0.5}
    more = {"sliding_window": 6} if name == "Mistral" else {}
    config = getattr(transformers, f"{name}Config")(vocab_size=20, num_key_value_heads=1, **sizes, **special, **more)
    torch.manual_seed(seed)
    return getattr(transformers, f"{name}ForCausalLM")(config).double().eval()


@torch.no_grad()
@pytest.mark.parametrize("name", ["Llama", "Mistral"])
@pytest.mark.parametrize("close", [0.0, 0.02])
def test_with_caches_on_both_sides_it_is_greedy_decoding_also_beyond_a_window(name, close):
    """The draft is the model with its parameters moved: by nothing, and so that some drafts are refused."""
    model, draft = tiny(name, 0), tiny(name, 0)
    for parameter in draft.parameters():
        parameter.add_(close * torch.randn_like(parameter))
    plan = plan_of([[3, 4, 5, 9], [7], [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]], 24, filters=GREEDY)
    draft.train()
    found = Speculative(draft, 3).run(CachedScorer(model, rewindable=True), plan)
    assert draft.training
    whole = Greedy().run(FunctionScorer(lambda tokens: model(tokens).logits), plan)
    assert found.tokens.tolist() == whole.tokens.tolist()
    torch.testing.assert_close(found.log_probs, whole.log_probs)
    kept = found.extra["acceptance_rate"]
    assert bool((kept == 1).all()) if close == 0 else bool(((kept > 0.1) & (kept < 1)).all())
    assert int(found.extra["target_calls"].max()) < 24


def test_a_draft_may_be_a_module_that_is_no_language_model(toy):
    class Table(nn.Module):
        def forward(self, tokens: Tensor) -> Tensor:
            return toy(4, 3)(tokens)

    found = spoken(toy(4, 3), Speculative(Table(), 2), [[1]], 6, filters=[AllowedIds([0, 3])])
    assert found.extra["acceptance_rate"].tolist() == [1.0]
    assert {token for one in rows(found) for token in one} <= {0, 3}
