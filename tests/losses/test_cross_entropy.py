"""The loss of every head with every option, against PyTorch's own on written-out log-probabilities."""

import itertools

import pytest
import torch

from unembed.heads import Linear, MixtureOfSoftmaxes, build
from unembed.losses import cross_entropy

F = torch.nn.functional
SPECS = ["linear", "linear:bias=True,softcap=2.0,scale=0.5", "mos:k=2,bias=True", "mos:k=2,shared=False"]


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _head(spec="linear", d=4, v=7):
    torch.manual_seed(0)
    head = build(spec, d, v, dtype=torch.float64)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(3)
    return head


def _targets(*shape, v=7):
    targets = torch.arange(torch.Size(shape).numel()).reshape(shape) % v
    return torch.where(targets == 4, -100, targets)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize(
    ("smoothing", "weighted", "reduction"), itertools.product((0.0, 0.3), (False, True), ("mean", "sum", "none"))
)
def test_smoothing_weights_and_reductions_are_those_of_torch(spec, smoothing, weighted, reduction):
    head, hidden, targets = _head(spec), _randn(3, 4, 4).requires_grad_(), _targets(3, 4)
    class_weight = torch.rand(7, generator=torch.Generator().manual_seed(1), dtype=torch.float64) if weighted else None
    options = {"label_smoothing": smoothing, "reduction": reduction}
    found = cross_entropy(head, hidden, targets, class_weight=class_weight, chunk=5, **options)
    scores = head.log_prob(hidden).flatten(0, 1)
    expected = F.cross_entropy(scores, targets.flatten(), weight=class_weight, **options)
    if reduction == "none":
        found, expected = found.flatten(), expected * torch.arange(1, 13)
        found = found * torch.arange(1, 13)
    assert torch.allclose(found, expected, rtol=1e-10)
    inputs = [hidden, *head.parameters()]
    pairs = zip(torch.autograd.grad(found.sum(), inputs), torch.autograd.grad(expected.sum(), inputs), strict=True)
    assert all(torch.allclose(one, other, rtol=1e-8, atol=1e-12) for one, other in pairs)


def test_token_weights_and_z_loss_by_the_formula():
    head, hidden, targets = _head(), _randn(6, 4), torch.tensor([0, 1, -100, 3, 4, 5])
    weight, classes = torch.tensor([1.0, 0, 5, 2, 1, 1]).double(), torch.rand(7, dtype=torch.float64) + 0.5
    scores = head(hidden)
    nll = F.cross_entropy(scores, targets, reduction="none", weight=classes)
    counted = weight * (targets != -100)
    lse = scores.logsumexp(-1)
    expected = (counted * nll).sum() / (counted * classes[targets.clamp(min=0)]).sum()
    expected = expected + 0.1 * (counted * lse**2).sum() / counted.sum()
    found = cross_entropy(head, hidden, targets, class_weight=classes, token_weight=weight, z_loss=0.1)
    assert torch.allclose(found, expected)
    each = cross_entropy(head, hidden, targets, class_weight=classes, token_weight=weight, z_loss=0.1, reduction="none")
    assert torch.allclose(each, counted * (nll + 0.1 * lse**2))


def test_l17_a_mean_of_shards_needs_their_weights():
    """Two halves with unequal weights: their sums and weights give the mean over all, the mean of means does not."""
    head, hidden, targets = _head(), _randn(6, 4), torch.tensor([0, 0, 0, 1, 1, 2])
    weight = torch.tensor([1.0, 5, 2, 1, 1, 1, 1]).double()
    whole = cross_entropy(head, hidden, targets, class_weight=weight)
    sums = [
        cross_entropy(head, hidden[part], targets[part], class_weight=weight, reduction="sum")
        for part in (slice(0, 3), slice(3, 6))
    ]
    assert torch.allclose(whole, sum(sums) / weight[targets].sum())
    assert torch.allclose(whole, F.cross_entropy(head(hidden), targets, weight=weight))


def test_l32_smoothing_with_class_weights_by_hand():
    """Scores 0 and log 3, target 0, weights 1 and 2, smoothing 0.5: p = 1/4, 3/4."""
    head = Linear(1, 2, bias=True, dtype=torch.float64)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([0.0, 3.0]).clamp(min=1).log())
    log4, log43 = torch.tensor([4.0, 4 / 3], dtype=torch.float64).log()
    found = cross_entropy(
        head,
        torch.zeros(1, 1, dtype=torch.float64),
        torch.tensor([0]),
        label_smoothing=0.5,
        class_weight=torch.tensor([1.0, 2.0], dtype=torch.float64),
    )
    assert found.item() == pytest.approx(float(0.5 * log4 + 0.25 * (log4 + 2 * log43)), rel=1e-6)


def test_l6_l12_smoothing_is_spread_over_the_real_classes():
    head = Linear(1, 3, bias=True, dtype=torch.float64)
    with torch.no_grad():
        head.weight.zero_()
        head.bias.copy_(torch.tensor([-torch.inf, 1, 1]))
    hidden = torch.zeros(1, 1, dtype=torch.float64)
    loss = cross_entropy(head, hidden, torch.tensor([1]), label_smoothing=0.1)
    assert loss.item() == pytest.approx(0.693147, abs=1e-6)
    for gradient in torch.autograd.grad(loss, list(head.parameters())):
        assert torch.isfinite(gradient).all()


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("tokens", [0, 3])
def test_l2_when_no_token_counts(spec, tokens):
    head, hidden = _head(spec), _randn(tokens, 4).requires_grad_()
    targets = torch.full((tokens,), -100)
    loss = cross_entropy(head, hidden, targets, label_smoothing=0.1)
    assert loss.item() == 0
    for gradient in torch.autograd.grad(loss, [hidden, *head.parameters()]):
        assert torch.equal(gradient, torch.zeros_like(gradient))
    assert cross_entropy(head, hidden, targets, reduction="sum").item() == 0
    assert cross_entropy(head, hidden, targets, when_empty="nan").isnan()
    zero = torch.zeros(tokens, dtype=torch.float64)
    assert cross_entropy(head, hidden, torch.zeros(tokens).long(), token_weight=zero).item() == 0


def test_shift_and_packed_documents():
    head, hidden = _head(), _randn(2, 5, 4).requires_grad_()
    ids = torch.arange(10).reshape(2, 5) % 7
    documents = torch.tensor([[0, 0, 1, 1, 1], [0, 0, 0, 0, 0]])
    found = cross_entropy(head, hidden, ids, shift=1, document_ids=documents)
    targets = ids[:, 1:].clone()
    targets[0, 1] = -100
    assert torch.allclose(found, cross_entropy(head, hidden[:, :-1], targets))
    weight = torch.rand(2, 5, dtype=torch.float64)
    found = cross_entropy(head, hidden, ids, shift=2, token_weight=weight, reduction="none")
    assert found.shape == (2, 3)
    assert torch.allclose(found, weight[:, 2:] * head.nll(hidden[:, :-2], ids[:, 2:]))
    assert cross_entropy(head, hidden, ids, shift=9).item() == 0
    with pytest.raises(ValueError, match="`document_ids` need `shift`"):
        cross_entropy(head, hidden, ids, document_ids=documents)


def test_no_prediction_across_a_document_that_comes_between():
    head, hidden = _head(), _randn(1, 6, 4)
    ids, documents = torch.arange(6)[None], torch.tensor([[0, 0, 1, 0, 0, 0]])
    each = cross_entropy(head, hidden, ids, shift=2, document_ids=documents, reduction="none")
    assert (each != 0).tolist() == [[False, False, False, True]]


def test_a_head_that_drops_at_random_is_refused():
    head = build("monotonic", 4, 7)  # whose loss is made from its `forward`, twice
    head.drop = torch.nn.Dropout(0.5)
    for reduction in ("mean", "none"):
        with pytest.raises(ValueError, match="`drop` of MonotonicSoftmax drops at random"):
            cross_entropy(head, torch.randn(3, 4), torch.arange(3), reduction=reduction)
    assert cross_entropy(head.eval(), torch.randn(3, 4), torch.arange(3)).isfinite()


def test_heads_normalised_by_construction_say_that_z_loss_is_zero():
    head, hidden = _head("mos:k=2"), _randn(3, 4)
    with pytest.warns(UserWarning, match="normalised by construction"):
        loss = cross_entropy(head, hidden, torch.arange(3), z_loss=0.1)
    assert torch.allclose(loss, cross_entropy(head, hidden, torch.arange(3)))


def test_one_bad_token_does_not_poison_the_others():
    head, targets = _head("linear:bias=True"), torch.tensor([0, -100, 2])
    hidden = _randn(3, 4)
    with torch.no_grad():
        head.bias[5] = -torch.inf
    each = cross_entropy(head, hidden, torch.tensor([0, 5, 2]), reduction="none")
    assert torch.isinf(each[1])
    loss = cross_entropy(head, hidden, torch.tensor([0, 5, 2]), token_weight=torch.tensor([1.0, 0, 1]).double())
    assert torch.allclose(loss, cross_entropy(head, hidden, targets))
    assert all(torch.isfinite(part).all() for part in torch.autograd.grad(loss, list(head.parameters())))


def test_bad_options_are_named():
    head, hidden, targets = _head(), _randn(3, 4), torch.zeros(3).long()
    for options, said in (
        ({"reduction": "average"}, "`reduction` must be"),
        ({"label_smoothing": 1.5}, "`label_smoothing` must lie"),
        ({"z_loss": -1.0}, "`z_loss` must be"),
        ({"when_empty": "one"}, "`when_empty` must be"),
        ({"shift": -1}, "`shift` must be"),
        ({"token_weight": torch.ones(2)}, r"Expected `token_weight` \(3,\)"),
        ({"class_weight": torch.ones(8)}, r"Expected `class_weight` \(7,\)"),
    ):
        with pytest.raises(ValueError, match=said):
            cross_entropy(head, hidden, targets, **options)
    with pytest.raises(ValueError, match=r"Expected `targets` \(3,\)"):
        cross_entropy(head, hidden, targets[:2])
    with pytest.raises(ValueError, match=r"got 9"):
        cross_entropy(head, hidden, torch.tensor([0, 9, 1]))
    with pytest.raises(ValueError, match="must hold integers"):
        cross_entropy(head, hidden, torch.zeros(3))
    head.weight = torch.nn.Parameter(torch.zeros(9, 4).double())
    with pytest.raises(ValueError, match=r"`weight` must be \(7, 4\), got \(9, 4\)"):
        cross_entropy(head, hidden, targets)
    assert build("linear:bias=false", 4, 7).bias is None


def test_second_derivatives_and_torch_func():
    head, hidden, targets = _head("mos:k=2"), _randn(3, 4).requires_grad_(), torch.arange(3)
    for one in (head, _head("linear:softcap=2.0")):
        assert torch.autograd.gradgradcheck(
            lambda h, one=one: cross_entropy(one, h, targets, label_smoothing=0.1), hidden, fast_mode=True
        )
    names = dict(head.named_parameters())

    def loss(parameters, hidden):
        return torch.func.functional_call(
            _Loss(head), {f"head.{n}": p for n, p in parameters.items()}, (hidden, targets)
        )

    found = torch.func.grad(loss)(dict(names), hidden.detach())
    cross_entropy(head, hidden.detach(), targets).backward()
    assert all(torch.allclose(found[name], parameter.grad) for name, parameter in names.items())


class _Loss(torch.nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden, targets):
        return cross_entropy(self.head, hidden, targets)


@pytest.mark.compile
@pytest.mark.parametrize("spec", SPECS)
def test_compiles_whole(spec):
    head, hidden, targets = _head(spec), _randn(2, 6, 4).requires_grad_(), _targets(2, 6)
    options = {"shift": 1, "label_smoothing": 0.1, "chunk": 4}
    compiled = torch.compile(lambda h: cross_entropy(head, h, targets, **options), fullgraph=True, backend="aot_eager")
    inputs = [hidden, *head.parameters()]
    for one, other in zip(
        torch.autograd.grad(compiled(hidden), inputs),
        torch.autograd.grad(cross_entropy(head, hidden, targets, **options), inputs),
        strict=True,
    ):
        assert torch.allclose(one, other)


def test_a_mixture_starts_as_the_linear_head():
    linear = torch.nn.Linear(6, 50, bias=True)
    hidden, targets = torch.randn(40, 6), torch.randint(0, 50, (40,))
    head = MixtureOfSoftmaxes.from_linear(linear, k=3)
    assert float(cross_entropy(head, hidden, targets).detach()) == pytest.approx(
        float(F.cross_entropy(linear(hidden), targets).detach()), abs=1e-5
    )
