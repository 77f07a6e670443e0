"""Linear attention against its weights written out: three forms, padding, shifts, half precision, derivatives."""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.ops._feature_maps import Favor, Polynomial
from unembed.ops._linear_attention import LinearState, _reference, linear_attention

MAPS = ["elu", "relu", "exp", "polynomial", "taylor", Polynomial(4, 0.5), Favor(3, 7, seed=1)]
CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _inputs(*batch, length=6, keys=None, width=3, values=2, dtype=torch.float64):
    keys = length if keys is None else keys
    shapes = (*batch, length, width), (*batch, keys, width), (*batch, keys, values)
    return [_randn(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def _mask(*shape, seed=3):
    return torch.rand(*shape, generator=torch.Generator().manual_seed(seed)) < 0.7


def _recurrent(query, key, value, cuts, **options):
    """The same sequence in parts, the state carried."""
    mask, state, found = options.pop("key_mask", None), None, []
    edges = [0, *cuts, query.shape[-2]]
    for start, stop in itertools.pairwise(edges):
        out, state = linear_attention(
            *(x[..., start:stop, :] for x in (query, key, value)),
            causal=True,
            key_mask=None if mask is None else mask[..., start:stop],
            state=state,
            return_state=True,
            **options,
        )
        found.append(out)
    return torch.cat(found, -2), state


@pytest.mark.parametrize("kind", MAPS, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_all_forms_are_the_reference(kind, masked):
    inputs = _inputs(2, 2, length=11)
    options = {"feature_map": kind, "key_mask": _mask(2, 11) if masked else None}
    torch.testing.assert_close(linear_attention(*inputs, **options), _reference(*inputs, **options), **CLOSE)
    want, states = _reference(*inputs, causal=True, **options), []
    for chunk in (1, 3, 4, 11, 128):
        found, state = linear_attention(*inputs, causal=True, chunk=chunk, return_state=True, **options)
        torch.testing.assert_close(found, want, **CLOSE)
        states.append(state)
    for cuts in (range(1, 11), [4], [1, 9], [5, 5]):
        found, state = _recurrent(*inputs, cuts, chunk=3, **options)
        torch.testing.assert_close(found, want, **CLOSE)
        states.append(state)
    states.append(linear_attention(*inputs, return_state=True, **options)[1])
    for state in states[1:]:  # also the one without order: the keys are the same
        for one, other in zip(state, states[0], strict=True):
            assert (one is None) == (other is None)
            if one is not None:
                torch.testing.assert_close(one, other, **CLOSE)


@given(
    batch=st.lists(st.integers(1, 3), max_size=3),
    lengths=st.tuples(st.integers(0, 9), st.integers(0, 9)),
    values=st.integers(1, 4),
    kind=st.sampled_from(MAPS),
    options=st.tuples(st.booleans(), st.booleans(), st.integers(1, 10)),
)
@settings(deadline=None, max_examples=60)
def test_every_shape(batch, lengths, values, kind, options):
    causal, masked, chunk = options
    inputs = _inputs(*batch, length=lengths[0], keys=lengths[0] if causal else lengths[1], values=values)
    mask = _mask(*batch, inputs[1].shape[-2]) if masked else None
    given = {"feature_map": kind, "causal": causal, "key_mask": mask}
    leaves, others = ([x.clone().requires_grad_() for x in inputs] for _ in range(2))
    found, want = linear_attention(*leaves, chunk=chunk, **given), _reference(*others, **given)
    # Weights of a power come near 0 by cancellation, and a row with only such weights magnifies the rounding.
    near = 1e-5 if isinstance(kind, Polynomial) or kind == "polynomial" else 1e-8
    torch.testing.assert_close(found, want, rtol=near, atol=near)
    upstream = _randn(*want.shape, seed=9)
    gradients = torch.autograd.grad(found, leaves, upstream), torch.autograd.grad(want, others, upstream)
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=near, atol=near)


@pytest.mark.parametrize("kind", MAPS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_first_and_second_derivatives(kind, causal):
    inputs = [x.requires_grad_() for x in _inputs(1, length=4)]
    mask = torch.tensor([[False, True, True, True]])

    def run(*x):
        return linear_attention(*x, feature_map=kind, causal=causal, key_mask=mask, chunk=2)

    assert torch.autograd.gradcheck(run, inputs, check_forward_ad=True)
    assert torch.autograd.gradgradcheck(run, inputs, fast_mode=True)


@pytest.mark.parametrize("kind", ["elu", "exp", Favor(3, 7, seed=1)], ids=str)
def test_gradients_pass_through_a_carried_state(kind):
    inputs = [x.requires_grad_() for x in _inputs(2, length=7)]
    upstream = _randn(2, 7, 2, seed=9)
    whole = torch.autograd.grad(_reference(*inputs, feature_map=kind, causal=True), inputs, upstream)
    parts = torch.autograd.grad(_recurrent(*inputs, [2, 3, 6], feature_map=kind)[0], inputs, upstream)
    for one, other in zip(parts, whole, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("kind", ["elu", "exp", "taylor", Favor(3, 7, seed=1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("junk", [0.0, 1e4, torch.nan, torch.inf])
def test_padding_counts_nowhere_whatever_it_holds(kind, causal, junk):
    """L29: padding on the left leaves valid outputs as they are, and its gradients are exactly 0."""
    query, key, value = _inputs(2, length=5)
    want = linear_attention(query, key, value, feature_map=kind, causal=causal)
    leaves = [torch.cat([torch.full_like(x[:, :3], junk), x], 1) for x in (query, key, value)]
    leaves[0][:, :3] = 1.0
    for leaf in leaves:
        leaf.requires_grad_()
    mask = torch.arange(8) >= 3
    out = linear_attention(*leaves, feature_map=kind, causal=causal, key_mask=mask, chunk=2)
    torch.testing.assert_close(out[:, 3:], want, **CLOSE)
    query_, key_, value_ = torch.autograd.grad(out.square().sum(), leaves)
    assert (key_[:, :3] == 0).all()
    assert (value_[:, :3] == 0).all()
    assert all(gradient.isfinite().all() for gradient in (query_, key_, value_))
    if causal:
        assert (out[:, :3] == 0).all()
        assert (query_[:, :3] == 0).all()


@pytest.mark.parametrize("kind", MAPS, ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_no_real_key_gives_zeros_and_zero_gradients(kind, causal):
    leaves = [x.requires_grad_() for x in _inputs(2)]
    out, state = linear_attention(
        *leaves, feature_map=kind, causal=causal, key_mask=torch.zeros(6, dtype=torch.bool), return_state=True
    )
    assert (out == 0).all()
    assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), leaves))
    assert not state.sums.any()
    # It is a state like any other.
    again = linear_attention(*leaves, feature_map=kind, causal=causal, state=state)
    torch.testing.assert_close(again, linear_attention(*leaves, feature_map=kind, causal=causal))


def test_a_denominator_of_zero_gives_zero():
    query = torch.tensor([[-1.0, -2.0], [1.0, -1.0], [-1.0, 1.0]], requires_grad=True)
    key = torch.tensor([[-1.0, 1.0], [-1.0, 2.0], [-3.0, 3.0]], requires_grad=True)
    value = torch.randn(3, 2, requires_grad=True)
    out = linear_attention(query, key, value, feature_map="relu")
    assert (out[:2] == 0).all()
    torch.testing.assert_close(out[2], (value * torch.tensor([1.0, 2.0, 3.0])[:, None]).sum(0) / 6)
    gradient = torch.autograd.grad(out.sum(), (query, key, value))
    assert all(part.isfinite().all() for part in gradient)
    assert not gradient[0][:2].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("chunk", [128, 7])
def test_keys_that_grow_within_a_chunk(dtype, chunk):
    """One shift for a chunk would leave its first queries 0 / 0."""
    query, key, value = (x.to(dtype) for x in _inputs(2, length=60))
    for growth in (200, -200, 2000):
        keys = key + torch.linspace(0, growth, 60, dtype=dtype)[:, None]
        leaves = [x.clone().requires_grad_() for x in (query, keys, value)]
        out = linear_attention(*leaves, feature_map="exp", causal=True, chunk=chunk)
        others = [x.detach().double().requires_grad_() for x in leaves]
        want = _reference(*others, feature_map="exp", causal=True)
        near = {"rtol": 1e-3, "atol": 1e-4} if dtype == torch.float32 else CLOSE
        torch.testing.assert_close(out.double(), want, **near)
        found = torch.autograd.grad(out.square().sum(), leaves)
        for one, other in zip(found, torch.autograd.grad(want.square().sum(), others), strict=True):
            torch.testing.assert_close(one.double(), other, **near)
        single, _ = _recurrent(query, keys, value, range(1, 60), feature_map="exp")
        torch.testing.assert_close(single.double(), want, **near)


def test_a_shift_of_keys_or_queries_changes_nothing():
    query, key, value = _inputs(2, length=9, dtype=torch.float32)
    for causal in (False, True):
        want = linear_attention(query, key, value, feature_map="exp", causal=causal)
        for move in (-500.0, 500.0):
            for moved in ((query + move, key), (query, key + move)):
                found = linear_attention(*moved, value, feature_map="exp", causal=causal)
                torch.testing.assert_close(found, want, rtol=1e-3, atol=1e-4)  # 500 costs 4 digits of the inputs


def test_one_shift_for_all_keys_and_features():
    """A maximum for each key, or each feature, would give other weights than these, worked by hand."""
    query = torch.tensor([[0.0, math.log(2)]])
    key = torch.tensor([[0.0, math.log(3)], [math.log(5), 0.0]])
    value = torch.tensor([[1.0], [0.0]])
    found = linear_attention(query, key, value, feature_map="exp")  # weights 1 + 2 * 3 = 7 and 5 + 2 = 7
    assert found.item() == pytest.approx(0.5)
    _, state = linear_attention(query, key, value, feature_map="exp", return_state=True)
    assert state.shift.item() == pytest.approx(math.log(5))
    assert (state.normaliser * state.shift.exp()).tolist() == pytest.approx([6, 4])


@pytest.mark.parametrize("kind", ["elu", "exp", "taylor"])
@pytest.mark.parametrize("causal", [False, True])
def test_half_precision_with_large_keys_and_many_of_them(kind, causal):
    """L30: keys of 20, length 4096, float16: the sums must not be held in it."""
    query, key, value = _inputs(1, length=4096, width=4, dtype=torch.float16)
    key = key.sign() * 20
    found, state = linear_attention(query, key, value, feature_map=kind, causal=causal, return_state=True)
    assert found.dtype == torch.float16
    assert state.sums.dtype == state.normaliser.dtype == torch.float32
    want = _reference(query, key, value, feature_map=kind, causal=causal)
    rounding = (want.half() - want).norm()
    assert (found - want).norm() < 1.05 * rounding + 1e-4 * want.norm()


def test_autocast_keeps_the_sums_wide():
    inputs = _inputs(2, length=40, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        found, state = linear_attention(*inputs, causal=True, chunk=8, return_state=True)
    assert state.sums.dtype == torch.float32
    want = _reference(*(x.bfloat16() for x in inputs), causal=True)
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)


def test_layout_and_empty_inputs():
    query, key, value = _inputs(2, 3, length=7)
    strided = [x.transpose(1, 2).contiguous().transpose(1, 2).mT.contiguous().mT for x in (query, key, value)]
    for causal in (False, True):
        want = linear_attention(query, key, value, causal=causal)
        torch.testing.assert_close(linear_attention(*strided, causal=causal), want)
    for kind in ("elu", "exp"):
        for length, keys, causal in [(0, 4, False), (3, 0, False), (0, 0, False), (0, 0, True)]:
            leaves = [x.requires_grad_() for x in _inputs(2, length=length, keys=keys)]
            out, state = linear_attention(*leaves, feature_map=kind, causal=causal, return_state=True)
            assert out.shape == (2, length, 2)
            assert (out == 0).all()
            assert state.sums.shape == (2, 3, 2)
            assert not any(gradient.any() for gradient in torch.autograd.grad(out.sum(), leaves))


@pytest.mark.parametrize("kind", ["elu", "exp"])
def test_a_state_serves_queries_without_keys(kind):
    query, key, value = _inputs(2, length=4, keys=9)
    _, state = linear_attention(query, key[:, :5], value[:, :5], feature_map=kind, return_state=True)
    found = linear_attention(query, key[:, 5:], value[:, 5:], feature_map=kind, state=state)
    torch.testing.assert_close(found, _reference(query, key, value, feature_map=kind), **CLOSE)
    _, state = linear_attention(query, key, value, feature_map=kind, return_state=True)
    found = linear_attention(query, key[:, :0], value[:, :0], feature_map=kind, state=state)
    torch.testing.assert_close(found, _reference(query, key, value, feature_map=kind), **CLOSE)


@pytest.mark.parametrize("kind", ["elu", "exp", Favor(3, 7, seed=1)], ids=str)
def test_function_transforms(kind):
    query, key, value = _inputs(3, length=5)

    def run(q, k, v):
        return linear_attention(q, k, v, feature_map=kind, causal=True, chunk=2)

    torch.testing.assert_close(torch.vmap(run)(query, key, value), run(query, key, value))
    _, found = torch.func.jvp(run, (query, key, value), (value[..., :1] + query, query, value))
    _, want = torch.func.jvp(
        lambda *x: _reference(*x, feature_map=kind, causal=True),
        (query, key, value),
        (value[..., :1] + query, query, value),
    )
    torch.testing.assert_close(found, want)


def test_what_does_not_fit_is_named():
    query, key, value = _inputs(2)
    with pytest.raises(ValueError, match="`chunk` must be at least 1, got 0"):
        linear_attention(query, key, value, causal=True, chunk=0)
    with pytest.raises(ValueError, match="`causal` needs as many keys as queries, got 6 and 4"):
        linear_attention(query[:, :4], key, value, causal=True)
    with pytest.raises(ValueError, match="`scale` must be None"):
        linear_attention(query, key, value, scale=1.0)
    with pytest.raises(ValueError, match="must be one of"):
        linear_attention(query, key, value, feature_map="softmax")
    with pytest.raises(ValueError, match="made for width 4"):
        linear_attention(query, key, value, feature_map=Favor(4, 8, seed=0))
    _, state = linear_attention(query, key, value, return_state=True)
    with pytest.raises(ValueError, match=r"sums of shape \(1, 3, 2\)"):
        linear_attention(query[:1], key[:1], value[:1], state=state)
    with pytest.raises(ValueError, match=r"`state.shift` must be a tensor of shape \(2,\)"):
        linear_attention(query, key, value, feature_map="exp", state=state)
    with pytest.raises(ValueError, match=r"`state.shift` must be None"):
        linear_attention(query, key, value, state=LinearState(state.sums, state.normaliser, torch.zeros(2)))


@pytest.mark.compile
@pytest.mark.parametrize("kind", ["elu", "exp", "polynomial", Favor(3, 7, seed=1)], ids=str)
@pytest.mark.parametrize("causal", [False, True])
def test_compiles_in_one_graph(kind, causal):
    torch._dynamo.reset()
    inputs = [x.requires_grad_() for x in _inputs(2, length=7, dtype=torch.float32)]
    options = {"feature_map": kind, "causal": causal, "key_mask": _mask(2, 7), "chunk": 3, "return_state": True}
    compiled = torch.compile(lambda *x: linear_attention(*x, **options), fullgraph=True, backend="aot_eager")
    (found, state), (want, other) = compiled(*inputs), linear_attention(*inputs, **options)
    torch.testing.assert_close(found, want)
    torch.testing.assert_close(state.sums, other.sums)
    gradients = (torch.autograd.grad(out.square().sum(), inputs) for out in (found, want))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
