"""Beam search against exhaustive search, against one without a stopping rule, and on public bug cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from unembed.decoding import (
    AllowedIds,
    Beam,
    CachedScorer,
    FunctionScorer,
    Generation,
    History,
    NoRepeatNgram,
    RepetitionPenalty,
    generate,
)
from unembed.decoding._plan import Event, Plan
from unembed.decoding.filters import Chain

pytestmark = pytest.mark.usefixtures("way")
PENALTIES = (-1.0, -0.5, 0.0, 0.5, 1.0, 2.0)


@pytest.fixture(scope="module")
def toy(toy, way):
    """In float32 where there is a compiled way for it."""
    if way == "plain":
        return toy

    def made(*arguments, **options):
        function = toy(*arguments, **options)
        return lambda ids: function(ids).float()

    return made


def plan_of(prompts: Sequence[Sequence[int]], limit: int | Sequence[int], **options: Any) -> Plan:
    width = max(map(len, prompts))
    limits = [limit] * len(prompts) if isinstance(limit, int) else list(limit)
    padded = torch.tensor([[-1] * (width - len(one)) + list(one) for one in prompts])
    if "filters" in options:
        options["filters"] = Chain(tuple(options["filters"]))
    return Plan(padded, torch.tensor(limits), **options)


def searched(function: Any, beam: Beam, prompts: Sequence[Sequence[int]], limit: Any, **options: Any) -> Generation:
    return beam.run(FunctionScorer(function), plan_of(prompts, limit, **options))


def rows(found: Generation, row: int = 0) -> list[tuple[int, ...]]:
    """The sequences of a prompt."""
    lengths = found.lengths[row][: len(found.finish[row])]
    return [tuple(found.tokens[row, r, :length].tolist()) for r, length in enumerate(lengths.tolist())]


def ranked(leaves: dict[tuple[int, ...], float], penalty: float) -> list[tuple[float, tuple[int, ...]]]:
    scored = [(log_prob / len(one) ** penalty, one) for one, log_prob in leaves.items()]
    return sorted(scored, key=lambda one: -one[0])


@settings(deadline=None, max_examples=60)
@given(
    vocabulary=st.integers(2, 4),
    limit=st.integers(1, 4),
    ends=st.sets(st.integers(0, 3), max_size=2),
    penalty=st.sampled_from(PENALTIES),
    seed=st.integers(0, 10**6),
    returns=st.integers(1, 6),
)
def test_with_as_many_beams_as_prefixes_it_is_exhaustive_search(
    *, toy, leaves, vocabulary, limit, ends, penalty, seed, returns
):
    function, ends = toy(vocabulary, seed), tuple(one for one in ends if one < vocabulary)
    width = max(vocabulary ** (limit - 1), returns)
    found = searched(function, Beam(width, penalty, returns=returns), [[1, 0]], limit, eos_ids=ends)
    wanted = ranked(leaves(function, [1, 0], limit, ends), penalty)[:returns]
    assert rows(found) == [one for _, one in wanted]
    torch.testing.assert_close(
        found.scores[0, : len(wanted)], torch.tensor([score for score, _ in wanted], dtype=torch.float64)
    )


def plain(function: Any, prompt: list[int], limit: int, ends: Sequence[int], beam: Beam) -> list[tuple[float, Any]]:
    """Beam search as one would write it down: no stopping rule, all candidates in one list."""
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    kept: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, limit + 1):
        going = []
        for total, written in running:
            log_probs = function(torch.tensor([[*prompt, *written]]))[0].log_softmax(-1).tolist()
            for token, own in enumerate(log_probs):
                one = (total + own, (*written, token))
                if token in ends or length == limit:
                    kept.append((one[0] / length**beam.length_penalty, one[1]))
                else:
                    going.append(one)
        running = sorted(going, key=lambda one: -one[0])[: beam.width]
    return sorted(kept, key=lambda one: -one[0])[: beam.returns]


@settings(deadline=None, max_examples=60)
@given(
    vocabulary=st.integers(2, 12),
    limit=st.integers(1, 7),
    ends=st.integers(0, 3),
    penalty=st.sampled_from(PENALTIES),
    width=st.integers(1, 5),
    returns=st.integers(1, 2),
    spread=st.sampled_from([0.1, 1.0, 4.0]),
    seed=st.integers(0, 10**6),
)
def test_the_search_stops_early_only_where_nothing_better_can_come(
    *, toy, vocabulary, limit, ends, penalty, width, returns, spread, seed
):
    function, ends = toy(vocabulary, seed, spread), tuple(range(min(ends, vocabulary - 1)))
    beam = Beam(width, penalty, returns=min(width, returns))
    found = searched(function, beam, [[1]], limit, eos_ids=ends)
    wanted = plain(function, [1], limit, ends, beam)
    assert rows(found) == [one for _, one in wanted]


def scripted(chances: dict[tuple[int, ...], list[float]], default: list[float]) -> Any:
    """Probabilities after what is written behind a prompt of one token."""

    def function(tokens: Tensor) -> Tensor:
        return torch.tensor(
            [chances.get(tuple(row[1:]), default) for row in tokens.tolist()], dtype=torch.float64
        ).log()

    return function


def test_a_long_sequence_may_still_win_when_its_next_score_would_not():
    """After three tokens -log 0.65 / 3 is kept, and a hypothesis of sum log 0.3 would have log 0.3 / 4 next."""
    chances = {(): [0.05, 0.3, 0.65], (2,): [0, 0, 1], (2, 2): [1, 0, 0]}
    found = searched(scripted(chances, [0, 1, 0]), Beam(2, 1.0), [[1]], 10, eos_ids=(0,))
    assert rows(found) == [(1,) * 10]
    assert float(found.scores) == pytest.approx(math.log(0.3) / 10)


def test_with_a_negative_penalty_the_next_score_decides():
    """log 0.2 is kept; the other hypothesis would have 10 log 0.75 at the end, but 2 log 0.75 next."""
    chances = {(): [0.2, 0.75, 0.05], (1,): [1, 0, 0]}
    found = searched(scripted(chances, [0, 1, 0]), Beam(2, -1.0), [[1]], 10, eos_ids=(0,))
    assert rows(found) == [(1, 0)]
    assert float(found.scores) == pytest.approx(2 * math.log(0.75))


@pytest.mark.parametrize("penalty", [1.0, 0.0, -1.0])
def test_the_search_of_a_prompt_ends_as_soon_as_nothing_better_can_come(penalty):
    """An end of 0.9 at once; beside it log 0.1, which with a penalty of 1 comes before from 22 tokens on."""
    seen = []

    def function(tokens: Tensor) -> Tensor:
        seen.append(tokens.shape[1])
        return torch.tensor([[0.9, 0.1]] if tokens.shape[1] == 1 else [[0.0, 1.0]], dtype=torch.float64).log()

    assert rows(searched(function, Beam(1, penalty), [[1]], 21, eos_ids=(0,))) == [(0,)]
    assert len(seen) == 1
    long = rows(searched(function, Beam(1, penalty), [[1]], 22, eos_ids=(0,)))
    assert long == [(1,) * 22 if penalty > 0 else (0,)]


@settings(deadline=None, max_examples=30)
@given(
    prompts=st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=5), min_size=1, max_size=4),
    limits=st.lists(st.integers(1, 6), min_size=4, max_size=4),
    penalty=st.sampled_from(PENALTIES),
    width=st.integers(1, 4),
    seed=st.integers(0, 10**6),
)
def test_a_row_is_the_row_alone_and_its_scores_are_true(*, toy, prompts, limits, penalty, width, seed):
    function, limits = toy(6, seed), limits[: len(prompts)]
    beam = Beam(width, penalty, returns=width)
    together = searched(function, beam, prompts, limits, eos_ids=(2,), pad_id=5)
    for row, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        alone = searched(function, beam, [prompt], [limit], eos_ids=(2,), pad_id=5)
        assert rows(together, row) == rows(alone)
        assert len(set(rows(together, row))) == len(rows(together, row))
        for r, one in enumerate(rows(together, row)):
            scores = torch.cat([function(torch.tensor([[*prompt, *one[:i]]])) for i in range(len(one))])
            own = scores.log_softmax(-1).gather(1, torch.tensor(one)[:, None]).squeeze(1)
            torch.testing.assert_close(together.log_probs[row, r, : len(one)], own.float())
            torch.testing.assert_close(together.drawn_log_probs[row, r, : len(one)], own.float())
            torch.testing.assert_close(
                together.scores[row, r], own.double().sum() / len(one) ** penalty, rtol=1e-5, atol=1e-5
            )
            assert bool((together.tokens[row, r, len(one) :] == 5).all())
            assert together.finish[row][r] == ("eos" if one[-1] == 2 else "length")


def test_a_mask_is_asked_with_the_tokens_of_each_hypothesis(toy, leaves):
    """No token twice, once by a filter and once by a callback: both equal enumeration with the same rule."""

    def fresh(history: History) -> Tensor:
        seen = torch.zeros(len(history.tokens), 5, dtype=torch.bool)
        for row, tokens in zip(seen, history.part("written").tolist(), strict=True):
            row[[token for token in tokens if token >= 0]] = True
        return ~seen

    def allowed(scores: Tensor, written: list[int]) -> Tensor:
        return scores.index_fill(1, torch.tensor(written, dtype=torch.int64), -torch.inf)

    for seed in range(5):
        function = toy(5, seed)
        wanted = ranked(leaves(function, [3], 4, (0,), allowed), 1.0)[:8]
        beam = Beam(64, returns=8)
        by_filter = searched(function, beam, [[3]], 4, eos_ids=(0,), filters=[NoRepeatNgram(1, scope="written")])
        by_mask = searched(function, beam, [[3]], 4, eos_ids=(0,), mask=fresh)
        assert rows(by_filter) == rows(by_mask) == [one for _, one in wanted]
        torch.testing.assert_close(by_mask.scores[0], torch.tensor([score for score, _ in wanted], dtype=torch.float64))


def test_a_callback_can_force_a_phrase(toy):
    """Where a 2 stands, 4, 1 must follow; before the fourth token, a 2 must have come."""

    def phrase(history: History) -> Tensor:
        allowed = torch.ones(len(history.tokens), 6, dtype=torch.bool)
        for row, tokens in zip(allowed, history.part("written").tolist(), strict=True):
            own = [token for token in tokens if token >= 0]
            if 2 in own and len(own) - own.index(2) <= 2:
                row[:] = False
                row[(4, 1)[len(own) - own.index(2) - 1]] = True
            elif 2 not in own and len(own) == 3:
                row[:] = False
                row[2] = True
            elif 2 not in own:
                row[0] = False  # no end without the phrase
        return allowed

    free = searched(toy(6, 3), Beam(6, returns=6), [[1]], 8, eos_ids=(0,))
    forced = searched(toy(6, 3), Beam(6, returns=6), [[1]], 8, eos_ids=(0,), mask=phrase)
    assert not all(one[one.index(2) : one.index(2) + 3] == (2, 4, 1) for one in rows(free) if 2 in one)
    for one in rows(forced):
        assert one[one.index(2) : one.index(2) + 3] == (2, 4, 1)
    assert len(rows(forced)) == 6


def test_early_stopping_takes_what_has_ended():
    """Ends are the second best at each step, so two of them are among two candidates after two steps."""
    table = torch.tensor([[0.3, 0.6, 0.1]], dtype=torch.float64).log()
    calls = []

    def function(tokens: Tensor) -> Tensor:
        calls.append(tokens.shape[1])
        return table.expand(len(tokens), -1)

    options: dict[str, Any] = {"eos_ids": (0,)}
    early = searched(function, Beam(1, 1.0, early_stopping=True), [[1]], 9, **options)
    assert max(calls) == 9  # an end that is never the best candidate of one beam does not count
    assert rows(early) == [(1,) * 9]
    calls.clear()
    early = searched(function, Beam(2, 1.0, early_stopping=True, returns=2), [[1]], 9, **options)
    assert max(calls) == 2
    assert rows(early) == [(1, 0), (0,)]
    late = searched(function, Beam(2, 1.0, returns=2), [[1]], 9, **options)
    assert rows(late)[0] == (1,) * 9


def test_d12_length_counts_no_prompt():
    found = searched(
        lambda tokens: torch.zeros(len(tokens), 3), Beam(16, returns=16), [[1, 1, 1, 1, 2], [1]], 3, eos_ids=(0,)
    )
    assert sorted({len(one) for one in rows(found, 0)}) == [1, 2, 3]
    torch.testing.assert_close(found.scores, torch.full_like(found.scores, -math.log(3)))


def test_d13_padding_is_the_pad_id_and_d26_one_end(toy):
    found = searched(toy(5, 3), Beam(3, 1.0), [[2, 3], [4], [0]], 8, eos_ids=(1,), pad_id=0)
    lengths = found.lengths.squeeze(1).tolist()
    assert min(lengths) < max(lengths)  # one row ends before the other
    for row, length in enumerate(lengths):
        assert bool((found.tokens[row, 0, length:] == 0).all())
        assert (found.tokens[row, 0] == 1).sum() == (found.finish[row][0] == "eos")
    assert ["eos"] in found.finish


def test_d14_many_ends_leave_enough_hypotheses():
    """Ten ends, each more probable than all else, do not crowd out what goes on."""
    scores = torch.linspace(3.0, 0.0, 16, dtype=torch.float64)
    found = searched(
        lambda tokens: scores.expand(len(tokens), -1), Beam(3, 2.0, returns=3), [[12]], 6, eos_ids=range(10)
    )
    assert rows(found)[0][:-1] == (10,) * 5
    assert len(rows(found)) == 3


def test_d15_where_one_sequence_exists_one_is_returned(toy):
    def one_way(history: History) -> Tensor:
        allowed = torch.ones(len(history.tokens), 5, dtype=torch.bool)
        allowed[history.tokens[:, 0] == 2] = torch.arange(5) == 3  # only in the row whose prompt is 2
        return allowed

    found = searched(toy(5, 0), Beam(4, returns=4), [[2], [1]], 3, mask=one_way)
    assert rows(found, 0) == [(3, 3, 3)]
    assert found.finish[0] == ["length"]
    assert found.scores[0].tolist() == [0.0, -math.inf, -math.inf, -math.inf]
    assert len(set(rows(found, 1))) == 4


def test_d18_65_beams_of_262144():
    scores = torch.randn(1, 262_144, generator=torch.Generator().manual_seed(0))
    found = searched(lambda tokens: scores.expand(len(tokens), -1), Beam(65, returns=65), [[0]], 2)
    best = scores[0].topk(65)
    pairs = (best.values[:, None] + best.values).flatten().topk(65).values.double()
    wanted = (pairs - 2 * scores[0].double().logsumexp(0)) / 2
    torch.testing.assert_close(found.scores[0], wanted, atol=1e-6, rtol=0)


def test_d24_only_allowed_ids(toy):
    found = searched(toy(9, 2), Beam(4, returns=4), [[1]], 5, eos_ids=(0,), filters=[AllowedIds([3, 7, 0])])
    assert {token for one in rows(found) for token in one} <= {0, 3, 7}
    assert len(rows(found)) == 4


def test_dead_ends_are_returned_where_nothing_else_was_found(toy):
    def short(history: History) -> Tensor:
        return (history.lengths() < 2)[:, None].expand(-1, 4)

    stuck = searched(toy(4, 0), Beam(2, returns=2), [[1]], 5, mask=short)
    assert [len(one) for one in rows(stuck)] == [2, 2]
    assert stuck.finish[0] == ["dead end"] * 2
    ended = searched(toy(4, 0), Beam(2, returns=2), [[1]], 5, mask=short, eos_ids=(0,))
    assert set(ended.finish[0]) == {"eos"}
    nothing = searched(
        toy(4, 0), Beam(2), [[1]], 5, mask=lambda history: torch.zeros(len(history.tokens), 4, dtype=torch.bool)
    )
    assert rows(nothing) == [()]
    assert nothing.finish == [["dead end"]]


class Letters:
    """A token a letter."""

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("abcdefghijkl"[one] for one in ids)


def test_stop_strings_end_a_hypothesis_and_texts_and_events_are_told(toy, leaves):
    events: list[Event] = []
    found = searched(
        toy(3, 5), Beam(27, returns=27), [[1], [0]], 4, stop=("ab",), tokenizer=Letters(), on_token=events.append
    )
    for row, prompt in enumerate(([1], [0])):
        every = leaves(toy(3, 5), prompt, 4)
        cut: dict[tuple[int, ...], float] = {}
        for one in every:
            text = Letters().decode(one)
            own = one[: text.index("ab") + 2] if "ab" in text else one
            scores = torch.cat([toy(3, 5)(torch.tensor([[*prompt, *own[:i]]])) for i in range(len(own))])
            cut[own] = float(scores.log_softmax(-1).gather(1, torch.tensor(own)[:, None]).sum())
        wanted = ranked(cut, 1.0)[:27]
        assert rows(found, row) == [one for _, one in wanted]
        assert found.texts is not None
        for text, one, finish in zip(found.texts[row], rows(found, row), found.finish[row], strict=True):
            assert text == Letters().decode(one).split("ab")[0]
            assert finish == ("stop" if Letters().decode(one).endswith("ab") else "length")
        told = [event for event in events if event.row == row]
        assert tuple(event.token for event in told) == rows(found, row)[0]
        assert "".join(event.text or "" for event in told) == found.texts[row][0]
        assert [event.finish for event in told] == [*[None] * (len(told) - 1), found.finish[row][0]]


def test_alternatives_are_those_of_the_place(toy):
    function = toy(6, 4)
    found = searched(function, Beam(3, returns=2), [[2]], 3, alternatives=2, filters=[AllowedIds([1, 2, 5])])
    assert found.alternative_ids is not None
    assert found.alternative_log_probs is not None
    for r, one in enumerate(rows(found)):
        for place in range(len(one)):
            best = function(torch.tensor([[2, *one[:place]]])).log_softmax(-1)[0].topk(2)
            assert found.alternative_ids[0, r, place].tolist() == best.indices.tolist()
            torch.testing.assert_close(found.alternative_log_probs[0, r, place], best.values.float())
    assert bool((found.log_probs[:, :, :3] < found.drawn_log_probs[:, :, :3]).any())


def test_through_the_front_door_settings_of_a_row_follow_its_hypotheses(toy):
    options: dict[str, Any] = {"max_new_tokens": 5, "eos_ids": 0, "strategy": Beam(3, 0.0, returns=3)}
    heat, penalty = torch.tensor([0.5, 3.0]), torch.tensor([1.0, 1.7])
    together = generate(
        toy(6, 9), [[1, 2], [3]], temperature=heat, filters=RepetitionPenalty(penalty), top_k=[6, 2], **options
    )
    for row, (prompt, top_k) in enumerate([([1, 2], 6), ([3], 2)]):
        filters = RepetitionPenalty(float(penalty[row]))
        alone = generate(toy(6, 9), prompt, temperature=float(heat[row]), filters=filters, top_k=top_k, **options)
        assert rows(together, row) == rows(alone)
        torch.testing.assert_close(together.scores[row], alone.scores[0], atol=1e-6, rtol=1e-6)


def test_scores_in_half_precision_are_summed_in_a_wider_one():
    scores = torch.tensor([[256.0, 258.0, 250.0]], dtype=torch.bfloat16)
    found = searched(lambda tokens: scores.expand(len(tokens), -1), Beam(2), [[0]], 3)
    assert rows(found) == [(1, 1, 1)]
    torch.testing.assert_close(found.scores[0, 0], scores.double().log_softmax(-1)[0, 1], atol=1e-6, rtol=0)


def test_scores_that_are_no_numbers_are_refused():
    with pytest.raises(ValueError, match="expected finite scores or -inf"):
        searched(lambda tokens: torch.full((len(tokens), 3), torch.nan), Beam(2), [[0]], 3)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_stop_strings_take_no_place_from_hypotheses_that_go_on(width):
    """Enumerated: three times the third token, then the end, at (3 log .28 + log .3) / 16."""

    class Words:
        def decode(self, ids: Sequence[int]) -> str:
            return "".join(("S.", "S,", "a", "e")[one] for one in ids)

    found = searched(scripted({}, [0.3, 0.29, 0.28, 0.13]), Beam(width, 2.0), [[1]], 4, stop=("S",), tokenizer=Words())
    assert rows(found) == [(2, 2, 2, 0)]
    assert float(found.scores) == pytest.approx((3 * math.log(0.28) + math.log(0.3)) / 16)


@settings(deadline=None, max_examples=100)
@given(
    vocabulary=st.integers(4, 12),
    limit=st.integers(1, 5),
    stops=st.lists(
        st.sampled_from("abcdefghijkl") | st.text("abcdef", min_size=2, max_size=2), min_size=4, max_size=12
    ),
    ends=st.integers(0, 2),
    penalty=st.sampled_from([0.0, 1.0, 2.0]),
    spread=st.sampled_from([0.1, 0.5, 2.0]),
    width=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_with_stop_strings_it_is_the_search_written_down(
    *, toy, vocabulary, limit, stops, ends, penalty, spread, width, seed
):
    """All candidates in one list, looked at in order until `width` go on."""
    function, last = toy(vocabulary, seed, spread), range(min(ends, vocabulary - 1))
    running: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    kept: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, limit + 1):
        pool = []
        for total, written in running:
            own = function(torch.tensor([[1, *written]]))[0].log_softmax(-1).tolist()
            pool += [(total + one, (*written, token)) for token, one in enumerate(own)]
        running = []
        for total, written in sorted(pool, key=lambda one: -one[0]):
            if written[-1] in last:
                kept.append((total / length**penalty, written))
            elif len(running) < width:
                stopped = any(one in "".join("abcdefghijkl"[token] for token in written) for one in stops)
                if stopped or length == limit:
                    kept.append((total / length**penalty, written))
                else:
                    running.append((total, written))
    wanted = max(kept, default=None, key=lambda one: one[0])
    found = searched(
        function, Beam(width, penalty), [[1]], limit, eos_ids=tuple(last), stop=tuple(stops), tokenizer=Letters()
    )
    assert wanted is not None
    assert float(found.scores) == pytest.approx(wanted[0])
    assert rows(found) == [wanted[1]]


def test_looking_for_stop_strings_decodes_a_few_tokens_a_step(toy):
    """Not the whole text again for each candidate: the work grows with the length."""
    count = 0

    class Counting(Letters):
        def decode(self, ids: Sequence[int]) -> str:
            nonlocal count
            count += len(ids)
            return super().decode(ids)

    seen = []
    for limit in (50, 100):
        count = 0
        searched(toy(6, 1), Beam(3, 1.0), [[1]], limit, stop=("abcdefabc",), tokenizer=Counting())
        seen.append(count)
    assert seen[1] < 2.5 * seen[0]


def test_an_end_named_twice_is_one_end(toy):
    found = generate(toy(4, 1), [[1]], strategy=Beam(4, returns=4), max_new_tokens=3, eos_ids=[0, 0, 2, 0])
    once = generate(toy(4, 1), [[1]], strategy=Beam(4, returns=4), max_new_tokens=3, eos_ids=[0, 2])
    assert len(set(rows(found))) == 4
    assert rows(found) == rows(once)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"width": 0}, "`width` must be a whole number of at least 1, got 0"),
        ({"width": 2, "returns": 3}, "`returns` must be at most `width`, got 3 of 2"),
        ({"length_penalty": math.nan}, "`length_penalty` must lie in"),
        ({"length_penalty": "a"}, r"`length_penalty` must lie in \[-20, 20\], got 'a'"),
        ({"early_stopping": "never"}, "`early_stopping` must be True or False, got 'never'"),
    ],
)
def test_options_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Beam(**options)


def tiny_llama(vocabulary: int, seed: int = 0) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=vocabulary, **sizes, initializer_range=0.5, bos_token_id=0, eos_token_id=1, pad_token_id=2
    )
    return LlamaForCausalLM(config).double().eval()


@torch.no_grad()
@pytest.mark.parametrize("penalty", PENALTIES)
def test_with_a_cache_it_is_the_search_without_and_that_of_transformers_where_both_are_exhaustive(penalty):
    model = tiny_llama(5)
    prompts, beam = [[3, 4, 0], [2]], Beam(25, penalty, returns=3)
    plan = plan_of(prompts, 3, eos_ids=(1,), pad_id=2)
    found = beam.run(CachedScorer(model), plan)
    again = searched(lambda tokens: model(tokens).logits, beam, prompts, 3, eos_ids=(1,), pad_id=2)
    assert found.tokens.tolist() == again.tokens.tolist()
    torch.testing.assert_close(found.scores, again.scores, atol=1e-9, rtol=0)
    for row, prompt in enumerate(prompts):
        options: dict[str, Any] = {"length_penalty": penalty, "early_stopping": "never", "do_sample": False}
        theirs = model.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            num_beams=25,
            num_return_sequences=1,
            max_new_tokens=3,
            return_dict_in_generate=True,
            output_scores=True,
            **options,
        )
        length = int(found.lengths[row, 0])
        assert theirs.sequences[0, len(prompt) : len(prompt) + length].tolist() == list(rows(found, row)[0])
        torch.testing.assert_close(theirs.sequences_scores[0].double(), found.scores[row, 0], atol=1e-6, rtol=1e-6)


def test_a_search_that_finds_fewer_sequences_gives_as_many_as_there_are(toy):
    """One prompt may only end, the other may not."""

    def mask(history):
        allowed = torch.ones(len(history.tokens), 5, dtype=torch.bool)
        allowed[history.rows == 0] = torch.arange(5) == 2
        allowed[history.rows == 1, 2] = False
        return allowed

    out = generate(toy(5, 1), [[1], [3]], strategy=Beam(3, returns=3), eos_ids=[2], mask=mask, max_new_tokens=2)
    assert out.lengths.tolist() == [[1, 0, 0], [2, 2, 2]]
    assert out.scores[0, 1:].tolist() == [-math.inf, -math.inf]
    assert out.finish == [["eos"], ["length"] * 3]
    assert [len(one) for one in out.sequences()] == [1, 2, 2, 2]


def test_a_limit_that_no_number_can_be_raised_to_is_no_matter_below_zero(toy):
    out = generate(toy(5, 1), [[1]], strategy=Beam(2, length_penalty=-20.0), eos_ids=range(5), max_new_tokens=2**62)
    assert out.finish == [["eos"]]
