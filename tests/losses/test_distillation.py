"""Distillation and soft targets against PyTorch's own on written-out log-probabilities."""

import pytest
import torch

from unembed.heads import build
from unembed.losses import cross_entropy, distillation, soft_cross_entropy

F = torch.nn.functional


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _head(spec, d, v=7):
    torch.manual_seed(len(spec))
    return build(spec, d, v, dtype=torch.float64)


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize(("student", "teacher"), [("linear", "mos:k=2"), ("mos:k=2", "linear:bias=True,softcap=2.0")])
def test_value_and_gradient_are_those_of_kl_div(direction, student, teacher):
    head, other = _head(student, 4), _head(teacher, 3)
    hidden, other_hidden = _randn(2, 5, 4).requires_grad_(), _randn(2, 5, 3, seed=1)
    other.requires_grad_(False)
    found = distillation(head, hidden, other, other_hidden, temperature=2.0, direction=direction, chunk=3)
    p = torch.log_softmax(head(hidden) / 2, -1)
    q = torch.log_softmax(other(other_hidden) / 2, -1)
    source, target = (p, q) if direction == "forward" else (q, p)
    expected = 4 * F.kl_div(source, target, log_target=True, reduction="none").sum(-1).mean()
    assert torch.allclose(found, expected)
    inputs = [hidden, *head.parameters()]
    for one, right in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert torch.allclose(one, right)
    plain = distillation(head, hidden, other, other_hidden, temperature=2.0, direction=direction, times_squared=False)
    assert torch.allclose(4 * plain, expected)
    assert torch.autograd.gradgradcheck(
        lambda h: distillation(head, h, other, other_hidden, direction=direction), hidden, fast_mode=True
    )


def test_equal_heads_do_not_diverge_and_weights_take_tokens_out():
    head, hidden = _head("linear", 4), _randn(3, 4)
    each = distillation(head, hidden, head, hidden + torch.tensor([[0.0], [1.0], [2.0]]), reduction="none")
    assert each[0].item() == pytest.approx(0, abs=1e-12)
    assert (each[1:] > 0).all()
    weight = torch.tensor([1.0, 0, 3]).double()
    mean = distillation(head, hidden, head, hidden + torch.tensor([[0.0], [1.0], [2.0]]), token_weight=weight)
    assert torch.allclose(mean, (each * weight).sum() / 4)
    assert distillation(head, hidden, head, hidden, token_weight=torch.zeros(3)).item() == 0
    assert distillation(head, hidden, head, hidden, token_weight=torch.zeros(3), when_empty="nan").isnan()


def test_l9_a_class_of_probability_zero_gives_no_nan():
    """Teacher and student both sure: log p = log q = [0, -200]."""
    head = _head("linear:bias=True", 1, 2)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([0.0, -200.0]))
    hidden = torch.zeros(1, 1, dtype=torch.float64)
    for direction in ("forward", "reverse"):
        assert distillation(head, hidden, head, hidden, direction=direction).item() == 0
    with torch.no_grad():
        head.bias[1] = -torch.inf
    loss = distillation(head, hidden, head, hidden)
    assert loss.item() == 0
    assert all(torch.isfinite(gradient).all() for gradient in torch.autograd.grad(loss, list(head.parameters())))


@pytest.mark.parametrize("spec", ["linear:bias=True", "mos:k=2"])
def test_soft_targets_are_those_of_torch(spec):
    head, hidden = _head(spec, 4), _randn(2, 3, 4).requires_grad_()
    classes = torch.arange(12).reshape(2, 3, 2) % 7
    share = torch.rand(2, 3, 2, dtype=torch.float64)
    dense = torch.zeros(2, 3, 7, dtype=torch.float64).scatter_add(-1, classes, share)
    found = soft_cross_entropy(head, hidden, classes, share, chunk=4)
    expected = F.cross_entropy(head(hidden).flatten(0, 1), dense.flatten(0, 1))
    assert torch.allclose(found, expected)
    inputs = [hidden, *head.parameters()]
    for one, right in zip(torch.autograd.grad(found, inputs), torch.autograd.grad(expected, inputs), strict=True):
        assert torch.allclose(one, right)
    hard = soft_cross_entropy(head, hidden, classes[..., :1], torch.ones(2, 3, 1).double())
    assert torch.allclose(hard, cross_entropy(head, hidden, classes[..., 0]))


def test_l5_a_soft_target_of_zero_on_an_impossible_class():
    head = _head("linear:bias=True", 1, 3)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([-torch.inf, 1, 1]))
    hidden = torch.zeros(1, 1, dtype=torch.float64)
    loss = soft_cross_entropy(head, hidden, torch.tensor([[0, 1, 2]]), torch.tensor([[0.0, 1, 0]]).double())
    assert loss.item() == pytest.approx(0.693147, abs=1e-6)
    assert all(torch.isfinite(gradient).all() for gradient in torch.autograd.grad(loss, list(head.parameters())))


def test_soft_targets_lie_ahead_and_in_the_same_document():
    head, hidden = _head("linear:bias=True", 4), _randn(2, 5, 4)
    classes, share = torch.arange(20).reshape(2, 5, 2) % 7, torch.rand(2, 5, 2, dtype=torch.float64)
    documents, weight = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]), torch.rand(2, 5, dtype=torch.float64)
    plain = soft_cross_entropy(head, hidden[:, :-1], classes[:, 1:], share[:, 1:], reduction="none")
    inside = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]).double()
    options = {"shift": 1, "document_ids": documents}
    each = soft_cross_entropy(head, hidden, classes, share, reduction="none", **options)
    assert torch.allclose(each, plain * inside)
    assert torch.allclose(soft_cross_entropy(head, hidden, classes, share, **options), (plain * inside).sum() / 7)
    own = inside * weight[:, 1:]
    mean = soft_cross_entropy(head, hidden, classes, share, token_weight=weight, **options)
    assert torch.allclose(mean, (plain * own).sum() / own.sum())
    hard = soft_cross_entropy(
        head, hidden, classes[..., :1], torch.ones(2, 5, 1).double(), token_weight=weight, **options
    )
    assert torch.allclose(hard, cross_entropy(head, hidden, classes[..., 0], token_weight=weight, **options))
    assert soft_cross_entropy(head, hidden, classes, share, shift=9).item() == 0


def test_distillation_leaves_out_what_cross_entropy_leaves_out():
    head, other, hidden, states = _head("linear", 4), _head("mos:k=2", 3), _randn(2, 5, 4), _randn(2, 5, 3, seed=1)
    plain = distillation(head, hidden, other, states, reduction="none")
    targets = torch.arange(10).reshape(2, 5) % 7
    targets[1, 3] = -1
    documents, weight = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]]), torch.rand(2, 5, dtype=torch.float64)
    assert torch.allclose(distillation(head, hidden, other, states, shift=2, reduction="none"), plain[:, :3])
    options = {"shift": 1, "document_ids": documents}
    inside = torch.tensor([[1, 0, 1, 1], [1, 1, 1, 1]]).double()
    each = distillation(head, hidden, other, states, reduction="none", **options)
    assert torch.allclose(each, plain[:, :-1] * inside)
    inside[1, 2] = 0  # what it predicts is ignored
    options |= {"targets": targets, "ignore_index": -1}
    own = inside * weight[:, 1:]
    found = distillation(head, hidden, other, states, token_weight=weight, **options)
    assert torch.allclose(found, (plain[:, :-1] * own).sum() / own.sum())
    counted = cross_entropy(
        head, hidden, targets, token_weight=weight, shift=1, document_ids=documents, ignore_index=-1, reduction="none"
    )
    assert torch.equal(counted != 0, own != 0)
    counts = targets != -1
    without_shift = distillation(head, hidden, other, states, targets=targets, ignore_index=-1)
    assert torch.allclose(without_shift, plain[counts].mean())


def test_bad_alignment_is_named_in_the_same_words():
    head, hidden = _head("linear", 4), _randn(3, 4)
    classes, share = torch.zeros(3, 1).long(), torch.ones(3, 1).double()
    for options, said in (
        ({"shift": -1}, "`shift` must be at least 0"),
        ({"document_ids": torch.zeros(3).long()}, "`document_ids` need `shift`"),
        ({"shift": 1, "document_ids": torch.zeros(2).long()}, r"Expected `document_ids` \(3,\)"),
        ({"shift": 1, "token_weight": torch.ones(2)}, r"Expected `token_weight` \(3,\)"),
    ):
        for loss in (
            lambda given: soft_cross_entropy(head, hidden, classes, share, **given),
            lambda given: distillation(head, hidden, head, hidden, **given),
            lambda given: cross_entropy(head, hidden, classes[:, 0], **given),
        ):
            with pytest.raises(ValueError, match=said):
                loss(options)
    with pytest.raises(ValueError, match=r"Expected `targets` \(3,\)"):
        distillation(head, hidden, head, hidden, targets=torch.zeros(2).long())
    with pytest.raises(ValueError, match="got -1"):
        distillation(head, hidden, head, hidden, targets=torch.full((3,), -1))


def test_what_is_no_head_is_told_how_to_become_one():
    linear, hidden, targets = torch.nn.Linear(4, 7).double(), _randn(3, 4), torch.arange(3)
    head, wrap = _head("linear", 4), r"wrap it: heads.Linear.from_linear\(linear\)"
    with pytest.raises(ValueError, match=rf"`head` must be a head, got torch.nn.modules.linear.Linear; {wrap}"):
        cross_entropy(linear, hidden, targets)
    with pytest.raises(ValueError, match=r"`teacher` must be a head, got torch.nn.modules.linear.Linear"):
        distillation(head, hidden, linear, hidden)
    with pytest.raises(ValueError, match=wrap):
        soft_cross_entropy(linear, hidden, targets[:, None], torch.ones(3, 1).double())
    with pytest.raises(ValueError, match=r"`head` must be a head, got builtins.str; see unembed.heads"):
        cross_entropy("linear", hidden, targets)
    assert torch.equal(cross_entropy(torch.compile(head), hidden, targets), cross_entropy(head, hidden, targets))


def test_bad_input_is_named():
    head, other, hidden = _head("linear", 4), _head("linear", 4, 8), _randn(3, 4)
    with pytest.raises(ValueError, match="`teacher` has 8 classes, `head` 7"):
        distillation(head, hidden, other, hidden)
    with pytest.raises(ValueError, match="`temperature` must be positive"):
        distillation(head, hidden, head, hidden, temperature=0.0)
    with pytest.raises(ValueError, match="Expected `teacher_hidden`"):
        distillation(head, hidden, head, hidden[:2])
    with pytest.raises(ValueError, match="Expected `classes` and `probabilities`"):
        soft_cross_entropy(head, hidden, torch.zeros(2, 1).long(), torch.ones(2, 1).double())
    with pytest.raises(ValueError, match="got 9"):
        soft_cross_entropy(head, hidden, torch.full((3, 1), 9), torch.ones(3, 1).double())


@pytest.mark.compile
def test_compiles_whole():
    head, other, hidden = _head("linear", 4), _head("mos:k=2", 4), _randn(5, 4)
    options = {"shift": 1, "document_ids": torch.tensor([0, 0, 0, 1, 1]), "targets": torch.tensor([0, 1, -100, 3, 4])}
    for given in ({}, options):
        compiled = torch.compile(
            lambda h, given=given: distillation(head, h, other, hidden, **given), fullgraph=True, backend="aot_eager"
        )
        assert torch.allclose(compiled(hidden), distillation(head, hidden, other, hidden, **given))
