"""Heads that decode: top-k without all scores, exact at any shape, and draws that follow their seeds."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare
from torch import Tensor

from unembed import heads, ops
from unembed.heads import _adaptive, _best_first, _hierarchical
from unembed.testing._checks_decode import chi_square

KINDS = list(dict.fromkeys(heads.HEADS.values()))
TREES = ["huffman", "balanced", "classes"]
WHOLE = 1 << 40  # a limit that no search reaches


def _examples(in_features: int = 4, out_features: int = 9) -> list[Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [
            pytest.param(head.double(), id=f"{kind.__name__}-{place}")
            for kind in KINDS
            for place, head in enumerate(kind.examples(in_features, out_features))
        ]


def tree_head(width: int, vocab: int, tree: str, *, seed: int = 0, spread: float = 1.0) -> heads.HierarchicalSoftmax:
    torch.manual_seed(seed)
    head = heads.HierarchicalSoftmax(width, vocab, tree=tree, dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_().mul_(spread)
    return head


def is_topk(head: heads.Head, hidden: Tensor, found: tuple[Tensor, Tensor], k: int) -> None:
    """Values are those of `log_prob.topk`; among equals any tokens will do, each once."""
    values, tokens = found
    truth = head.log_prob(hidden).detach()
    torch.testing.assert_close(values, truth.topk(k, -1).values)
    torch.testing.assert_close(truth.gather(-1, tokens), values)
    ordered = tokens.sort(-1).values
    assert (ordered[..., 1:] != ordered[..., :-1]).all()


@settings(deadline=None, max_examples=150)
@given(
    tokens=st.integers(0, 5),
    width=st.integers(1, 5),
    vocab=st.integers(2, 70),
    tree=st.sampled_from(TREES),
    scale=st.sampled_from([0.0, 0.3, 2.0, 20.0]),
    whole_numbers=st.booleans(),  # makes ties
    data=st.data(),
)
def test_topk_is_that_of_all_log_probabilities_for_every_shape(
    *, tokens, width, vocab, tree, scale, whole_numbers, data
):
    k = data.draw(st.integers(1, vocab) | st.just(vocab))
    share = data.draw(st.sampled_from([1e3, 20, 2]))  # from no limit to one that is reached
    head = tree_head(width, vocab, tree, seed=vocab)
    hidden = scale * torch.randn(tokens, width, dtype=torch.float64)
    if whole_numbers:
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.round_()
        hidden = hidden.round()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_hierarchical, "_NODES", share)
        patch.setattr(_hierarchical, "_CLASSES", share)
        is_topk(head, hidden, head.topk(hidden, k), k)


@settings(deadline=None, max_examples=100)
@given(
    tokens=st.integers(1, 4),
    vocab=st.integers(2, 70),
    tree=st.sampled_from(["huffman", "balanced"]),
    scale=st.sampled_from([0.0, 0.3, 2.0, 20.0]),
    limit=st.sampled_from([0, 5, 20, WHOLE]),
    data=st.data(),
)
def test_the_search_of_a_tree_is_right_wherever_it_says_so(*, tokens, vocab, tree, scale, limit, data):
    k = data.draw(st.integers(1, vocab))
    head = tree_head(3, vocab, tree, seed=vocab)
    hidden = scale * torch.randn(tokens, 3, dtype=torch.float64)
    with torch.no_grad():
        found = _best_first.best_leaves(hidden, head.weight, head._tree.levels, k, limit)
    assert found.exact.all() or limit < WHOLE
    sure = found.exact
    is_topk(head, hidden[sure], (found.values[sure], head.order[found.places[sure]]), k)


@settings(deadline=None, max_examples=100)
@given(
    tokens=st.integers(1, 4),
    vocab=st.integers(2, 70),
    scale=st.sampled_from([0.0, 0.3, 2.0, 20.0]),
    limit=st.sampled_from([0, 5, 20, WHOLE]),
    data=st.data(),
)
def test_the_search_of_classes_is_right_wherever_it_says_so(*, tokens, vocab, scale, limit, data):
    k = data.draw(st.integers(1, vocab))
    head = tree_head(3, vocab, "classes", seed=vocab)
    hidden = scale * torch.randn(tokens, 3, dtype=torch.float64)
    with torch.no_grad():
        bounds = torch.log_softmax(hidden @ head.class_weight.T, 1)
        found = _best_first.best_of_classes(bounds, lambda rows, numbers: head._within(hidden[rows], numbers), k, limit)
    assert found.exact.all() or limit < WHOLE
    sure = found.exact
    is_topk(head, hidden[sure], (found.values[sure], found.places[sure]), k)


def test_the_best_token_is_not_under_the_best_node():
    """A node of .6 over four equal tokens against a token of .4: a search that keeps one node a level is wrong."""
    head = heads.HierarchicalSoftmax(1, 5, counts=[4, 1, 1, 1, 1], dtype=torch.float64)
    assert head.depths.tolist() == [1, 3, 3, 3, 3]
    with torch.no_grad():
        head.weight.zero_()[0] = math.log(0.4 / 0.6)
    hidden = torch.ones(1, 1, dtype=torch.float64)
    found = _best_first.best_leaves(hidden, head.weight.detach(), head._tree.levels, 1, WHOLE)
    assert head.order[found.places].item() == 0
    assert found.values.exp().item() == pytest.approx(0.4)


class Counted:
    """Counts the scores that a head computes, for one hidden state after another."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.scores = 0
        patch.setattr(_best_first, "pair_scores", self._pairs)
        patch.setattr(_hierarchical, "product", self._product(_hierarchical.product))
        patch.setattr(_adaptive, "product", self._product(_adaptive.product))
        patch.setattr(_hierarchical.ops, "linear_scores", self._product(ops.linear_scores))

    def _pairs(self, hidden: Tensor, weight: Tensor, nodes: Tensor, signs: Tensor, wide: torch.dtype) -> Tensor:
        self.scores += int((signs != 0).sum())
        return torch.einsum("nd,nmd->nm", hidden.to(wide), weight[nodes].to(wide))

    def _product(self, true: Any) -> Any:
        def product(hidden: Tensor, weight: Tensor, *rest: Any) -> Tensor:
            self.scores += hidden.shape[:-1].numel() * len(weight)
            return true(hidden, weight, *rest)

        return product


@pytest.mark.parametrize(("tree", "k", "most"), [("huffman", 10, 1000), ("balanced", 10, 1000), ("classes", 10, 1800)])
def test_topk_of_a_sure_head_computes_few_of_its_scores(monkeypatch, tree, k, most):
    vocab, tokens = 16_384, 6
    head = tree_head(16, vocab, tree, spread=3 / 4)  # scores have a deviation of 3 for states of norm 4
    hidden = torch.randn(tokens, 16, dtype=torch.float64)
    truth = head.log_prob(hidden).detach().topk(k)
    monkeypatch.setattr(_hierarchical, "_NODES", 1 / 4)
    monkeypatch.setattr(_hierarchical, "_CLASSES", 1 / 4)
    counted = Counted(monkeypatch)
    values, found = head.topk(hidden, k)
    torch.testing.assert_close(values, truth.values)
    assert torch.equal(found, truth.indices)
    assert 0 < counted.scores <= most * tokens < vocab * tokens / 8, counted.scores / tokens


@pytest.mark.parametrize("tree", TREES)
def test_topk_of_a_head_that_is_sure_of_nothing_takes_all_scores_and_not_many_more(monkeypatch, tree):
    vocab, tokens = 4096, 3
    head = tree_head(8, vocab, tree, spread=1e-3)
    hidden = torch.randn(tokens, 8, dtype=torch.float64)
    counted = Counted(monkeypatch)
    found = head.topk(hidden, 2)
    assert counted.scores <= 1.6 * vocab * tokens
    is_topk(head, hidden, found, 2)


def test_topk_of_an_adaptive_head_computes_few_of_its_scores(monkeypatch):
    torch.manual_seed(0)
    head = heads.AdaptiveSoftmax(16, 4000, cutoffs=[200, 1000], dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
        hidden = 2 * head.weight[[3, 50, 199]]  # whose tokens are in the shortlist
    truth = head.log_prob(hidden).detach().topk(3)
    counted = Counted(monkeypatch)
    values, found = head.topk(hidden, 3)
    torch.testing.assert_close(values, truth.values)
    assert torch.equal(found, truth.indices)
    assert 0 < counted.scores < 3 * 4000 / 10


@settings(deadline=None, max_examples=60)
@given(tokens=st.integers(0, 5), vocab=st.integers(2, 40), scale=st.sampled_from([0.0, 1.0, 9.0]), data=st.data())
def test_topk_of_an_adaptive_head_is_that_of_all_log_probabilities(*, tokens, vocab, scale, data):
    k = data.draw(st.integers(1, vocab))
    cutoffs = data.draw(st.lists(st.integers(1, vocab - 1), unique=True, max_size=4).map(sorted))
    torch.manual_seed(vocab)
    head = heads.AdaptiveSoftmax(3, vocab, cutoffs=cutoffs, bias=True, dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_((2 * torch.randn_like(parameter)).round())  # makes ties
    hidden = (scale * torch.randn(tokens, 3, dtype=torch.float64)).round()
    is_topk(head, hidden, head.topk(hidden, k), k)


@pytest.mark.parametrize("tree", TREES)
def test_topk_of_a_hidden_state_of_nan_is_nan_and_spoils_no_other(monkeypatch, tree):
    monkeypatch.setattr(_hierarchical, "_NODES", 1e3)
    monkeypatch.setattr(_hierarchical, "_CLASSES", 1e3)
    head = tree_head(3, 30, tree)
    hidden = torch.randn(3, 3, dtype=torch.float64)
    hidden[1, 0] = torch.nan
    values, tokens = head.topk(hidden, 4)
    assert values[1].isnan().all()
    is_topk(head, hidden[[0, 2]], (values[[0, 2]], tokens[[0, 2]]), 4)


@pytest.mark.parametrize("tree", TREES)
def test_half_precision_finds_what_its_log_probabilities_say(monkeypatch, tree):
    monkeypatch.setattr(_hierarchical, "_NODES", 1e3)
    monkeypatch.setattr(_hierarchical, "_CLASSES", 1e3)
    head = tree_head(8, 60, tree).bfloat16()
    hidden = torch.randn(7, 8).bfloat16()
    values, tokens = head.topk(hidden, 5)
    truth = head.log_prob(hidden).detach()
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, truth.topk(5).values, atol=0.05, rtol=0.01)
    torch.testing.assert_close(truth.gather(1, tokens), values, atol=0.05, rtol=0.01)


@pytest.mark.parametrize("head", _examples())
def test_1e5_seeded_draws_have_the_enumerated_distribution(head):
    hidden = head.example_hidden((1,))
    many = hidden.repeat(100_000, *[1] * (hidden.ndim - 1))
    probabilities = head.log_prob(hidden).exp().detach().flatten()
    drawn = head.sample(many, seeds=torch.arange(100_000))
    counts = torch.bincount(drawn.flatten(), minlength=9)
    assert not counts[probabilities == 0].any()
    assert chi_square(counts, probabilities) > 1e-4


@pytest.mark.parametrize("head", _examples())
def test_d20_a_draw_follows_its_own_seed_in_any_batch(head):
    hidden, seeds, positions = head.example_hidden((40,)), torch.arange(40) * 3 + 1, torch.arange(40) % 5
    drawn = head.sample(hidden, seeds=seeds, positions=positions)
    for size in (1, 2, 8):
        parts = [
            head.sample(hidden[rows], seeds=seeds[rows], positions=positions[rows])
            for rows in torch.arange(40).split(size)
        ]
        assert torch.equal(torch.cat(parts), drawn)
    swapped = torch.tensor([7, 3])
    again = head.sample(hidden[swapped], seeds=seeds[swapped], positions=positions[swapped])
    assert torch.equal(again, drawn[swapped])
    assert not torch.equal(head.sample(hidden, seeds=seeds, positions=positions + 1), drawn)
    assert not torch.equal(head.sample(hidden, seeds=seeds + 1, positions=positions), drawn)


def test_chunks_of_tokens_do_not_show(monkeypatch):
    for head in (one.values[0] for one in _examples()):
        hidden, seeds = head.example_hidden((23,)), torch.arange(23)
        with monkeypatch.context() as patch:
            whole = head.sample(hidden, seeds=seeds)
            patch.setattr("unembed.heads._base.chunk_rows", lambda *_, **__: 5)
            patch.setattr("unembed.heads._adaptive.chunk_rows", lambda *_, **__: 2)
            assert torch.equal(head.sample(hidden, seeds=seeds), whole)


@pytest.mark.parametrize("kind", [heads.Linear, heads.Sigsoftmax, heads.LowRank, heads.Entmax])
def test_a_head_of_one_choice_draws_as_its_scores_do(kind):
    torch.manual_seed(0)
    head = kind(6, 300)
    hidden, seeds, positions = torch.randn(5, 4, 6), torch.arange(20), torch.arange(20) + 7
    numbers = torch.from_numpy(ops.uniforms(seeds, positions))
    want = ops.draw(head(hidden).detach().flatten(0, 1), numbers).view(5, 4)
    assert torch.equal(head.sample(hidden, seeds=seeds, positions=positions), want)


def test_a_seeded_head_draws_what_decoding_draws_from_its_scores():
    from unembed import decoding

    torch.manual_seed(0)
    head, hidden, seeds = heads.Linear(6, 300), torch.randn(20, 6), torch.arange(20)
    want = decoding.sample(head(hidden).detach(), seeds=seeds, positions=seeds + 1)
    assert torch.equal(head.sample(hidden, seeds=seeds, positions=seeds + 1), want)


def test_d19_every_token_of_a_long_tail_has_its_part_of_the_numbers():
    """One token, and 262,144 that are 20.5 nats below it: their part, 3e-4, begins where the first one's ends."""
    head = heads.Linear(1, 262_145, bias=True)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.zero_()[1:] = -20.5
    one = math.exp(-20.5)
    places = torch.tensor([100, 9_999, 131_072, 262_100], dtype=torch.float64)
    numbers = (1 + (places - 0.5) * one) / (1 + 262_144 * one)

    class Given(ops.Noise):
        def __call__(self, step=0):
            return numbers

    drawn = head.draws(torch.zeros(4, 1), Given(4, torch.device("cpu")))
    # The block of the first token is summed in float32, where 63 of the tail are lost beside it, but none after it.
    assert (drawn - places).abs().max() <= 1


def test_impossible_branches_are_never_taken():
    head = heads.AdaptiveSoftmax(2, 9, cutoffs=[3, 6], bias=True)
    with torch.no_grad():
        head.bias[[1, 4]] = -torch.inf  # a token of the shortlist, and the second cluster
    drawn = head.sample(torch.zeros(100_000, 2), seeds=torch.arange(100_000))
    counts = torch.bincount(drawn, minlength=9)
    assert counts[[1, 6, 7, 8]].sum() == 0
    expected = head.log_prob(torch.zeros(2)).exp().detach().double().numpy() * 100_000
    alive = counts > 0
    assert chisquare(counts[alive].numpy(), expected[alive.numpy()], sum_check=False).pvalue > 1e-4


@pytest.mark.parametrize("head", _examples())
def test_no_tokens_and_numbers_that_do_not_fit(head):
    hidden = head.example_hidden((3,))
    shape = head.tokens_shape(hidden[:0])
    assert head.sample(hidden[:0], seeds=[]).shape == shape
    assert head.topk(hidden[:0], 2)[1].shape == (*shape, 2)
    for options, says in (
        ({"seeds": [1, 2]}, "`seeds` must have one number for each of 3 rows, got 2"),
        ({"positions": [1, 2, 3]}, "give both"),
        ({"seeds": [1, 2, 3], "generator": torch.Generator()}, "not both"),
    ):
        with pytest.raises(ValueError, match=says):
            head.sample(hidden, **options)


@pytest.mark.parametrize("head", _examples())
def test_a_hidden_state_of_nan_is_refused(head):
    hidden = head.example_hidden((3,))
    hidden[1] = torch.nan
    with pytest.raises(ValueError, match=r"nan|NaN"):
        head.sample(hidden)


@pytest.mark.parametrize("tree", TREES[:2])
def test_the_order_of_leaves_follows_the_tree_that_is_loaded(tree):
    head, other = tree_head(4, 20, tree), heads.HierarchicalSoftmax(4, 20, counts=range(20), dtype=torch.float64)
    other.load_state_dict(copy.deepcopy(head.state_dict()))
    assert torch.equal(other.order[other.ranks], torch.arange(20))
    hidden, seeds = torch.randn(50, 4, dtype=torch.float64), torch.arange(50)
    assert torch.equal(other.sample(hidden, seeds=seeds), head.sample(hidden, seeds=seeds))
    assert "order" not in head.state_dict()
