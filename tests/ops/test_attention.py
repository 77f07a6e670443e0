"""Attention against its definition: values, derivatives of both orders, masks, and what the fused kernel cannot do."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.ops import _attention
from unembed.ops._attention import _reference, attention, fused_obstacle, require_shapes


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _bernoulli(*shape, seed=0, p=0.6):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < p


def _inputs(*batch, length=4, keys=5, width=3, values=3, seed=0, dtype=torch.float64):
    shapes = (*batch, length, width), (*batch, keys, width), (*batch, keys, values)
    return [_randn(*shape, seed=seed + i, dtype=dtype) for i, shape in enumerate(shapes)]


def _options(kind, batch=(2,), length=4, keys=5):
    """Every option at least once; some rows see nothing."""
    masks = _bernoulli(*batch, length, keys, seed=5)
    masks[..., min(1, length) :, :][..., :1, :] = False
    bias = _randn(length, keys, seed=6)
    return {
        "plain": {},
        "causal": {"causal": True},
        "mask": {"mask": masks},
        "mask of keys": {"mask": _bernoulli(1, keys, seed=3)},
        "bias": {"bias": bias},
        "bias with -inf": {"bias": bias.masked_fill(~masks, -torch.inf)},
        "key_mask": {"key_mask": _bernoulli(*batch[:1], keys, seed=7)},
        "no key": {"key_mask": torch.zeros(keys, dtype=torch.bool), "causal": True},
        "all": {"mask": masks, "bias": bias, "causal": True, "key_mask": _bernoulli(keys, seed=8), "scale": 0.3},
    }[kind]


KINDS = ["plain", "causal", "mask", "mask of keys", "bias", "bias with -inf", "key_mask", "no key", "all"]


def _gradients(function, inputs, upstream):
    leaves = [x.clone().requires_grad_() for x in inputs]
    return torch.autograd.grad(function(*leaves), leaves, upstream)


@pytest.mark.parametrize("fused", [None, False])
@pytest.mark.parametrize("kind", KINDS)
def test_is_the_reference_with_its_gradients(kind, fused):
    inputs, options = _inputs(2, values=2), _options(kind)
    want, upstream = _reference(*inputs, **options), _randn(2, 4, 2, seed=9)
    torch.testing.assert_close(attention(*inputs, fused=fused, **options), want, rtol=1e-12, atol=1e-12)
    found = _gradients(lambda *x: attention(*x, fused=fused, **options), inputs, upstream)
    for one, other in zip(found, _gradients(lambda *x: _reference(*x, **options), inputs, upstream), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-11, atol=1e-12)


@given(
    batch=st.lists(st.integers(1, 3), max_size=4),
    lengths=st.tuples(st.integers(0, 5), st.integers(0, 5)),
    widths=st.tuples(st.integers(1, 4), st.integers(1, 4)),
    kind=st.sampled_from(KINDS),
)
@settings(deadline=None, max_examples=60)
def test_every_shape(batch, lengths, widths, kind):
    inputs = _inputs(*batch, length=lengths[0], keys=lengths[1], width=widths[0], values=widths[1])
    options = _options(kind, tuple(batch), *lengths)
    want = _reference(*inputs, **options)
    upstream = _randn(*want.shape, seed=9)
    torch.testing.assert_close(attention(*inputs, **options), want)
    found = _gradients(lambda *x: attention(*x, **options), inputs, upstream)
    for one, other in zip(found, _gradients(lambda *x: _reference(*x, **options), inputs, upstream), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", KINDS)
def test_first_and_second_derivatives(kind):
    inputs = [x.requires_grad_() for x in _inputs(2, length=3, keys=4, width=2, values=3)]
    options = _options(kind, length=3, keys=4)

    def run(*x):
        return attention(*x, **options)

    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


def test_a_bias_learns_by_the_definition():
    query, key, value = _inputs(2)
    mask = _options("mask")["mask"]
    bias = _randn(4, 5, seed=4).requires_grad_()
    assert "bias" in fused_obstacle(query, key, value, bias=bias)
    assert torch.autograd.gradgradcheck(lambda b: attention(query, key, value, bias=b, mask=mask), bias)
    bias = torch.where(mask[0], bias, -torch.inf).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(attention(query, key, value, bias=bias).square().sum(), bias)
    assert (gradient[~mask[0]] == 0).all()
    assert (gradient[mask[0]] != 0).any()


def test_one_tensor_three_times():
    x = _randn(1, 2, 4, 3).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: attention(x, x, x, causal=True), x)
    assert torch.autograd.gradgradcheck(lambda x: attention(x, x, x, causal=True), x)


def test_a_kept_graph_answers_twice_and_in_any_order():
    query, key, value = inputs = [x.requires_grad_() for x in _inputs(1, 2)]
    out, want = attention(*inputs), _reference(*inputs)
    for seed, create in [(1, False), (2, True), (3, False)]:
        upstream = _randn(1, 2, 4, 3, seed=seed)
        found = torch.autograd.grad(out, inputs, upstream, retain_graph=True, create_graph=create)
        for one, other in zip(found, torch.autograd.grad(want, inputs, upstream, retain_graph=True), strict=True):
            torch.testing.assert_close(one, other)
    (alone,) = torch.autograd.grad(attention(query.detach(), key, value.detach()).sum(), key)
    torch.testing.assert_close(alone, torch.autograd.grad(want.sum(), key)[0])


def test_the_default_path_runs_the_fused_kernel(monkeypatch):
    """Also for widths, ranks, gaps and masks that PyTorch would materialise the scores for."""
    monkeypatch.setattr(_attention, "_materialised", lambda *_: pytest.fail("took the definition"))
    cases = [
        (_inputs(2), {}),
        (_inputs(2, values=7), {"causal": True}),
        (_inputs(), {"mask": _bernoulli(4, 5)}),
        (_inputs(1, 2, 1, 2, values=2), {"key_mask": _bernoulli(1, 5)}),
        ([x.mT.contiguous().mT for x in _inputs(2)], {"bias": _randn(4, 5)}),
    ]
    for inputs, options in cases:
        leaves = [x.requires_grad_() for x in inputs]
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.FLASH_ATTENTION):
            out = attention(*leaves, fused=True, **options)
        assert all(gradient.isfinite().all() for gradient in torch.autograd.grad(out.sum(), leaves))
        torch.testing.assert_close(out, _reference(*leaves, **options))


def test_causal_is_aligned_to_the_end():
    query, key, value = _inputs(2, length=2, keys=6)
    whole = attention(torch.cat([_randn(2, 4, 3, seed=8), query], 1), key, value, causal=True)
    torch.testing.assert_close(attention(query, key, value, causal=True), whole[:, -2:])
    torch.testing.assert_close(attention(query[:, -1:], key, value, causal=True), whole[:, -1:])
    early = attention(key, query, query, causal=True)  # six queries, two keys: the first four see nothing
    assert (early[:, :4] == 0).all()
    torch.testing.assert_close(early[:, 4], query[:, 0])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("fused", [None, False])
def test_a_blind_query_gives_exactly_nothing(dtype, fused):
    leaves = [x.requires_grad_() for x in _inputs(2, 2, dtype=dtype)]
    mask = torch.ones(4, 5, dtype=torch.bool)
    mask[1] = False
    for options in ({"mask": mask}, {"bias": torch.zeros(4, 5, dtype=dtype).masked_fill(~mask, -torch.inf)}):
        out = attention(*leaves, fused=fused, **options)
        assert out.dtype == dtype
        assert (out[:, :, 1] == 0).all()
        query, key, value = torch.autograd.grad(out[:, :, 1].sum(), leaves)
        assert not any(gradient.any() for gradient in (query, key, value))
        everything = torch.autograd.grad(attention(*leaves, fused=fused, **options).sum(), leaves)
        assert (everything[0][:, :, 1] == 0).all()
        assert all(gradient.isfinite().all() for gradient in everything)


def test_no_keys_no_queries_no_batch():
    for batch, length, keys in [((2,), 3, 0), ((2,), 0, 4), ((0, 2), 3, 4), ((), 0, 0)]:
        leaves = [x.requires_grad_() for x in _inputs(*batch, length=length, keys=keys)]
        for options in ({}, {"causal": True}, {"bias": torch.zeros(length, keys, dtype=torch.float64)}):
            out = attention(*leaves, **options)
            assert out.shape == (*batch, length, 3)
            if not keys:
                assert (out == 0).all()
            assert not any(gradient.isnan().any() for gradient in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_no_worse_than_pytorch(dtype):
    inputs = _inputs(1, 2, length=200, keys=200, width=16, values=16, dtype=dtype)
    want = _reference(*inputs)
    theirs = torch.nn.functional.scaled_dot_product_attention(*inputs)
    upstream = _randn(*want.shape, seed=9, dtype=dtype)
    for fused in (None, False):
        found = attention(*inputs, fused=fused)
        assert found.dtype == dtype
        assert (found - want).norm() < 1.05 * (theirs - want).norm()
        ours = _gradients(lambda *x, fused=fused: attention(*x, fused=fused), inputs, upstream)
        torchs = _gradients(torch.nn.functional.scaled_dot_product_attention, inputs, upstream)
        exact = _gradients(_reference, [x.double() for x in inputs], upstream.double())
        for one, other, right in zip(ours, torchs, exact, strict=True):
            assert one.dtype == dtype
            assert (one - right).norm() < 1.05 * (other - right).norm()


def test_half_precision_scores_do_not_overflow():
    query, key, value = (x.half() for x in _inputs(1, 1, width=4))
    found = attention(query * 300, key * 300, value, scale=10.0)
    torch.testing.assert_close(
        found.double(), _reference(query * 300, key * 300, value, scale=10.0), rtol=1e-3, atol=1e-3
    )


def test_autocast_rounds_inputs_and_nothing_else():
    query, key, value = (x.float() for x in _inputs(1, 2, length=30, keys=30))
    with torch.autocast("cpu", torch.bfloat16):
        found = attention(query, key, value)
    assert torch.equal(found, attention(query.bfloat16(), key.bfloat16(), value.bfloat16()))


@pytest.mark.parametrize("kind", KINDS)
def test_function_transforms(kind):
    query, key, value = _inputs(3)
    options = _options(kind, (3,))
    tangent = _randn(3, 4, 3, seed=4)

    def of_query(q):
        return attention(q, key, value, **options)

    _, found = torch.func.jvp(of_query, (query,), (tangent,))
    _, want = torch.func.jvp(lambda q: _reference(q, key, value, **options), (query,), (tangent,))
    torch.testing.assert_close(found, want)
    options = _options(kind, ())
    mapped = torch.vmap(lambda q, k, v: attention(q, k, v, **options))(query, key, value)
    torch.testing.assert_close(mapped, _reference(query, key, value, **options))
    hessian = torch.func.hessian(lambda q: attention(q, key[0], value[0], **options).square().sum())(query[0])
    want = torch.func.hessian(lambda q: _reference(q, key[0], value[0], **options).square().sum())(query[0])
    torch.testing.assert_close(hessian, want)


def test_obstacles_are_named_and_refused():
    query, key, value = _inputs(2)
    assert fused_obstacle(query, key, value) is None
    bias = _randn(4, 5).requires_grad_()
    with pytest.raises(ValueError, match="`fused=True` cannot be: the kernel gives no gradient to a bias"):
        attention(query, key, value, bias=bias, fused=True)
    with torch.no_grad():
        assert fused_obstacle(query, key, value, bias=bias) is None
    with pytest.raises(ValueError, match="forward mode"):
        torch.vmap(lambda q: attention(q, key[0], value[0], fused=True))(query)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(query, query)
        assert "forward mode" in fused_obstacle(dual, key, value)
        assert fused_obstacle(query, key, value) is None


def test_what_does_not_fit_is_named():
    query, key, value = _inputs(2, 3)
    for bad, name in [
        ((query, key[..., :2], value, None), "`key`"),
        ((query, key[:1], value, None), "`key`"),
        ((query, key, value[..., :4, :], None), "`value`"),
        ((query[0, 0, 0], key, value, None), "`query`"),
        ((query.long(), key, value, None), "`query`"),
        ((query, key, value, torch.ones(5)), "`key_mask` must be boolean"),
        ((query, key, value, _bernoulli(2, 4)), r"S = 5, got \(2, 4\)"),
        ((query, key, value, _bernoulli(3, 5)), "`key_mask`"),
        ((query, key, value, _bernoulli(2, 3, 1, 5)), "`key_mask`"),
    ]:
        with pytest.raises(ValueError, match=name):
            require_shapes(*bad)
    with pytest.raises(ValueError, match=r"`mask` of shape \(2, 3\) does not broadcast"):
        attention(query, key, value, mask=_bernoulli(2, 3))
    with pytest.raises(ValueError, match=r"`bias` of shape \(7, 2, 3, 4, 5\) does not broadcast"):
        attention(query, key, value, bias=_randn(7, 2, 3, 4, 5))


def test_a_worked_example():
    """Scores log 1 and log 3: weights 1/4 and 3/4."""
    query, key, value = torch.tensor([[1.0]]), torch.tensor([[0.0], [math.log(3)]]), torch.tensor([[4.0], [8.0]])
    assert attention(query, key, value).item() == pytest.approx(7, rel=1e-6)
    assert attention(query, key, value, key_mask=torch.tensor([True, False])).item() == pytest.approx(4)
    assert attention(query, key, value, scale=0.0).item() == pytest.approx(6)


@pytest.mark.compile
@pytest.mark.parametrize("kind", ["plain", "causal", "bias with -inf", "key_mask"])
def test_compiles_in_one_graph(kind):
    torch._dynamo.reset()
    options = _options(kind)
    inputs = [x.float().requires_grad_() for x in _inputs(2)]
    options = {name: x.float() if name == "bias" else x for name, x in options.items()}
    out = torch.compile(lambda *x: attention(*x, **options), fullgraph=True, backend="aot_eager")(*inputs)
    want = attention(*inputs, **options)
    torch.testing.assert_close(out, want)
    for one, other in zip(torch.autograd.grad(out.sum(), inputs), torch.autograd.grad(want.sum(), inputs), strict=True):
        torch.testing.assert_close(one, other)


def test_a_backward_pass_frees_what_the_kernel_saved_and_a_kept_graph_makes_it_again():
    query = torch.randn(1, 2, 16, 8, requires_grad=True)
    out = attention(query, query, query, causal=True)
    node = out.grad_fn
    while not hasattr(node, "inner"):
        node = node.next_functions[0][0]
    assert node.inner is not None
    upstream = torch.randn_like(out)
    first = torch.autograd.grad(out, query, upstream, retain_graph=True)[0]
    assert node.inner is None
    assert torch.equal(torch.autograd.grad(out, query, upstream)[0], first)
