"""`losses.fenchel_young`: any head with scores, the options of the other losses, and what it refuses."""

import pytest
import torch

from unembed import heads, losses, ops


def _case(kind, *, n=(3, 5), d=6, v=20, **options):
    torch.manual_seed(0)
    head = heads.build(kind, d, v, dtype=torch.float64, **options)
    with torch.no_grad():
        head.weight.mul_(4)
    hidden = torch.randn(*n, d, dtype=torch.float64, requires_grad=True)
    return head, hidden, torch.randint(0, v, n)


def _scores(head, hidden):
    return head.scores(hidden) if isinstance(head, heads.Entmax) else head(hidden)


@pytest.mark.parametrize(
    ("kind", "alpha"),
    [
        ("entmax", None),
        ("entmax:alpha=2.0,bias=True", None),
        ("entmax:alpha=1.0", None),
        ("linear", 1.5),
        ("linear:bias=True,softcap=2.0,scale=1.5", 2.0),
        ("sigsoftmax", 1.5),
        ("monotonic", 1.3),
    ],
)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_the_loss_is_that_of_the_scores_for_every_head(kind, alpha, reduction):
    head, hidden, targets = _case(kind)
    targets[0, 2] = targets[2, 4] = -100
    given = {} if alpha is None else {"alpha": alpha}
    each = ops.fenchel_young(_scores(head, hidden), targets, alpha or head.alpha)
    right = {"mean": each.sum() / 13, "sum": each.sum(), "none": each}[reduction]
    found = losses.fenchel_young(head, hidden, targets, reduction=reduction, chunk=4, **given)
    assert torch.allclose(found, right, atol=1e-11)
    inputs = [hidden, *head.parameters()]
    slopes = [torch.autograd.grad(loss.sum(), inputs) for loss in (found, right)]
    assert all(torch.allclose(one, other, atol=1e-10) for one, other in zip(*slopes, strict=True))


def test_alpha_one_is_cross_entropy():
    head, hidden, targets = _case("linear")
    assert torch.allclose(
        losses.fenchel_young(head, hidden, targets, alpha=1.0), losses.cross_entropy(head, hidden, targets)
    )


def test_weights_shift_and_documents():
    head, hidden, tokens = _case("entmax")
    weight = torch.rand(3, 5, dtype=torch.float64)
    of_class = torch.rand(20, dtype=torch.float64)
    documents = torch.tensor([[0, 0, 1, 1, 1]] * 3)
    each = ops.fenchel_young(head.scores(hidden[:, :-1]), tokens[:, 1:], 1.5)
    factor = weight[:, 1:] * of_class[tokens[:, 1:]]
    factor[:, 1] = 0  # position 1 would predict across the change of document
    options = {"shift": 1, "document_ids": documents, "token_weight": weight, "class_weight": of_class}
    found = losses.fenchel_young(head, hidden, tokens, **options)
    assert torch.allclose(found, (each * factor).sum() / factor.sum())
    none = losses.fenchel_young(head, hidden, tokens, reduction="none", **options)
    assert torch.allclose(none, each * factor)


@pytest.mark.parametrize("kind", ["entmax", "sigsoftmax"])
def test_nothing_that_counts_is_zero_with_zero_gradients_or_nan_if_asked(kind):
    head, hidden, targets = _case(kind)
    targets.fill_(-100)
    options = {} if kind == "entmax" else {"alpha": 1.5}
    loss = losses.fenchel_young(head, hidden, targets, **options)
    assert float(loss.detach()) == 0
    for slope in torch.autograd.grad(loss, [hidden, *head.parameters()]):
        assert (slope == 0).all()
    assert losses.fenchel_young(head, hidden, targets, when_empty="nan", **options).isnan()
    empty = losses.fenchel_young(head, hidden[:0], targets[:0], **options)
    assert float(empty.detach()) == 0


def test_training_moves_the_target_into_the_support():
    head, hidden, targets = _case("entmax", n=(8,))
    hidden = hidden.detach()
    with torch.no_grad():
        head.weight.mul_(4)
    assert head.nll(hidden, targets).isinf().any()
    optimiser = torch.optim.SGD(head.parameters(), lr=4.0)
    for _ in range(300):
        optimiser.zero_grad()
        losses.fenchel_young(head, hidden, targets).backward()
        optimiser.step()
    assert float(losses.fenchel_young(head, hidden, targets).detach()) < 1e-4
    assert float(head.nll(hidden, targets).detach().max()) < 0.1


def test_what_it_refuses_in_one_line():
    head, hidden, targets = _case("linear")
    with pytest.raises(ValueError, match="Linear has no `alpha` of its own"):
        losses.fenchel_young(head, hidden, targets)
    with pytest.raises(ValueError, match=r"`alpha` must lie in \[1, 2\.5\]"):
        losses.fenchel_young(head, hidden, targets, alpha=0.5)
    with pytest.raises(ValueError, match="`reduction` must be"):
        losses.fenchel_young(head, hidden, targets, alpha=1.5, reduction="avg")
    head, hidden, targets = _case("entmax")
    with pytest.raises(ValueError, match=r"`alpha` is 1\.5 for this Entmax head"):
        losses.fenchel_young(head, hidden, targets, alpha=2.0)
    with pytest.raises(ValueError, match="lie in"):
        losses.fenchel_young(head, hidden, targets + 20)
    mixture = heads.build("mos:k=2", 6, 20, dtype=torch.float64)
    with pytest.raises(ValueError, match="gives log-probabilities"):
        losses.fenchel_young(mixture, hidden, targets, alpha=1.5)
