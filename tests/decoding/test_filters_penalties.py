"""Repetition, presence and frequency penalties: once per id or by the count, and of which tokens."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.decoding import FrequencyPenalty, History, PresencePenalty, RepetitionPenalty
from unembed.decoding.filters import _penalties

INF = math.inf
KINDS = {"repetition": RepetitionPenalty, "presence": PresencePenalty, "frequency": FrequencyPenalty}
tokens = st.lists(st.integers(0, 9), max_size=12)


@settings(deadline=None)
@given(
    texts=st.lists(tokens, min_size=6, max_size=6),
    penalty=st.floats(0.1, 5),
    scope=st.sampled_from(["all", "written", "prompt"]),
    window=st.none() | st.integers(1, 15),
)
@pytest.mark.parametrize("kind", KINDS)
def test_is_its_definition_for_every_scope_and_window(kind, texts, penalty, scope, window):
    prompts, outputs = texts[:3], texts[3:]
    scores = 3 * torch.randn(3, 10, dtype=torch.float64, generator=torch.Generator().manual_seed(len(prompts[0])))
    scores[0, 3] = -INF
    found = KINDS[kind](penalty, scope=scope, window=window)(scores, History.of(prompts, outputs))
    for row, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        marked = [(one, "prompt") for one in prompt] + [(one, "written") for one in output]
        marked = marked if window is None else marked[-window:]
        counted = [one for one, where in marked if scope in ("all", where)]
        wanted = _penalties._reference(scores[row], torch.tensor(counted), **{kind: penalty})
        torch.testing.assert_close(found[row], wanted)


def test_d9_the_classical_penalty_depends_on_a_constant_and_the_variant_does_not():
    history = torch.tensor([[0]])
    scores = torch.tensor([[2.0, 1.0, 0.0]], dtype=torch.float64)
    found, constant = [], []
    for offset in (0, 5, -5):
        found.append(RepetitionPenalty(1.5)(scores + offset, history).softmax(-1)[0, 0].item())
        constant.append(RepetitionPenalty(1.5, of="log_probs")(scores + offset, history).softmax(-1)[0, 0].item())
    assert found == pytest.approx([0.505, 0.162, 0.307], abs=5e-4)
    p = scores.softmax(-1)[0]  # a penalty of 1.5 on log p is p^1.5
    wanted = (p[0] ** 1.5 / (p[0] ** 1.5 + p[1] + p[2])).item()
    assert constant == pytest.approx([wanted] * 3, abs=1e-12)


def test_d10_a_negative_score_falls_and_an_id_counts_once():
    found = RepetitionPenalty(1.5)(torch.tensor([[-2.0, 3.0]]), torch.tensor([[0, 0]]))
    assert found.tolist() == [[-3.0, 3.0]]
    scores = torch.zeros(1, 8)
    scores[0, 7] = 3.0
    assert RepetitionPenalty(1.5)(scores, torch.tensor([[7, 7, 7]]))[0, 7] == 2.0
    assert PresencePenalty(0.5)(scores, torch.tensor([[7, 7, 7]]))[0, 7] == 2.5
    assert FrequencyPenalty(0.5)(scores, torch.tensor([[7, 7, 7]]))[0, 7] == 1.5


@pytest.mark.parametrize("kind", [RepetitionPenalty, PresencePenalty, FrequencyPenalty])
def test_d11_padding_in_front_is_not_counted(kind):
    torch.manual_seed(0)
    scores = torch.randn(2, 5)
    together = History.of([[0, 0, 3], [2]], [[1, 1], [0, 4]])
    assert together.tokens.tolist() == [[0, 0, 3, 1, 1], [-1, -1, 2, 0, 4]]
    found = kind(1.4)(scores, together)
    for row, (prompt, output) in enumerate([([0, 0, 3], [1, 1]), ([2], [0, 4])]):
        alone = kind(1.4)(scores[row : row + 1], History.of([prompt], [output]))
        assert torch.equal(found[row], alone[0])


@pytest.mark.parametrize("kind", [RepetitionPenalty, PresencePenalty, FrequencyPenalty])
def test_one_number_a_row(kind):
    torch.manual_seed(0)
    scores, history = torch.randn(3, 6), torch.tensor([[1, 1, 2], [0, 5, 5], [3, 3, 3]])
    values = [0.5, 1.0, 2.0]
    found = kind(torch.tensor(values))(scores, history)
    for row, value in enumerate(values):
        assert torch.equal(found[row], kind(value)(scores[row : row + 1], history[row : row + 1])[0])


@pytest.mark.parametrize("of", ["scores", "log_probs"])
def test_gradients_count_a_repeated_id_once(of):
    scores = torch.tensor([[1.0, -2.0, 3.0], [-INF, -INF, -INF]], dtype=torch.float64, requires_grad=True)
    history = torch.tensor([[2, 2, 2, 1], [0, 0, 0, 0]])

    def function(scores):
        found = RepetitionPenalty(1.5, of=of)(scores[:1], history[:1])
        return FrequencyPenalty(0.1)(found, history[:1])

    assert torch.autograd.gradcheck(function, scores.detach()[:1].requires_grad_())
    found = RepetitionPenalty(1.5, of=of)(scores, history)
    assert found[1].tolist() == [-INF] * 3
    (slope,) = torch.autograd.grad(found[0].square().sum(), scores)
    assert bool(slope.isfinite().all())


def test_no_tokens_so_far_change_nothing():
    scores = torch.randn(2, 4)
    for kind in (RepetitionPenalty, PresencePenalty, FrequencyPenalty):
        assert torch.equal(kind(2.0)(scores, History.of([[], []], [[], []])), scores)


def test_an_excluded_score_stays_excluded_and_a_huge_penalty_stays_finite():
    history = torch.tensor([[0, 1, 2]])
    found = RepetitionPenalty(1e30)(torch.tensor([[-INF, -3e38, 3e38]]), history)
    assert found[0, 0] == -INF
    assert bool(found[0, 1:].isfinite().all())
    found = RepetitionPenalty(1e-30)(torch.tensor([[-INF, -3e38, 3e38]]), history)
    assert bool(found[0, 1:].isfinite().all())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: RepetitionPenalty(0.0), "`penalty` must be more than 0 and at most 1e+30, got 0.0."),
        (lambda: RepetitionPenalty(1.1, scope="text"), "`scope` must be all, written or prompt, got 'text'."),
        (lambda: RepetitionPenalty(1.1, of="p"), "`of` must be scores or log_probs, got 'p'."),
        (lambda: PresencePenalty(0.1, window=0), "`window` must be at least 1, got 0."),
        (
            lambda: PresencePenalty(0.1)(torch.zeros(1, 3)),
            "PresencePenalty looks at the tokens so far: pass `history`.",
        ),
        (
            lambda: FrequencyPenalty(0.1)(torch.zeros(1, 3), torch.tensor([[3]])),
            "`history` holds id 3, but scores have 3 classes.",
        ),
        (
            lambda: FrequencyPenalty(0.1)(torch.zeros(2, 3), torch.tensor([[2]])),
            "`history` must have one row for each of 2 rows of scores, got 1.",
        ),
        (
            lambda: FrequencyPenalty(0.1)(torch.zeros(1, 3), torch.tensor([[2.0]])),
            "`history` must be integers [B, T], got torch.float32 (1, 1).",
        ),
    ],
)
def test_what_is_wrong_is_said_in_one_line(make, message):
    with pytest.raises(ValueError) as told:  # noqa: PT011
        make()
    assert str(told.value) == message
