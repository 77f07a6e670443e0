from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import chisquare

from unembed import heads, losses


def make(width=5, vocab=13, *, dtype=torch.float64, seed=0, **options):
    torch.manual_seed(seed)
    head = heads.AdaptiveSoftmax(width, vocab, dtype=dtype, **options)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.normal_()
    return head


@torch.no_grad()
def _reference(head, hidden):
    """Log-probabilities of one hidden state, entry by entry, in float64."""
    hidden, shortlist = hidden.double(), len(head.weight)
    rows = [*head.weight, *head.clusters]
    scores = [
        float(row.double() @ hidden) + float(0 if head.bias is None else head.bias[i]) for i, row in enumerate(rows)
    ]
    total = math.log(sum(math.exp(score) for score in scores))
    found = [score - total for score in scores[:shortlist]]
    for place, (projection, tail) in enumerate(zip(head.projections, head.tails, strict=True)):
        inner = tail.double() @ (projection.double() @ hidden)
        within = math.log(sum(math.exp(float(score)) for score in inner))
        found += [scores[shortlist + place] - total + float(score) - within for score in inner]
    return torch.tensor(found, dtype=torch.float64)


@settings(deadline=None)
@given(
    tokens=st.integers(0, 7),
    width=st.integers(1, 6),
    vocab=st.integers(1, 17),
    chunk=st.integers(1, 9),
    data=st.data(),
)
def test_is_the_definition_for_every_shape(tokens, width, vocab, chunk, data):
    bias = data.draw(st.booleans())
    cutoffs = data.draw(st.none() | st.lists(st.integers(1, max(1, vocab - 1)), unique=True).map(sorted))
    cutoffs = None if cutoffs is None else [cut for cut in cutoffs if cut < vocab]
    head = make(width, vocab, cutoffs=cutoffs, div_value=2.0, bias=bias)
    hidden = torch.randn(tokens, width, dtype=torch.float64)
    targets = torch.randint(0, vocab, (tokens,))
    expected = torch.stack([_reference(head, one) for one in hidden]) if tokens else torch.zeros(0, vocab)
    torch.testing.assert_close(head.log_prob(hidden), expected.double())
    picked = -expected.double().gather(1, targets[:, None]).squeeze(1)
    torch.testing.assert_close(head.nll(hidden, targets, chunk=chunk), picked)
    weight = torch.rand(tokens, dtype=torch.float64)
    coefficients = torch.nn.functional.pad(weight[:, None], (0, 3))
    torch.testing.assert_close(head.loss(hidden, targets, coefficients, chunk=chunk), (weight * picked).sum())


@pytest.mark.parametrize("vocab", [1, 2, 7, 100])
def test_probabilities_sum_to_one(vocab):
    head = make(4, vocab, dtype=torch.float32)
    total = head.log_prob(torch.randn(9, 4)).exp().sum(-1)
    torch.testing.assert_close(total, torch.ones(9), atol=1e-6, rtol=0)


def test_golden_values():
    """The first softmax over scores (0, log 2, log 3) with one entry a cluster; the cluster (log 1, log 4)."""
    head = heads.AdaptiveSoftmax(1, 4, cutoffs=[2], dtype=torch.float64)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0], [math.log(2)]]))
        head.clusters.fill_(math.log(3))
        head.projections[0].fill_(1.0)
        head.tails[0].copy_(torch.tensor([[0.0], [math.log(4)]]))
    expected = torch.tensor([1 / 6, 2 / 6, 3 / 6 * 1 / 5, 3 / 6 * 4 / 5], dtype=torch.float64)
    torch.testing.assert_close(head.log_prob(torch.ones(1, dtype=torch.float64)).exp(), expected)


def test_every_tail_is_at_least_one_wide():
    head = heads.AdaptiveSoftmax(8, 1000, cutoffs=[10, 100, 500])
    assert [tuple(one.shape) for one in head.projections] == [(2, 8), (1, 8), (1, 8)]
    assert [tuple(one.shape) for one in head.tails] == [(90, 2), (400, 1), (500, 1)]
    inside = head.log_prob(torch.randn(8))[500:]
    assert inside.std() > 1e-3  # width 0 would be uniform


@pytest.mark.parametrize("ignored", [-100, 4])
def test_ignored_tokens_count_nothing(ignored):
    """Also where the ignored number is that of a token, and of a cluster's entry of the first softmax."""
    head = make(5, 13, cutoffs=[4, 8])
    hidden = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, ignored, 5, 12, ignored, 9])
    nll = head.nll(hidden, targets, ignore_index=ignored)
    assert nll[[1, 4]].tolist() == [0.0, 0.0]
    kept = [0, 2, 3, 5]
    torch.testing.assert_close(nll[kept], -head.log_prob(hidden)[kept, targets[kept]])
    (gradient,) = torch.autograd.grad(nll.sum(), hidden)
    assert gradient[[1, 4]].abs().sum() == 0
    assert (gradient[kept].abs().sum(1) > 0).all()


@pytest.mark.parametrize("tokens", [0, 3])
def test_batches_without_a_token_that_counts(tokens):
    head = make()
    hidden = torch.randn(tokens, 5, dtype=torch.float64, requires_grad=True)
    loss = losses.cross_entropy(head, hidden, torch.full((tokens,), -100))
    loss.backward()
    assert loss == 0
    assert all(one.grad is None or one.grad.abs().sum() == 0 for one in (hidden, *head.parameters()))
    assert head.nll(hidden, torch.full((tokens,), -100)).tolist() == [0.0] * tokens
    assert head.topk(hidden, 2)[1].shape == (tokens, 2)
    assert head.sample(hidden).shape == (tokens,)


def test_any_batch_shape_and_stride():
    head = make()
    hidden = torch.randn(5, 2, 3, dtype=torch.float64).permute(1, 2, 0)
    targets = torch.randint(0, 13, (3, 2)).T
    flat = head.nll(hidden.reshape(-1, 5), targets.reshape(-1))
    torch.testing.assert_close(head.nll(hidden, targets), flat.view(2, 3))
    torch.testing.assert_close(head.log_prob(hidden)[1, 2], head.log_prob(hidden[1, 2]))
    torch.testing.assert_close(head.nll(hidden[0, 0], targets[0, 0]), flat[0])
    assert head.topk(hidden, 4)[0].shape == (2, 3, 4)


@pytest.mark.parametrize("wrong", [-1, 13])
def test_refuses_a_target_that_is_no_class(wrong):
    with pytest.raises(ValueError, match="targets"):
        make().nll(torch.randn(2, 5, dtype=torch.float64), torch.tensor([0, wrong]))


@pytest.mark.parametrize("cutoffs", [[0], [13], [5, 3], [4, 4]])
def test_refuses_cutoffs_that_make_no_clusters(cutoffs):
    with pytest.raises(ValueError, match="cutoffs"):
        heads.AdaptiveSoftmax(5, 13, cutoffs=cutoffs)


@pytest.mark.parametrize("how", ["nll", "loss"])
def test_first_and_second_derivatives(how):
    head = make(3, 9, cutoffs=[2, 5], bias=True, div_value=2.0)
    names, values = zip(*head.named_parameters(), strict=True)
    targets = torch.tensor([0, 1, 3, 8, -100, 6])
    hidden = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    coefficients = torch.rand(6, 4, dtype=torch.float64)

    def function(hidden, *parameters):
        arguments = (hidden, targets) if how == "nll" else (hidden, targets, coefficients)
        return torch.func.functional_call(
            _Call(head, how), {f"head.{n}": p for n, p in zip(names, parameters, strict=True)}, arguments
        )

    assert torch.autograd.gradcheck(function, (hidden, *values))
    assert torch.autograd.gradgradcheck(function, (hidden, *values))


class _Call(torch.nn.Module):
    def __init__(self, head, name):
        super().__init__()
        self.head, self.name = head, name

    def forward(self, *arguments):
        return getattr(self.head, self.name)(*arguments)


def test_func_grad_and_grad_of_grad():
    head = make()
    hidden, targets = torch.randn(4, 5, dtype=torch.float64), torch.tensor([0, 2, 12, 7])

    def fast(hidden):
        return head.nll(hidden, targets).square().sum()

    def plain(hidden):
        return head.log_prob(hidden).gather(1, targets[:, None]).square().sum()

    torch.testing.assert_close(torch.func.grad(fast)(hidden), torch.func.grad(plain)(hidden))
    twice = [torch.func.grad(lambda h, f=f: torch.func.grad(f)(h).square().sum())(hidden) for f in (fast, plain)]
    torch.testing.assert_close(*twice)


def test_half_precision_is_no_worse_than_torch():
    head = make(64, 300, dtype=torch.float32, cutoffs=[30, 100])
    for parameter in head.parameters():
        parameter.data.mul_(0.2)
    exact = head.double()
    hidden, targets = torch.randn(200, 64).bfloat16(), torch.randint(0, 300, (200,))
    truth = exact.nll(hidden.double(), targets)
    low = exact.to(torch.bfloat16)
    rival = torch.nn.AdaptiveLogSoftmaxWithLoss(64, 300, [30, 100]).bfloat16()
    with torch.no_grad():
        rival.head.weight.copy_(low._matrix())
        for tail, projection, own in zip(rival.tail, low.projections, low.tails, strict=True):
            tail[0].weight.copy_(projection)
            tail[1].weight.copy_(own)
        allowed = (-rival(hidden, targets).output.double() - truth).abs().mean()
    found = low.nll(hidden, targets)
    assert found.dtype == low.log_prob(hidden).dtype == torch.float32
    assert (found.double() - truth).abs().mean() <= 1.1 * allowed
    torch.testing.assert_close(found, -low.log_prob(hidden).gather(1, targets[:, None])[:, 0], atol=2e-3, rtol=1e-3)


@pytest.mark.parametrize("k", [1, 3, 5, 9, 13])
def test_topk_is_that_of_all_log_probabilities(k):
    for seed in range(5):
        head = make(seed=seed, cutoffs=[3, 7])
        hidden = 3 * torch.randn(40, 5, dtype=torch.float64)
        values, tokens = head.topk(hidden, k)
        expected = head.log_prob(hidden).topk(k)
        torch.testing.assert_close(values, expected.values)
        assert torch.equal(tokens, expected.indices)


def test_topk_looks_at_no_tail_that_cannot_win(monkeypatch):
    head = make(cutoffs=[4, 8])
    with torch.no_grad():
        head.clusters.copy_(head.weight[:1] * torch.tensor([[-9.0], [-9.0]]))
    hidden, looked = head.weight[:1].detach() * 5, []
    within = head._within
    monkeypatch.setattr(head, "_within", lambda part, place: looked.append(len(part)) or within(part, place))
    assert torch.equal(head.topk(hidden, 1)[1], head.log_prob(hidden).topk(1).indices)
    head.topk(hidden, 1)
    assert looked[:2] == [0, 0]


def test_samples_have_the_distribution():
    head = make(4, 9, cutoffs=[2, 5], seed=3)
    hidden = 0.5 * torch.randn(4, dtype=torch.float64)
    drawn = head.sample(hidden.expand(100_000, 4), generator=torch.Generator().manual_seed(0))
    expected = head.log_prob(hidden).exp().detach().numpy() * 100_000
    assert chisquare(torch.bincount(drawn, minlength=9).numpy(), expected, sum_check=False).pvalue > 1e-4


def test_a_bias_of_minus_infinity_takes_a_cluster_out():
    head = make(cutoffs=[4, 8], bias=True)
    with torch.no_grad():
        head.bias[[1, 4]] = -torch.inf
    hidden = torch.randn(3, 5, dtype=torch.float64)
    gone = [1, 4, 5, 6, 7]
    assert (head.log_prob(hidden)[:, gone] == -torch.inf).all()
    assert torch.equal((~head.real_classes()).nonzero()[:, 0], torch.tensor(gone))
    smooth = losses.cross_entropy(head, hidden, torch.tensor([0, 9, 2]), label_smoothing=0.1)
    smooth.backward()
    assert torch.isfinite(smooth)
    assert all(torch.isfinite(one.grad).all() for one in head.parameters())
    assert set(head.topk(hidden, 13)[1][0].tolist()) == set(range(13))


def test_tied_to_an_adaptive_embedding():
    head = make(8, 20, cutoffs=[5, 10])
    embeddings = [torch.nn.Parameter(torch.randn_like(one)) for one in (head.weight, *head.tails)]
    head.tie(embeddings)
    head.nll(torch.randn(4, 8, dtype=torch.float64), torch.tensor([0, 7, 15, 2])).sum().backward()
    assert all(one.grad.abs().sum() > 0 for one in embeddings)
    with pytest.raises(ValueError, match="embeddings"):
        head.tie(embeddings[:2])


def test_save_and_load(tmp_path):
    head = make(cutoffs=[4, 8], bias=True, div_value=2.0)
    hidden = torch.randn(3, 5, dtype=torch.float64)
    assert torch.equal(heads.load(heads.save(head, tmp_path / "head")).log_prob(hidden), head.log_prob(hidden))
    built = heads.build("adaptive:cutoffs=[4,8],div_value=2", 5, 13, device="meta")
    assert all(one.is_meta for one in built.parameters())
    assert built.options() == {"cutoffs": [4, 8], "div_value": 2, "bias": False}


def test_rank_stays_under_the_bound():
    head = make(2, 40, cutoffs=[5, 20], bias=True)
    log_prob = head.log_prob(torch.randn(60, 2, dtype=torch.float64))
    assert torch.linalg.matrix_rank(log_prob) == head.rank_bound == 6


@pytest.mark.compile
def test_compiled_in_one_graph():
    head = make(cutoffs=[4, 8])
    hidden = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    targets = torch.tensor([0, 5, 12, -100, 3, 8])
    compiled = torch.compile(lambda h, t: head.nll(h, t).sum(), fullgraph=True, backend="aot_eager")
    loss = compiled(hidden, targets)
    torch.testing.assert_close(loss, head.nll(hidden, targets).sum())
    (found,) = torch.autograd.grad(loss, hidden)
    torch.testing.assert_close(found, torch.autograd.grad(head.nll(hidden, targets).sum(), hidden)[0])
