from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from unembed import heads
from unembed.heads import DirectOutputConnection, Linear, MixtureOfSoftmaxes
from unembed.heads._direct_output import _reference

EXAMPLES = (0, 1)


def made(example: int, d: int = 4, v: int = 7, dtype: torch.dtype = torch.float64) -> DirectOutputConnection:
    torch.manual_seed(example)
    return DirectOutputConnection.examples(d, v)[example].to(dtype)


def batch(head: DirectOutputConnection, n: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = 2 * torch.randn(n, head.layers, head.in_features, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), torch.randint(0, head.out_features, (n,), generator=generator)


def defined(head: DirectOutputConnection, hidden: Tensor, targets: Tensor) -> Tensor:
    counts = targets >= 0
    own = _reference(head, hidden).gather(1, torch.where(counts, targets, 0)[:, None]).squeeze(1)
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
    n=st.integers(1, 7),
    d=st.integers(1, 5),
    v=st.integers(1, 11),
    counts=st.lists(st.integers(0, 3), min_size=1, max_size=3).filter(any),
    chunk=st.one_of(st.none(), st.integers(1, 8)),
    activation=st.sampled_from(["tanh", "identity"]),
    bias=st.booleans(),
)
def test_nll_and_gradients_are_the_definition_for_every_shape(*, n, d, v, counts, chunk, activation, bias):
    torch.manual_seed(n)
    options = {"layers": len(counts), "k": counts, "activation": activation, "bias": bias, "prior_bias": bias}
    head = DirectOutputConnection(d, v, **options, dtype=torch.float64)
    hidden, targets = batch(head, n)
    targets[::3] = -100
    upstream = torch.randn(n, dtype=torch.float64)
    inputs = (hidden, *head.parameters())
    got, want = head.nll(hidden, targets, chunk=chunk), defined(head, hidden, targets)
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(one, inputs, upstream) for one in (got, want)]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=1e-9)
    torch.testing.assert_close(head(hidden), _reference(head, hidden))
    coefficients = nn.functional.pad(upstream[:, None], (0, 3))
    loss = head.loss(hidden, targets, coefficients, chunk=chunk)
    torch.testing.assert_close(torch.autograd.grad(loss, inputs), gradients[1], atol=1e-10, rtol=1e-9)


class _Nll(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden, targets):
        return self.head.nll(hidden, targets, chunk=1)


def test_two_components_far_below_the_float_range_of_probabilities():
    head = DirectOutputConnection(1, 2, layers=2, k=1, activation="identity")
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.zero_()
        head.facets.fill_(1.0)
        head.weight[1] = -40.0
    hidden = torch.ones(1, 2, 1, requires_grad=True)
    nll = head.nll(hidden, torch.tensor([1]))
    assert nll.item() == pytest.approx(40.0)
    (gradient,) = torch.autograd.grad(nll.sum(), hidden)
    torch.testing.assert_close(gradient, torch.full((1, 2, 1), 20.0))  # 40 times the posterior, one half each


def test_the_penalty_is_the_squared_coefficient_of_variation_by_hand():
    head = DirectOutputConnection(1, 3, layers=2, k=1, dtype=torch.float64)
    with torch.no_grad():
        head.prior.copy_(torch.tensor([[math.log(3.0)], [0.0]]))
    hidden = torch.tensor([[[9.0], [1.0]], [[9.0], [0.0]]], dtype=torch.float64)  # weights (3/4, 1/4) and (1/2, 1/2)
    assert head.penalty(hidden).item() == pytest.approx((0.125 / 0.5) ** 2)
    assert head.penalty(hidden, mask=torch.tensor([True, False])).item() == pytest.approx((0.25 / 0.5) ** 2)
    assert head.penalty(hidden, mask=torch.tensor([False, True])).item() == pytest.approx(0.0)
    nothing = head.penalty(hidden, mask=torch.tensor([False, False]))
    assert nothing.item() == 0
    assert not torch.autograd.grad(nothing, head.prior)[0].any()


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_penalty_is_its_formula_and_has_a_gradient(example):
    head = made(example)
    hidden, _ = batch(head, 5)
    mean = head.log_prior(hidden).exp().mean(0)
    torch.testing.assert_close(head.penalty(hidden), mean.var(correction=0) / mean.mean() ** 2)
    assert torch.autograd.gradcheck(head.penalty, (hidden,))


def test_on_the_last_layer_alone_it_is_a_mixture_of_softmaxes():
    head = DirectOutputConnection(4, 7, layers=2, k=[0, 3], bias=True, dtype=torch.float64)
    mixture = MixtureOfSoftmaxes(4, 7, k=3, bias=True, dtype=torch.float64)
    mixture.load_state_dict(head.state_dict())
    hidden, _ = batch(head, 5)
    torch.testing.assert_close(head(hidden), mixture(hidden[:, -1]))


def test_every_layer_is_read():
    head = made(0)
    hidden, targets = batch(head, 3)
    (gradient,) = torch.autograd.grad(head.nll(hidden, targets).sum(), hidden)
    assert gradient.abs().amax((0, 2)).min() > 1e-3


@pytest.mark.parametrize("k", [2, [0, 2], [3, 1]])
@pytest.mark.parametrize("bias", [False, True])
def test_starts_at_the_loss_of_the_linear_head(k, bias):
    linear = Linear(4, 7, bias=bias, dtype=torch.float64)
    head = DirectOutputConnection.from_linear(linear, layers=2, k=k)
    hidden, targets = batch(head, 50)
    torch.testing.assert_close(head.nll(hidden, targets), linear.nll(hidden[:, -1], targets), atol=1e-5, rtol=0)


def test_a_start_with_a_large_share_elsewhere_says_how_far_off_it_can_be():
    linear = Linear(4, 7, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"starts up to 1.0e-03 nats .* weigh 0.001; see `share`"):
        head = DirectOutputConnection.from_linear(linear, share=1e-3)
    hidden, targets = batch(head, 50)
    gap = head.nll(hidden, targets) - linear.nll(hidden[:, -1], targets)
    assert 1e-5 < gap.max() < 1.01e-3
    DirectOutputConnection.from_linear(linear, k=[0, 2], share=1e-3)  # nothing elsewhere: exact, and silent


def test_what_it_cannot_start_from_is_refused():
    with pytest.raises(ValueError, match="soft-cap"):
        DirectOutputConnection.from_linear(Linear(4, 7, softcap=2.0))
    with pytest.raises(ValueError, match="last layer"):
        DirectOutputConnection.from_linear(Linear(4, 7), k=[2, 0])


def test_built_by_name_and_without_memory():
    head = heads.build("doc:layers=3,k=[1,0,2],bias=True", 4, 7)
    assert isinstance(head, DirectOutputConnection)
    assert head.layer_of() == [0, 2, 2]
    assert head.rank_bound is None
    assert heads.build("doc:k=[0,1]", 4, 7).rank_bound == 5
    empty = heads.build("doc", 4096, 100_000, device="meta")
    assert all(parameter.is_meta for parameter in empty.parameters())
    empty.reset_parameters()


def test_no_tensor_holds_tokens_times_vocabulary():
    head = DirectOutputConnection(4, 500, dtype=torch.float64)
    hidden, targets = batch(head, 200)
    with Largest() as largest:
        head.nll(hidden, targets, chunk=2).sum().backward()
        head.loss(hidden, targets, torch.ones(200, 4), chunk=2).backward()
    assert largest.numbers <= 2 * head.alive  # of 200 alive times that


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"layers": 0}, "layers"),
        ({"k": 0}, "k"),
        ({"k": [1]}, "k"),
        ({"k": [2, -1]}, "k"),
        ({"activation": "x"}, "act"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        DirectOutputConnection(4, 7, **options)


def test_bad_shapes_and_targets_are_refused():
    head = made(0)
    hidden, targets = batch(head, 3)
    with pytest.raises(ValueError, match="Expected `hidden`"):
        head.nll(hidden[:, :1], targets)
    with pytest.raises(ValueError, match="one shape"):
        head.nll(hidden, targets[:2])
    with pytest.raises(ValueError, match="lie in"):
        head.nll(hidden, targets + 7)
