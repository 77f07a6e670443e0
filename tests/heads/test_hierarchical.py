from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from unembed import heads, losses
from unembed.heads import _tree
from unembed.results import InputError

KINDS = ["huffman", "balanced", "classes"]


def make(width=5, vocab=13, *, dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    head = heads.HierarchicalSoftmax(width, vocab, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


def _tree_by_hand(depths):
    """Path of each token as (node, branch), by building the canonical tree node by node."""
    frontier, found, number = [[]], {}, 0
    for depth in range(max(depths) + 1):
        for token in (token for token, its in enumerate(depths) if its == depth):
            found[token] = frontier.pop(0)
        grown = []
        for path in frontier:
            grown += [[*path, (number, 0)], [*path, (number, 1)]]
            number += 1
        frontier = grown
    assert not frontier
    assert number == len(depths) - 1
    return found


@torch.no_grad()
def _reference(head, hidden):
    """Log-probabilities of one hidden state, token by token, in float64."""
    hidden, weight = hidden.double(), head.weight.double()
    if head.tree == "classes":
        of_class = torch.log_softmax(head.class_weight.double() @ hidden, 0)
        parts = weight.split(head.class_size)
        return torch.cat([one + torch.log_softmax(part @ hidden, 0) for one, part in zip(of_class, parts, strict=True)])
    paths = _tree_by_hand(head.depths.tolist())
    found = []
    for token in range(head.out_features):
        choices = [float(weight[node] @ hidden) * (1 - 2 * branch) for node, branch in paths[token]]
        found.append(-sum(math.log1p(math.exp(-score)) for score in choices))
    return torch.tensor(found, dtype=torch.float64)


@settings(deadline=None)
@given(
    tokens=st.integers(0, 7),
    width=st.integers(1, 6),
    vocab=st.integers(1, 19),
    chunk=st.none() | st.integers(1, 9),
    data=st.data(),
)
def test_is_the_definition_for_every_shape(tokens, width, vocab, chunk, data):
    tree = data.draw(st.sampled_from(KINDS))
    counts = None
    if tree == "huffman":
        counts = data.draw(st.none() | st.lists(st.integers(0, 50), min_size=vocab, max_size=vocab))
    head = make(width, vocab, tree=tree, counts=counts)
    hidden = torch.randn(tokens, width, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(-1, vocab, (tokens,))
    expected = torch.stack([_reference(head, one) for one in hidden]) if tokens else hidden.new_zeros(0, vocab)
    torch.testing.assert_close(head.log_prob(hidden), expected)
    counted = targets >= 0
    picked = torch.where(counted, -expected.gather(1, targets.clamp(min=0)[:, None]).squeeze(1), 0.0)
    nll = head.nll(hidden, targets, ignore_index=-1, chunk=chunk)
    torch.testing.assert_close(nll, picked)
    weight = torch.rand(tokens, dtype=torch.float64) * counted
    plain = -head.log_prob(hidden).gather(1, targets.clamp(min=0)[:, None]).squeeze(1)
    inputs = (hidden, *head.parameters())
    fast, slow = (torch.autograd.grad((one * weight).sum(), inputs, allow_unused=True) for one in (nll, plain))
    for one, other in zip(fast, slow, strict=True):
        torch.testing.assert_close(one, torch.zeros_like(one) if other is None else other)


@pytest.mark.parametrize("tree", KINDS)
@pytest.mark.parametrize("vocab", [1, 2, 7, 100])
def test_probabilities_sum_to_one_and_losses_are_positive(tree, vocab):
    head = make(4, vocab, dtype=torch.float32, tree=tree)
    hidden = torch.randn(vocab, 4)
    torch.testing.assert_close(head.log_prob(hidden).exp().sum(-1), torch.ones(vocab), atol=1e-6, rtol=0)
    nll = head.nll(hidden, torch.arange(vocab))
    assert (nll >= 0).all()
    torch.testing.assert_close(nll, -head.log_prob(hidden).diagonal())


@pytest.mark.parametrize(
    ("counts", "depths"),
    [
        ([5, 1, 1, 2], [1, 3, 3, 2]),
        ([1, 1, 1, 1], [2, 2, 2, 2]),
        ([5, 9, 12, 13, 16, 45], [4, 4, 3, 3, 3, 1]),  # Cormen et al., Introduction to Algorithms, figure 16.5
        ([0, 0, 7], [2, 2, 1]),
        ([3], [0]),
    ],
)
def test_huffman_codes_worked_by_hand(counts, depths):
    assert _tree.huffman_depths(counts) == depths
    assert heads.HierarchicalSoftmax(2, len(counts), counts=counts).weight.shape == (len(counts) - 1, 2)


def test_golden_values():
    """Codes 0, 110, 111, 10 and branch probabilities 3/4, 2/3, 1/5 of the left."""
    head = heads.HierarchicalSoftmax(1, 4, counts=[5, 1, 1, 2], dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([3.0, 2.0, 0.25], dtype=torch.float64).log()[:, None])
    expected = torch.tensor([3 / 4, 1 / 4 * 1 / 3 * 1 / 5, 1 / 4 * 1 / 3 * 4 / 5, 1 / 4 * 2 / 3], dtype=torch.float64)
    one = torch.ones(1, dtype=torch.float64)
    torch.testing.assert_close(head.log_prob(one).exp(), expected)
    torch.testing.assert_close(head.nll(one.expand(4, 1), torch.arange(4)), -expected.log())


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=60))
def test_huffman_is_a_full_code_and_no_longer_than_a_heap_makes_it(counts):
    import heapq

    depths = _tree.huffman_depths(counts)
    if len(counts) > 1:
        assert sum(2.0**-depth for depth in depths) == 1
    heap, cost = sorted(counts), 0
    while len(heap) > 1:
        pair = heapq.heappop(heap) + heapq.heappop(heap)
        cost += pair
        heapq.heappush(heap, pair)
    assert sum(count * depth for count, depth in zip(counts, depths, strict=True)) == cost


@given(st.integers(1, 300))
def test_balanced_depths_differ_by_one(vocab):
    depths = _tree.balanced_depths(vocab)
    assert max(depths) - min(depths) <= 1
    assert sum(2.0**-depth for depth in depths) == 1


def test_a_very_deep_tree():
    fibonacci = [1, 1]
    while len(fibonacci) < 80:
        fibonacci.append(fibonacci[-1] + fibonacci[-2])
    head = make(3, 80, counts=fibonacci)
    assert head.depths.max() == 79
    hidden = torch.randn(80, 3, dtype=torch.float64)
    torch.testing.assert_close(head.nll(hidden, torch.arange(80)), -head.log_prob(hidden).diagonal())


@pytest.mark.parametrize("tree", KINDS)
@pytest.mark.parametrize("tokens", [0, 3])
def test_batches_without_a_token_that_counts(tree, tokens):
    head = make(tree=tree)
    hidden = torch.randn(tokens, 5, dtype=torch.float64, requires_grad=True)
    loss = losses.cross_entropy(head, hidden, torch.full((tokens,), -100))
    loss.backward()
    assert loss == 0
    assert all(one.grad is None or one.grad.abs().sum() == 0 for one in (hidden, *head.parameters()))
    assert head.topk(hidden, 2)[1].shape == (tokens, 2)
    assert head.sample(hidden).shape == (tokens,)


@pytest.mark.parametrize("tree", KINDS)
def test_any_batch_shape_and_stride(tree):
    head = make(tree=tree)
    hidden = torch.randn(5, 2, 3, dtype=torch.float64).permute(1, 2, 0)
    targets = torch.randint(0, 13, (3, 2)).T
    flat = head.nll(hidden.reshape(-1, 5), targets.reshape(-1))
    torch.testing.assert_close(head.nll(hidden, targets), flat.view(2, 3))
    torch.testing.assert_close(head.log_prob(hidden)[1, 2], head.log_prob(hidden[1, 2]))
    torch.testing.assert_close(head.nll(hidden[0, 0], targets[0, 0]), flat[0])


@pytest.mark.parametrize("tree", KINDS)
@pytest.mark.parametrize("wrong", [-1, 13])
def test_refuses_a_target_that_is_no_class(tree, wrong):
    with pytest.raises(ValueError, match="targets"):
        make(tree=tree).nll(torch.randn(2, 5, dtype=torch.float64), torch.tensor([0, wrong]))


@pytest.mark.parametrize("counts", [[1, 2], [1, -1, 2], [1, 2, math.nan], [1, 2, math.inf]])
def test_refuses_counts_that_are_none(counts):
    with pytest.raises(ValueError, match="counts"):
        heads.HierarchicalSoftmax(2, 3, counts=counts)


@pytest.mark.parametrize("tree", KINDS)
def test_first_and_second_derivatives(tree):
    head = make(3, 7, tree=tree)
    names, values = zip(*head.named_parameters(), strict=True)
    targets = torch.tensor([0, 1, 3, 6, -100, 6])
    hidden = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)

    def nll(hidden, *parameters):
        named = {f"head.{name}": one for name, one in zip(names, parameters, strict=True)}
        return torch.func.functional_call(_Loss(head), named, (hidden, targets))

    assert torch.autograd.gradcheck(nll, (hidden, *values))
    assert torch.autograd.gradgradcheck(nll, (hidden, *values))


class _Loss(torch.nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden, targets):
        return self.head.nll(hidden, targets)


@pytest.mark.parametrize("tree", KINDS)
def test_func_grad_grad_of_grad_and_vmap(tree):
    head = make(tree=tree)
    hidden, targets = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 2, 12, 7])

    def fast(hidden):
        return head.nll(hidden, targets).square().sum()

    def plain(hidden):
        return head.log_prob(hidden).gather(1, targets[:, None]).square().sum()

    torch.testing.assert_close(torch.func.grad(fast)(hidden), torch.func.grad(plain)(hidden))
    twice = [torch.func.grad(lambda h, f=f: torch.func.grad(f)(h).square().sum())(hidden) for f in (fast, plain)]
    torch.testing.assert_close(*twice)
    stacked = torch.stack([hidden, 2 * hidden])
    expected = torch.stack([torch.func.grad(fast)(one) for one in stacked])
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(fast))(stacked), expected)


@pytest.mark.parametrize("tree", KINDS)
def test_half_precision_is_no_worse_than_all_log_probabilities_in_it(tree):
    head = make(64, 300, dtype=torch.float32, tree=tree)
    for parameter in head.parameters():
        parameter.data.mul_(0.2)
    hidden, targets = torch.randn(200, 64).bfloat16(), torch.randint(0, 300, (200,))
    head = head.bfloat16().double()  # the error of the sums, not of rounding the parameters
    truth = head.nll(hidden.double(), targets)
    expected = torch.autograd.grad(truth.mean(), list(head.parameters()))
    head = head.bfloat16()
    found = head.nll(hidden, targets)
    assert found.dtype == head.log_prob(hidden).dtype == torch.float32
    assert (found.double() - truth).abs().max() <= (0.05 if tree == "classes" else 1e-4)
    for one, other in zip(torch.autograd.grad(found.mean(), list(head.parameters())), expected, strict=True):
        assert (one.double() - other).norm() <= 2**-7 * other.norm()


@pytest.mark.parametrize("tree", KINDS)
@pytest.mark.parametrize("k", [1, 4, 13])
def test_topk_is_that_of_all_log_probabilities(tree, k):
    head = make(tree=tree)
    hidden = torch.randn(20, 5, dtype=torch.float64)
    values, tokens = head.topk(hidden, k)
    expected = head.log_prob(hidden).topk(k)
    torch.testing.assert_close(values, expected.values)
    assert torch.equal(tokens, expected.indices)


@pytest.mark.parametrize("tree", KINDS)
def test_samples_have_the_distribution(tree):
    head = make(4, 9, tree=tree, seed=3)
    hidden = 0.5 * torch.randn(4, dtype=torch.float64)
    drawn = head.sample(hidden.expand(100_000, 4), generator=torch.Generator().manual_seed(0))
    expected = head.log_prob(hidden).exp().detach().numpy() * 100_000
    assert chisquare(torch.bincount(drawn, minlength=9).numpy(), expected, sum_check=False).pvalue > 1e-4


def test_far_scores_are_finite_and_never_drawn_against():
    head = make(1, 2, dtype=torch.float32)
    with torch.no_grad():
        head.weight.fill_(1.0)
    hidden = torch.tensor([[300.0]], requires_grad=True)
    nll = head.nll(hidden, torch.tensor([1]))
    assert nll.item() == 300
    assert torch.autograd.grad(nll.sum(), hidden)[0].item() == 1
    assert head.sample(torch.full((100_000, 1), 300.0)).sum() == 0


def test_smoothing_goes_over_all_log_probabilities():
    head = make()
    hidden, targets = torch.randn(3, 5, dtype=torch.float64), torch.tensor([0, 9, 2])
    expected = torch.nn.functional.cross_entropy(head.log_prob(hidden), targets, label_smoothing=0.1)
    torch.testing.assert_close(losses.cross_entropy(head, hidden, targets, label_smoothing=0.1), expected)


@pytest.mark.parametrize("options", [{"counts": list(range(13))}, {"tree": "balanced"}, {"tree": "classes"}])
def test_saved_with_its_tree(tmp_path, options):
    head = make(**options)
    again = heads.load(heads.save(head, tmp_path / "head"))
    hidden, targets = torch.randn(3, 5, dtype=torch.float64), torch.tensor([1, 12, 0])
    assert torch.equal(again.log_prob(hidden), head.log_prob(hidden))
    assert torch.equal(again.nll(hidden, targets), head.nll(hidden, targets))
    pair = [one.sample(hidden, generator=torch.Generator().manual_seed(0)) for one in (head, again)]
    assert torch.equal(*pair)


def test_refuses_to_load_depths_of_no_tree(tmp_path):
    head = make()
    head.depths[0] += 1
    heads.save(head, tmp_path / "head")
    with pytest.raises(InputError, match="depths"):
        heads.load(tmp_path / "head")


@pytest.mark.parametrize("tree", KINDS)
def test_made_on_meta_and_given_memory_later(tree):
    head = heads.build(f"hierarchical:tree={tree}", 5, 13, device="meta")
    assert all(one.is_meta for one in (*head.parameters(), *head.buffers()))
    head = head.to_empty(device="cpu")
    head.reset_parameters()
    torch.testing.assert_close(head.log_prob(torch.randn(5)).exp().sum(), torch.tensor(1.0))
    full = make(tree=tree, dtype=torch.float32)
    other = heads.build(f"hierarchical:tree={tree}", 5, 13, device="meta")
    other.load_state_dict(full.state_dict(), assign=True)
    hidden = torch.randn(5)
    assert torch.equal(other.log_prob(hidden), full.log_prob(hidden))


def test_costs():
    head = heads.HierarchicalSoftmax(8, 4, counts=[5, 1, 1, 2])
    assert head.flops() == 2 * 8 * 1.75  # 1/2 * 1 + 1/4 * 2 + 1/4 * 3 choices
    assert head.rank_bound is None
    assert head.cost(10).parameters == 3 * 8


def test_rank_of_two_levels_stays_under_the_bound():
    head = make(2, 36, tree="classes")
    log_prob = head.log_prob(torch.randn(60, 2, dtype=torch.float64))
    assert torch.linalg.matrix_rank(log_prob) == head.rank_bound == 8


@pytest.mark.compile
@pytest.mark.parametrize("tree", KINDS)
def test_compiled_in_one_graph(tree):
    head = make(tree=tree)
    hidden = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 12, -100, 3, 8])
    compiled = torch.compile(lambda h, t: head.nll(h, t).sum(), fullgraph=True, backend="aot_eager")
    loss = compiled(hidden, targets)
    torch.testing.assert_close(loss, head.nll(hidden, targets).sum())
    (found,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(found, torch.autograd.grad(head.nll(hidden, targets).sum(), hidden)[0])
    whole = torch.compile(head.log_prob, fullgraph=True, backend="aot_eager")(hidden)
    torch.testing.assert_close(whole, head.log_prob(hidden))
