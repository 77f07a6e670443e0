from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from unembed import heads, losses, ops
from unembed.heads import Linear, MultiFacet
from unembed.heads._multi_facet import _reference

EXAMPLES = (0, 1, 2)


def made(example: int, d: int = 4, v: int = 7, dtype: torch.dtype = torch.float64) -> MultiFacet:
    torch.manual_seed(example)
    return MultiFacet.examples(d, v)[example].to(dtype)


def batch(head: MultiFacet, b: int, t: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = 2 * torch.randn(b, t, head.layers, head.in_features, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), torch.randint(0, head.out_features, (b, t), generator=generator)


def defined(head: MultiFacet, hidden: Tensor, targets: Tensor) -> Tensor:
    counts = targets >= 0
    own = _reference(head, hidden).gather(-1, torch.where(counts, targets, 0)[..., None]).squeeze(-1)
    return torch.where(counts, -own, 0.0)


class Largest(TorchDispatchMode):
    """The most numbers that any one tensor made inside has."""

    numbers = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        for one in found if isinstance(found, (tuple, list)) else (found,):
            if isinstance(one, Tensor) and one.untyped_storage().nbytes():
                self.numbers = max(self.numbers, one.numel())
        return found


@settings(deadline=None, max_examples=40)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 5)),
    sizes=st.tuples(st.integers(1, 4), st.integers(1, 11)),
    k=st.integers(1, 3),
    window=st.integers(1, 4),
    layers=st.integers(1, 3),
    partitions=st.integers(1, 4),
    chunk=st.one_of(st.none(), st.integers(1, 8)),
    bias=st.booleans(),
)
def test_nll_and_gradients_are_the_definition_for_every_shape(
    *, shape, sizes, k, window, layers, partitions, chunk, bias
):
    torch.manual_seed(k)
    options = {"k": k, "window": window, "layers": layers, "partitions": min(partitions, sizes[1]), "bias": bias}
    head = MultiFacet(*sizes, **options, dtype=torch.float64)
    hidden, targets = batch(head, *shape)
    targets[:, ::3] = -100
    upstream = torch.randn(shape, dtype=torch.float64)
    inputs = (hidden, *head.parameters())
    got, want = head.nll(hidden, targets, chunk=chunk), defined(head, hidden, targets)
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(one, inputs, upstream, materialize_grads=True) for one in (got, want)]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(head(hidden), _reference(head, hidden))
    flat, of_flat, _ = head.flattened(hidden, targets)
    coefficients = nn.functional.pad(upstream.reshape(-1, 1), (0, 3))
    made_forward = torch.autograd.grad(
        head.loss(flat, of_flat, coefficients, chunk=chunk), inputs, materialize_grads=True
    )
    torch.testing.assert_close(made_forward, gradients[1], atol=1e-10, rtol=1e-9)


class _Nll(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden, targets):
        return self.head.nll(hidden, targets, chunk=1)


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("place", [1, 3])
def test_a_later_position_changes_no_earlier_one_and_an_old_one_none_beyond_the_window(example, place):
    head = made(example)
    hidden, targets = batch(head, 2, 6)
    before = head.nll(hidden, targets), head(hidden)
    changed = hidden.detach().clone()
    changed[:, place] += 1.0
    after = head.nll(changed, targets), head(changed)
    for old, new in zip(before, after, strict=True):
        same = (old == new).flatten(2).all(2).all(0) if old.ndim > 2 else (old == new).all(0)
        assert same.tolist() == [not place <= t < place + head.window for t in range(6)]


def test_packed_documents_do_not_read_each_other():
    head = made(2)  # a window of three
    hidden, targets = batch(head, 1, 9)
    documents = torch.tensor([[5, 5, 7, 5, 5, 5, 5, 8, 8]])  # the second 5 is another document
    parts = [slice(0, 2), slice(2, 3), slice(3, 7), slice(7, 9)]
    alone = torch.cat([head(hidden[:, part]) for part in parts], 1)
    features = head.features(hidden, document_ids=documents).flatten(0, 1)
    torch.testing.assert_close(head(features), alone[0])
    assert not torch.allclose(head(hidden), alone)
    torch.testing.assert_close(head.topk(features, 3)[0], alone[0].topk(3).values)
    for options in ({}, {"label_smoothing": 0.1}):
        found = losses.cross_entropy(head, hidden, targets, shift=1, document_ids=documents, **options)
        each = [
            losses.cross_entropy(head, hidden[:, part], targets[:, part], shift=1, reduction="sum", **options)
            for part in parts
        ]
        torch.testing.assert_close(found, sum(each) / 5)
    (gradient,) = torch.autograd.grad(head(features)[2].sum(), hidden)
    assert gradient[0].flatten(1).any(1).nonzero().flatten().tolist() == [2]


def test_losses_against_other_distributions_read_each_sequence_alone():
    head, other = made(0), Linear(3, 7, dtype=torch.float64)
    hidden, states = batch(head, 2, 4)[0], torch.randn(2, 4, 3, dtype=torch.float64)
    classes = torch.arange(8).view(2, 4, 1) % 7
    hard = losses.soft_cross_entropy(head, hidden, classes, torch.ones(2, 4, 1).double(), chunk=3)
    torch.testing.assert_close(hard, head.nll(hidden, classes[..., 0]).mean())
    documents = torch.tensor([[0, 0, 1, 1], [2, 2, 2, 2]])
    options = {"shift": 1, "document_ids": documents, "reduction": "none"}
    found = losses.distillation(head, hidden, other, states, chunk=2, **options)
    features = head.features(hidden, document_ids=documents).flatten(0, 1)
    want = ops.kl_divergence(other.log_prob(states.flatten(0, 1)), head.log_prob(features)).view(2, 4)[:, :-1]
    inside = torch.tensor([[1, 0, 1], [1, 1, 1]])
    torch.testing.assert_close(found, want * inside)


def test_one_sequence_does_not_read_another():
    head = made(0)
    hidden, targets = batch(head, 3, 4)
    alone = torch.cat([head.nll(hidden[b : b + 1], targets[b : b + 1]) for b in range(3)])
    torch.testing.assert_close(head.nll(hidden, targets), alone)
    torch.testing.assert_close(head.nll(hidden[0], targets[0]), alone[0])


def test_a_partition_without_real_classes_has_no_probability():
    head = MultiFacet(4, 6, k=1, window=1, layers=1, partitions=2, bias=True, dtype=torch.float64)
    with torch.no_grad():
        assert head.bias is not None
        head.bias[1::2] = -torch.inf
    hidden, _ = batch(head, 1, 6)
    nll = head.nll(hidden, torch.arange(6)[None])
    want = -_reference(head, hidden)[0].diagonal()
    torch.testing.assert_close(nll[0], want)
    assert nll[0, 1::2].isinf().all()
    real = head.nll(hidden, torch.tensor([[0, 2, 4, 0, 2, 4]])).sum()
    for gradient in torch.autograd.grad(real, (hidden, head.weight, head.facets)):
        assert gradient.isfinite().all()


def test_partitions_give_facet_0_a_projection_for_each_residue():
    head = MultiFacet(4, 7, k=1, window=1, layers=1, partitions=3, dtype=torch.float64)
    hidden, _ = batch(head, 1, 7)
    with torch.no_grad():
        head.facets[1] += 1.0
    before = head.components(head.features(hidden))[..., 1, :] @ head.weight.T
    scores = head(hidden)
    relative = (scores - before)[..., 1::3]  # tokens 1 and 4 keep the differences that projection 1 gives them
    torch.testing.assert_close(relative[..., :1].expand_as(relative), relative)


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("bias", [False, True])
def test_starts_as_the_linear_head(partitions, bias):
    linear = Linear(4, 7, bias=bias, dtype=torch.float64)
    head = MultiFacet.from_linear(linear, partitions=partitions, layers=2)
    hidden, targets = batch(head, 2, 20)
    torch.testing.assert_close(head.nll(hidden, targets), linear.nll(hidden[..., -1, :], targets))
    with pytest.raises(ValueError, match="soft-cap"):
        MultiFacet.from_linear(Linear(4, 7, softcap=2.0))


def test_built_by_name_and_without_memory():
    head = heads.build("multi_facet:k=2,window=2,layers=1,partitions=4", 4, 7)
    assert isinstance(head, MultiFacet)
    assert head.facets.shape == (5, 4, 8)
    assert head.rank_bound is None
    empty = heads.build("multi_facet", 4096, 100_000, device="meta")
    assert all(parameter.is_meta for parameter in empty.parameters())


@pytest.mark.parametrize(("d", "partitions", "bound"), [(3, 1, 5), (3, 2, 8), (2, 3, 6)])
def test_one_facet_is_bounded_by_its_partitions_and_by_what_it_reads(d, partitions, bound):
    head = MultiFacet(d, 40, k=1, window=2, layers=1, partitions=partitions, bias=True, dtype=torch.float64)
    hidden, _ = batch(head, 5, 10)
    assert head.rank_bound == bound
    assert torch.linalg.matrix_rank(head(hidden).flatten(0, 1)) == bound


@pytest.mark.parametrize("partitions", [1, 3])
def test_no_tensor_holds_tokens_times_vocabulary(partitions):
    head = MultiFacet(4, 500, k=2, partitions=partitions, dtype=torch.float64)
    hidden, targets = batch(head, 4, 50)
    with Largest() as largest:
        head.nll(hidden, targets, chunk=2).sum().backward()
        losses.cross_entropy(head, hidden, targets, chunk=2).backward()
    assert largest.numbers <= max(2 * head.alive, 200 * (2 + partitions) * 8)  # scores of 2 tokens, or all features


def test_a_split_facet_asks_for_one_partition_at_a_time(monkeypatch):
    seen, plain = [], ops.linear_terms

    def spy(hidden, weight, *rest, **options):
        seen.append(len(weight))
        return plain(hidden, weight, *rest, **options)

    monkeypatch.setattr(ops, "linear_terms", spy)
    head = MultiFacet(4, 7, k=2, partitions=3, dtype=torch.float64)
    head.nll(*batch(head, 1, 2))
    assert seen == [3, 2, 2, 7]


@pytest.mark.parametrize(
    ("options", "match"), [({"k": 0}, "k"), ({"window": 0}, "window"), ({"layers": 0}, "la"), ({"partitions": 8}, "pa")]
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        MultiFacet(4, 7, **options)


def test_bad_shapes_and_targets_are_refused():
    head = made(1)
    hidden, targets = batch(head, 2, 3)
    with pytest.raises(ValueError, match="Expected `hidden`"):
        head.nll(hidden[..., :3], targets)
    with pytest.raises(ValueError, match="Expected `targets`"):
        head.nll(hidden, targets[:1])
    with pytest.raises(ValueError, match="lie in"):
        head.nll(hidden, targets + 7)
