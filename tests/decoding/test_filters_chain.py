"""Chains, joint selections, and what `stages` tells."""

from __future__ import annotations

import math

import pytest
import torch

from unembed.decoding import (
    DRY,
    Chain,
    History,
    Joint,
    MinP,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
)

INF = math.inf


def log(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def kept(found: torch.Tensor) -> list[int]:
    return (found > -INF).nonzero().squeeze(-1).tolist()


def test_chains_are_their_filters_in_order_however_they_are_written():
    torch.manual_seed(0)
    scores = torch.randn(4, 60)
    wanted = MinP(0.2)(TopP(0.9)(TopK(9)(Temperature(0.7)(scores))))
    parts = [Temperature(0.7), TopK(9), TopP(0.9), MinP(0.2)]
    a, b, c, d = parts
    for chain in (
        a | b | c | d,
        a | (b | c) | d,
        a | [b, c, d],
        [a, b] | c | d,
        Chain((a, Chain((b, c)), d)),
        Chain(tuple(parts)),
    ):
        assert isinstance(chain, Chain)
        assert list(chain) == parts
        assert len(chain) == 4
        assert torch.equal(chain(scores), wanted)
    assert torch.equal(Chain()(scores), scores)


def test_order_matters():
    scores = log(0.4, 0.3, 0.2, 0.1)
    assert kept((TopK(2) | TopP(0.5))(scores)) == [0]  # .4 / .7 has the half
    assert kept((TopP(0.5) | TopK(2))(scores)) == [0, 1]
    assert kept((Temperature(2.0) | TopP(0.4))(scores)) == [0, 1]  # sqrt(.4) / 1.944 = .325
    assert kept((TopP(0.4) | Temperature(2.0))(scores)) == [0]


def test_joint_takes_the_mass_of_the_whole_distribution():
    scores = log(0.4, 0.3, 0.2, 0.1)
    joint = Joint((TopK(2), TopP(0.5)))
    assert kept(joint(scores)) == [0, 1]
    assert torch.equal(joint(scores)[:2], scores[:2])
    assert kept(Joint((TopK(1), TopP(0.9)))(scores)) == [0]
    assert kept(Joint((TopK(1), TopP(0.9)), min_keep=3)(scores)) == [0, 1, 2]
    assert kept((Temperature(1.0) | joint)(scores)) == [0, 1]
    assert kept(Joint((joint, TopK(1)))(scores)) == [0]


@pytest.mark.parametrize("k", [1, 3, 20])
@pytest.mark.parametrize("p", [0.0, 0.3, 0.9, 1.0])
def test_joint_is_the_intersection_and_sequential_keeps_no_more(k, p):
    torch.manual_seed(0)
    scores = torch.randn(20, 50)
    joint = Joint((TopK(k), TopP(p)))(scores) > -INF
    both = (TopK(k)(scores) > -INF) & (TopP(p)(scores) > -INF)
    assert torch.equal(joint, both)
    sequential = (TopK(k) | TopP(p))(scores) > -INF
    assert not bool((sequential & ~joint).any())


def test_stages_tell_what_is_kept_and_what_each_drops():
    scores = torch.stack([log(0.4, 0.3, 0.2, 0.1), log(0.1, 0.1, 0.1, 0.7)])
    told = (TopK(3) | TopP(0.6) | Temperature(0)).stages(scores)
    assert [one.stage for one in told] == ["scores", "TopK(k=3)", "TopP(p=0.6)", "Temperature(temperature=0)"]
    assert [[ids.tolist() for ids in one.ids] for one in told] == [
        [[0, 1, 2, 3], [3, 0, 1, 2]],
        [[0, 1, 2], [3, 0, 1]],
        [[0, 1], [3]],  # .4 / .9 is short of .6; .7 / .9 is not
        [[0], [3]],
    ]
    dropped = torch.stack([one.dropped for one in told])
    wanted = torch.tensor([[0, 0], [0.1, 0.1], [2 / 9, 2 / 9], [3 / 7, 0]], dtype=torch.float64)
    torch.testing.assert_close(dropped, wanted)
    torch.testing.assert_close(told[2].probabilities[0], torch.tensor([4 / 7, 3 / 7], dtype=torch.float64))
    for one in told:
        assert all(p.sum().item() == pytest.approx(1) for p in one.probabilities)


def test_stages_of_one_filter_of_a_tensor_and_of_a_row_without_any_score():
    scores = torch.tensor([[1.0, 0.0], [-INF, -INF]])
    told = Joint((TopK(torch.tensor([1, 2])), TopP(0.9))).stages(scores)
    assert len(told) == 2
    assert told[1].stage.startswith("Joint(filters=(TopK(k=tensor")
    assert TopK(torch.tensor([1, 2])).stages(scores)[1].stage == "TopK(k=[2])"
    assert [ids.tolist() for ids in told[1].ids] == [[0], []]
    assert told[1].dropped.tolist() == pytest.approx([1 / (1 + math.e), 0.0])


def test_history_reaches_every_filter_of_a_chain():
    chain = RepetitionPenalty(2.0) | PresencePenalty(1.0) | TopK(1)
    history = History.of([[0]], [[1]])
    scores = torch.tensor([[4.0, 3.5, 2.1]])
    assert chain(scores, history).tolist() == [[-INF, -INF, pytest.approx(2.1)]]  # 4 / 2, 3.5 / 2 - 1, 2.1
    with pytest.raises(ValueError, match="RepetitionPenalty looks at the tokens so far: pass `history`"):
        chain(scores)
    with pytest.raises(ValueError, match="DRY looks at the tokens so far: pass `history`"):
        (TopK(1) | DRY(1.0)).stages(scores)


def test_a_tensor_of_tokens_counts_as_written():
    scores = torch.zeros(2, 3)
    found = PresencePenalty(1.0)(scores, torch.tensor([[0, 1], [-1, 2]]))
    assert found.tolist() == [[-1.0, -1.0, 0.0], [0.0, 0.0, -1.0]]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Chain((TopK(1), "top-p")), "A chain takes filters, got str."),
        (lambda: Joint((TopK(1), Temperature(0.5))), "`Joint` takes filters that only exclude, got Temperature."),
        (lambda: Joint((TopK(1),), min_keep=0), "`min_keep` must be a whole number of at least 1, got 0."),
        (lambda: Joint((TopK(1),), min_keep=True), "`min_keep` must be a whole number of at least 1, got True."),
        (lambda: Chain(TopK(2)), "A chain takes a sequence of filters, got TopK(k=2, min_keep=1)."),
        (lambda: Joint(TopK(2)), "`Joint` takes a sequence of filters, got TopK(k=2, min_keep=1)."),
        (lambda: Joint(3), "`Joint` takes a sequence of filters, got 3."),
        (lambda: TopK(2) | None, "`|` takes a sequence of filters, got None."),
        (lambda: "ab" | TopK(2), "`|` takes a sequence of filters, got 'ab'."),
        (lambda: TopK(2) | [3], "A chain takes filters, got int."),
    ],
)
def test_what_is_wrong_is_said_in_one_line(make, message):
    with pytest.raises(ValueError) as told:  # noqa: PT011
        make()
    assert str(told.value) == message
