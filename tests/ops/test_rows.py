"""Chunked functions and their derivatives of every order, against the same function evaluated at once."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils._pytree import tree_leaves

from unembed.ops import Rows, evaluate


class Scored(Rows):
    """Two token outputs, one of them of integers, and a sum."""

    def __init__(self, chunk):
        super().__init__(chunk, 2, 1)

    def __call__(self, tokens, shared):
        hidden, targets = tokens
        scores = torch.tanh(hidden @ shared[0].T)
        lse = scores.logsumexp(-1)
        own = scores.gather(1, targets[:, None]).squeeze(1)
        return (lse - own, scores.argmax(-1)), (lse.square().sum(),)


HIDDEN = torch.randn(7, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
WEIGHT = torch.randn(5, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
TARGETS = torch.arange(7) % 5


def _chunked(hidden, weight, chunk=3):
    (nll, _), (total,) = evaluate(Scored(chunk), (hidden, TARGETS[: len(hidden)]), (weight,))
    return nll, total


def _whole(hidden, weight):
    (nll, _), (total,) = Scored(1)((hidden, TARGETS[: len(hidden)]), (weight,))
    return nll, total


def _scalar(outputs):
    return outputs[0].sum() * outputs[1]


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_outputs_are_those_of_all_tokens_at_once(chunk):
    for one, other in zip(_chunked(HIDDEN, WEIGHT, chunk), _whole(HIDDEN, WEIGHT), strict=True):
        assert torch.allclose(one, other, rtol=1e-13)


def test_first_and_second_derivatives_in_both_modes():
    inputs = (HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_())
    assert torch.autograd.gradcheck(_chunked, inputs, check_forward_ad=True, check_batched_grad=True)
    assert torch.autograd.gradgradcheck(_chunked, inputs, check_fwd_over_rev=True, check_rev_over_rev=True)


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: grad(f, (0, 1)),
        lambda f: hessian(f, (0, 1)),
        lambda f: jacrev(jacfwd(f, 1), 0),
        lambda f: lambda h, w: jvp(f, (h, w), (torch.ones_like(h), w.sin())),
        lambda f: lambda h, w: jvp(grad(f, 1), (h, w), (torch.ones_like(h), w.sin())),
        lambda f: lambda h, w: vmap(grad(f, (0, 1)), (0, None))(torch.stack([h, h + 1]), w),
        lambda f: lambda h, w: vmap(vmap(f, (None, 0)), (0, None))(torch.stack([h, h + 1]), torch.stack([w, -w])),
        lambda f: grad(lambda h, w: grad(lambda h: grad(f)(h, w).square().sum())(h).square().sum(), 1),
    ],
    ids=["grad", "hessian", "jacrev-jacfwd", "jvp", "jvp-grad", "vmap-grad", "vmap-vmap", "third"],
)
def test_transforms_of_torch_func_compose(transform):
    found = transform(lambda h, w: _scalar(_chunked(h, w)))(HIDDEN, WEIGHT)
    expected = transform(lambda h, w: _scalar(_whole(h, w)))(HIDDEN, WEIGHT)
    for one, other in zip(tree_leaves(found), tree_leaves(expected), strict=True):
        assert torch.allclose(one, other, rtol=1e-9, atol=1e-12)


def test_no_order_of_derivative_sees_more_than_a_chunk():
    seen = []

    class Counted(Scored):
        def __call__(self, tokens, shared):
            seen.append(len(tokens[0]))
            return super().__call__(tokens, shared)

    weight = WEIGHT.clone().requires_grad_()
    (nll, _), (total,) = evaluate(Counted(2), (HIDDEN, TARGETS), (weight,))
    (first,) = torch.autograd.grad(nll.sum() * total, weight, create_graph=True)
    first.square().sum().backward()
    assert set(seen) == {1, 2}


def test_without_tokens_outputs_keep_their_shapes_and_gradients_are_zero():
    weight = WEIGHT.clone().requires_grad_()
    (nll, best), (total,) = evaluate(Scored(3), (HIDDEN[:0], TARGETS[:0]), (weight,))
    assert (nll.shape, best.shape, best.dtype) == ((0,), (0,), torch.int64)
    (nll.sum() + total).backward()
    assert torch.equal(weight.grad, torch.zeros_like(weight))


def test_only_what_requires_a_gradient_gets_one_and_graphs_can_be_kept():
    hidden = HIDDEN.clone().requires_grad_()
    nll, total = _chunked(hidden, WEIGHT)
    one = torch.autograd.grad(nll, hidden, torch.ones_like(nll), retain_graph=True)[0]
    two = torch.autograd.grad(nll, hidden, torch.arange(7.0).double(), retain_graph=True)[0]
    again = torch.autograd.grad(nll, hidden, torch.ones_like(nll))[0]
    assert torch.equal(one, again)
    assert torch.allclose(two, one * torch.arange(7.0)[:, None])
    assert WEIGHT.grad is None
    assert total.grad_fn is not None


@pytest.mark.compile
def test_compiles_whole_with_the_same_gradients():
    compiled = torch.compile(_chunked, fullgraph=True)
    grads = []
    for function in (compiled, _chunked):
        inputs = (HIDDEN.clone().requires_grad_(), WEIGHT.clone().requires_grad_())
        _scalar(function(*inputs)).backward()
        grads.append([tensor.grad for tensor in inputs])
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, rtol=1e-12)
