"""The low-rank head against its definition, and what the head law asks of it."""

from __future__ import annotations

import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import nn

from unembed import heads, losses
from unembed.heads import LowRank
from unembed.heads._low_rank import _reference


def _examples(d: int, v: int, dtype: torch.dtype = torch.float64, *, seed: int = 0) -> list[LowRank]:
    """Examples of the class, with parameters large enough for the head to be far from a linear one."""
    torch.manual_seed(seed)
    found = []
    for head in LowRank.examples(d, v):
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_()
        found.append(head.to(dtype))
    return found


def _batch(n: int, d: int, v: int, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    targets = torch.randint(v, (n,))
    targets[n // 2 : n // 2 + 1] = -100
    return torch.randn(n, d, dtype=dtype), targets


def _gradients(value: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    found = torch.autograd.grad(value, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


def _of(targets: torch.Tensor, scores: torch.Tensor, **options) -> torch.Tensor:
    return nn.functional.cross_entropy(scores, targets, reduction="none", **options)


@settings(deadline=None, max_examples=25)
@given(n=st.integers(0, 7), d=st.integers(1, 5), v=st.integers(1, 13), chunk=st.integers(1, 5), seed=st.integers(0, 99))
def test_scores_loss_and_gradients_are_the_definition_for_every_shape(n, d, v, chunk, seed):
    for head in _examples(d, v, seed=seed):
        hidden, targets = _batch(n, d, v)
        hidden.requires_grad_()
        inputs, upstream = [hidden, *head.parameters()], torch.randn(n, dtype=torch.float64)
        wanted = _of(targets, _reference(head, hidden))
        torch.testing.assert_close(head(hidden), _reference(head, hidden))
        torch.testing.assert_close(head.log_prob(hidden), _reference(head, hidden).log_softmax(-1))
        found = head.nll(hidden, targets, chunk=chunk)
        torch.testing.assert_close(found, wanted)
        expected = _gradients((wanted * upstream).sum(), inputs)
        torch.testing.assert_close(_gradients((found * upstream).sum(), inputs), expected)


@pytest.mark.parametrize("which", range(len(LowRank.examples(2, 3))))
def test_derivatives_of_first_and_second_order(which):
    head = _examples(2, 4)[which]
    hidden, targets = _batch(3, 2, 4)
    inputs = (hidden.requires_grad_(), *head.parameters())
    torch.autograd.gradcheck(lambda h, *_: head.nll(h, targets, chunk=2), inputs)
    torch.autograd.gradgradcheck(lambda h, *_: head.nll(h, targets, chunk=2), inputs, fast_mode=True)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy_is_torchs(smoothing, reduction, weighted):
    for head in _examples(4, 9):
        hidden, targets = _batch(6, 4, 9)
        hidden.requires_grad_()
        weight = torch.rand(9, dtype=torch.float64) if weighted else None
        inputs = [hidden, *head.parameters()]
        options = {"reduction": reduction, "label_smoothing": smoothing}
        found = losses.cross_entropy(head, hidden, targets, class_weight=weight, chunk=4, **options)
        wanted = nn.functional.cross_entropy(head.log_prob(hidden), targets, weight=weight, **options)
        torch.testing.assert_close(found, wanted)
        torch.testing.assert_close(_gradients(found.sum(), inputs), _gradients(wanted.sum(), inputs))


def test_z_loss_is_of_the_scores():
    for head in _examples(4, 9):
        hidden, targets = _batch(6, 4, 9)
        scores = _reference(head, hidden)
        counts = targets != -100
        wanted = (_of(targets, scores) + 0.1 * scores.logsumexp(-1).square())[counts].mean()
        torch.testing.assert_close(losses.cross_entropy(head, hidden, targets, z_loss=0.1), wanted)


def test_a_class_with_a_bias_of_minus_infinity_is_not_there():
    for head in _examples(3, 6):
        if head.bias is None:
            continue
        with torch.no_grad():
            head.bias[4] = -math.inf
        hidden, targets = torch.randn(5, 3, dtype=torch.float64, requires_grad=True), torch.tensor([0, 5, 3, -100, 1])
        inputs, rest = [hidden, *head.parameters()], [0, 1, 2, 3, 5]
        new = torch.tensor([0, 4, 3, -100, 1])
        wanted = nn.functional.cross_entropy(_reference(head, hidden)[:, rest], new, label_smoothing=0.1)
        # F.cross_entropy of the definition differentiates inf * 0 in the column left out; only hidden is comparable.
        for chunk in (2, 9):
            found = losses.cross_entropy(head, hidden, targets, label_smoothing=0.1, chunk=chunk)
            torch.testing.assert_close(found, wanted)
            assert all(gradient.isfinite().all() for gradient in _gradients(found, inputs))
            assert all(gradient.isfinite().all() for gradient in _gradients(head.nll(hidden, targets).sum(), inputs))
        assert (head.log_prob(hidden)[:, 4] == -math.inf).all()
        assert (head.nll(hidden[:1], torch.tensor([4])) == math.inf).all()


def test_empty_and_ignored_batches_have_no_loss_and_no_gradient():
    for head in _examples(3, 5):
        for n in (0, 4):
            hidden = torch.randn(n, 3, dtype=torch.float64, requires_grad=True)
            loss = losses.cross_entropy(head, hidden, torch.full((n,), -100), label_smoothing=0.1)
            assert loss == 0
            assert all((gradient == 0).all() for gradient in _gradients(loss, [hidden, *head.parameters()]))
        assert head.topk(torch.empty(0, 3, dtype=torch.float64), 2)[1].shape == (0, 2)
        assert head.sample(torch.empty(2, 0, 3, dtype=torch.float64)).shape == (2, 0)


def test_batches_of_any_shape_and_layout():
    for head in _examples(4, 7):
        hidden = torch.randn(4, 3, 2, dtype=torch.float64).permute(2, 1, 0)
        targets = torch.randint(7, (3, 2)).T
        flat, flat_targets = hidden.reshape(-1, 4), targets.reshape(-1)
        torch.testing.assert_close(head(hidden), _reference(head, flat).reshape(2, 3, 7))
        torch.testing.assert_close(head.nll(hidden, targets).flatten(), _of(flat_targets, _reference(head, flat)))
        torch.testing.assert_close(head(hidden[0, 0]), _reference(head, hidden[0, 0]))
        torch.testing.assert_close(head.nll(hidden[0, 0], targets[0, 0]), head.nll(hidden, targets)[0, 0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_loses_no_more_than_the_materialised_form(dtype):
    for head in _examples(48, 301, dtype):
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.mul_(0.3)
        hidden, targets = _batch(512, 48, 301, dtype)
        hidden.requires_grad_()
        inputs = [hidden, *head.parameters()]
        exact = _of(targets, _reference(head, hidden))
        plain = _of(targets, head(hidden).float())
        ours = head.nll(hidden, targets, chunk=200)
        whole = losses.cross_entropy(head, hidden, targets, chunk=200)
        wanted = _gradients(exact.sum() / 511, inputs)
        assert ours.dtype == torch.float32
        assert (ours - exact).abs().mean() <= 1.2 * (plain - exact).abs().mean() + 1e-4
        assert abs(whole - exact.sum() / 511) <= 1.2 * abs(plain.mean() - exact.mean()) + 1e-3
        theirs = _gradients(plain.sum() / 511, inputs)
        for mine in (_gradients(ours.sum() / 511, inputs), _gradients(whole, inputs)):
            for want, their, got in zip(wanted, theirs, mine, strict=True):
                size = want.double().norm() + 1e-6
                allowed = 1.2 * (their.double() - want.double()).norm() / size + torch.finfo(dtype).eps
                assert (got.double() - want.double()).norm() / size <= allowed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_scores_stay_finite(dtype):
    for head in _examples(3, 6, dtype):
        with torch.no_grad():
            head.weight.copy_(torch.tensor([100.0, -100.0, 100.0, 0.1, -0.01, 0.0])[:, None].expand_as(head.weight))
        hidden = (100 * torch.eye(3, dtype=dtype)).requires_grad_()
        loss = head.nll(hidden, torch.tensor([0, 1, 3]))
        assert loss.isfinite().all()
        assert (loss >= 0).all()
        assert all(gradient.isfinite().all() for gradient in _gradients(loss.sum(), [hidden, *head.parameters()]))
        assert head.log_prob(hidden).isfinite().all()


def test_mixed_precision_under_autocast():
    for head in _examples(8, 21, torch.float32):
        hidden, targets = _batch(6, 8, 21, torch.float32)
        hidden.requires_grad_()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for given_hidden in (hidden, hidden.bfloat16()):
                found = losses.cross_entropy(head, given_hidden, targets)
                assert found.dtype == torch.float32
        wanted = _of(targets, _reference(head, hidden)).sum() / 5
        torch.testing.assert_close(found, wanted.float(), rtol=0.05, atol=0.1)
        assert all(g.isfinite().all() for g in _gradients(found, [hidden, *head.parameters()]))


def test_topk_is_that_of_all_classes():
    for head in _examples(4, 11):
        hidden = torch.randn(2, 3, 4, dtype=torch.float64)
        values, places = head.topk(hidden, 4)
        wanted = _reference(head, hidden).log_softmax(-1).topk(4)
        torch.testing.assert_close(values, wanted.values)
        assert torch.equal(places, wanted.indices)
        with pytest.raises(ValueError, match=r"\[1, 11\]"):
            head.topk(hidden, 12)


def test_draws_have_the_distribution():
    for head in _examples(3, 6):
        with torch.no_grad():
            head.weight.mul_(0.5)
        hidden = torch.randn(3, dtype=torch.float64)
        probabilities = _reference(head, hidden).softmax(-1).detach()
        drawn = head.sample(hidden.expand(100_000, 3), generator=torch.Generator().manual_seed(1))
        likely = probabilities * 100_000 >= 5
        counts = torch.bincount(drawn, minlength=6).double()
        seen = torch.cat([counts[likely], counts[~likely].sum()[None]])
        wanted = torch.cat([probabilities[likely], probabilities[~likely].sum()[None]]) * 100_000
        keep = wanted > 0
        assert stats.chisquare(seen[keep].numpy(), wanted[keep].numpy()).pvalue > 1e-4


def test_saved_heads_come_back(tmp_path):
    for place, head in enumerate(_examples(3, 5, torch.float32)):
        back = heads.load(heads.save(head, tmp_path / str(place)))
        hidden = torch.randn(2, 3)
        assert type(back) is LowRank
        assert back.options() == head.options()
        assert torch.equal(back(hidden), head(hidden))
        meta = LowRank(3, 5, **head.options(), device="meta")
        assert {name: one.shape for name, one in meta.state_dict().items()} == {
            name: one.shape for name, one in head.state_dict().items()
        }
        drawn = meta.to_empty(device="cpu")
        drawn.reset_parameters()
        assert all(parameter.isfinite().all() for parameter in drawn.parameters())
        assert drawn.cost(10).parameters == sum(parameter.numel() for parameter in head.parameters())


def test_functional_transforms_agree_with_autograd():
    for head in _examples(3, 5):
        hidden, targets = _batch(4, 3, 5)
        hidden.requires_grad_()
        direction, loss = torch.randn_like(hidden), partial(head.nll, targets=targets)
        wanted = _gradients(loss(hidden).sum(), [hidden])[0]
        _, along = torch.func.jvp(loss, (hidden.detach(),), (direction,))
        torch.testing.assert_close(along, (wanted * direction).sum(-1))
        batched = torch.func.vmap(torch.func.grad(lambda h, loss=loss: loss(h).sum()))
        torch.testing.assert_close(batched(hidden.detach().expand(2, 4, 3)), wanted.expand(2, 4, 3))


@pytest.mark.slow
@pytest.mark.compile
def test_compiled_loss_is_the_eager_one():
    for head in _examples(4, 9, torch.float32)[-1:]:
        torch._dynamo.reset()
        hidden, targets = _batch(6, 4, 9, torch.float32)
        hidden.requires_grad_()
        inputs = [hidden, *head.parameters()]

        def loss(hidden: torch.Tensor, targets: torch.Tensor, head: nn.Module = head) -> torch.Tensor:
            return losses.cross_entropy(head, hidden, targets, label_smoothing=0.1, chunk=4)

        found = torch.compile(loss, fullgraph=True)(hidden, targets)
        torch.testing.assert_close(found, loss(hidden, targets), rtol=1e-4, atol=1e-4)
        wanted = _gradients(loss(hidden, targets), inputs)
        torch.testing.assert_close(_gradients(found, inputs), wanted, rtol=1e-3, atol=1e-4)


def test_worked_by_hand():
    head = LowRank(2, 3, rank=1, dtype=torch.float64)
    with torch.no_grad():
        head.projection.copy_(torch.tensor([[1.0, 2.0]]))
        head.weight.copy_(torch.tensor([[1.0], [0.0], [-1.0]]))
    hidden = torch.tensor([[1.0, 1.0]], dtype=torch.float64)  # h B^T = 3
    torch.testing.assert_close(head(hidden), torch.tensor([[3.0, 0.0, -3.0]], dtype=torch.float64))
    wanted = math.log(math.exp(3) + 1 + math.exp(-3)) - 3
    torch.testing.assert_close(head.nll(hidden, torch.tensor([0])).item(), wanted)


@pytest.mark.parametrize(("d", "v", "rank"), [(6, 20, 6), (6, 4, 4), (6, 20, 9), (1, 5, 1)])
def test_starts_as_the_linear_head_where_the_rank_allows(d, v, rank):
    torch.manual_seed(0)
    linear = heads.Linear(d, v, bias=True, scale=1.7)
    head = LowRank.from_linear(linear, rank=rank)
    hidden, targets = torch.randn(30, d), torch.randint(v, (30,))
    assert head.fit_error is not None
    assert head.fit_error < 1e-7
    torch.testing.assert_close(head.nll(hidden, targets), linear.nll(hidden, targets), rtol=0, atol=1e-5)


@pytest.mark.parametrize("rank", [1, 3, 5])
def test_best_fit_is_the_truncated_decomposition_and_its_error_is_told(rank):
    torch.manual_seed(0)
    linear = nn.Linear(7, 40, dtype=torch.float64)
    head = LowRank.from_linear(linear, rank=rank)
    left, values, right = torch.linalg.svd(linear.weight.detach(), full_matrices=False)
    best = left[:, :rank] @ torch.diag(values[:rank]) @ right[:rank]
    product = (head.weight @ head.projection).detach()
    torch.testing.assert_close(product, best)
    error = (linear.weight - best).norm() / linear.weight.norm()
    assert head.fit_error == pytest.approx(error.item(), rel=1e-9)
    torch.testing.assert_close(head.weight.norm(dim=0), head.projection.norm(dim=1))  # the two share each value


def test_a_matrix_of_zeros_and_one_of_low_rank_are_kept_exactly():
    linear = nn.Linear(4, 6, bias=False)
    nn.init.zeros_(linear.weight)
    head = LowRank.from_linear(linear, rank=2)
    assert head.fit_error == 0
    assert torch.equal(head(torch.randn(2, 4)), torch.zeros(2, 6))
    assert all(parameter.isfinite().all() for parameter in head.parameters())
    with torch.no_grad():
        linear.weight.copy_(torch.outer(torch.arange(6.0), torch.tensor([1.0, -2.0, 0.5, 3.0])))
    head = LowRank.from_linear(linear, rank=1)
    torch.testing.assert_close(head.weight @ head.projection, linear.weight)


def test_rank_of_the_log_probabilities_keeps_the_bound():
    head = LowRank(12, 40, rank=3, bias=True, dtype=torch.float64)
    assert head.rank_bound == 5
    values = torch.linalg.svdvals(head.log_prob(torch.randn(60, 12, dtype=torch.float64)))
    assert int((values > 1e-10 * values[0]).sum()) == 5
    assert LowRank(4, 40, rank=9).rank_bound == 5
    assert LowRank(12, 4, rank=9).rank_bound == 4


def test_spec_and_wrong_options():
    head = heads.build("low_rank:rank=3,bias=True", 8, 20)
    assert isinstance(head, LowRank)
    assert (head.rank, head.bias is not None, head.flops()) == (3, True, 2 * 3 * 28)
    assert (LowRank(8, 20).rank, LowRank(3, 20).rank) == (2, 1)
    with pytest.raises(ValueError, match="`rank` must be at least 1, got 0"):
        LowRank(8, 20, rank=0)
    with pytest.raises(ValueError, match="soft-cap"):
        LowRank.from_linear(heads.Linear(3, 4, softcap=2.0))
