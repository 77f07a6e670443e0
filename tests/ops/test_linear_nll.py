"""The linear loss: definition, derivatives, half precision, edges, and the public failures of cases/losses.md."""

import itertools
import threading

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed import ops
from unembed.ops import _linear_work
from unembed.ops._linear_nll import _reference, linear_loss, linear_nll, linear_terms
from unembed.ops._linear_work import Work

F = torch.nn.functional


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """So that a chunk of a small test is more than one piece."""
    monkeypatch.setattr(_linear_work, "_CACHED", 16)


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _inputs(n, d, v, *, dtype=torch.float64, grad=True):
    tensors = [_randn(n, d, dtype=dtype), _randn(v, d, seed=1, dtype=dtype), _randn(v, seed=2, dtype=dtype)]
    targets = torch.arange(n) % v
    return [tensor.requires_grad_(grad) for tensor in tensors], targets


def _grads(loss, inputs):
    return torch.autograd.grad(loss, inputs)


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 9),
    d=st.integers(1, 5),
    v=st.integers(1, 17),
    chunk=st.integers(1, 12),
    biased=st.booleans(),
    softcap=st.sampled_from([None, 1.5]),
    scale=st.sampled_from([1.0, 0.3]),
)
def test_values_and_gradients_are_those_of_the_definition(*, n, d, v, chunk, biased, softcap, scale):
    (hidden, weight, bias), targets = _inputs(n, d, v)
    targets = torch.where(torch.arange(n) % 4 == 3, -100, targets)
    options = {"bias": bias if biased else None, "softcap": softcap, "scale": scale}
    upstream = _randn(n, seed=3)
    inputs = [hidden, weight, *([bias] if biased else [])]
    found = linear_nll(hidden, weight, targets, chunk=chunk, **options)
    expected = _reference(hidden, weight, targets, **options)
    assert torch.allclose(found, expected, rtol=1e-12, atol=1e-12)
    right = _grads((expected * upstream).sum(), inputs)
    pairs = zip(_grads((found * upstream).sum(), inputs), right, strict=True)
    assert all(torch.allclose(one, other, rtol=1e-10, atol=1e-12) for one, other in pairs)
    coefficients = torch.stack([upstream, *torch.zeros(3, n, dtype=torch.float64)], dim=1)
    loss = linear_loss(hidden, weight, targets, coefficients, chunk=chunk, **options)
    pairs = zip(_grads(loss, inputs), right, strict=True)
    assert torch.allclose(loss, (expected * upstream).sum(), rtol=1e-12, atol=1e-12)
    assert all(torch.allclose(one, other, rtol=1e-10, atol=1e-12) for one, other in pairs)


@pytest.mark.parametrize(
    ("softcap", "sigsoftmax", "biased", "spread"),
    itertools.product((None, 1.5), (False, True), (False, True), (False, True)),
)
def test_first_and_second_derivatives(softcap, sigsoftmax, biased, spread):
    (hidden, weight, bias), targets = _inputs(5, 3, 6)
    targets[2] = -100
    options = {"softcap": softcap, "scale": 0.7, "sigsoftmax": sigsoftmax, "chunk": 2}
    options["spread"] = torch.rand(6, dtype=torch.float64) if spread else None
    coefficients = torch.rand(5, 4, dtype=torch.float64) + 0.1
    inputs = (hidden, weight, bias) if biased else (hidden, weight)

    def terms(hidden, weight, bias=None):
        return linear_terms(hidden, weight, targets, bias=bias, **options)

    def loss(hidden, weight, bias=None):
        return linear_loss(hidden, weight, targets, coefficients, bias=bias, **options)

    for function in (terms, loss):
        assert torch.autograd.gradcheck(function, inputs, check_forward_ad=True, fast_mode=True)
        assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_the_loss_and_its_terms_are_one():
    (hidden, weight, bias), targets = _inputs(9, 4, 7)
    targets[1] = -100
    spread = torch.rand(7, dtype=torch.float64)
    coefficients = torch.rand(9, 4, dtype=torch.float64).requires_grad_()
    loss = linear_loss(hidden, weight, targets, coefficients, bias=bias, softcap=2.0, spread=spread, chunk=4)
    nll, lse, mean = linear_terms(hidden, weight, targets, bias=bias, softcap=2.0, spread=spread, chunk=5)
    whole = torch.stack([nll, lse, lse**2, mean], dim=1)
    assert torch.allclose(loss, (coefficients * whole).sum())
    inputs = (hidden, weight, bias, coefficients)
    for one, other in zip(_grads(loss, inputs), _grads((coefficients * whole).sum(), inputs), strict=True):
        assert torch.allclose(one, other)


def test_a_loss_made_without_gradients_in_mind_still_has_them():
    """Coefficients alone require a gradient, then a second order is asked for."""
    (hidden, weight, _), targets = _inputs(4, 3, 5, grad=False)
    coefficients = torch.rand(4, 4, dtype=torch.float64).requires_grad_()
    loss = linear_loss(hidden, weight, targets, coefficients)
    terms = linear_terms(hidden, weight, targets)
    assert torch.allclose(_grads(loss, coefficients)[0][:, 0], terms[0])
    weight.requires_grad_()
    loss = linear_loss(hidden, weight, targets, coefficients.detach())
    (first,) = torch.autograd.grad(loss, weight, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), weight)[0].abs().max() > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_errs_no_more_than_the_materialised_form(dtype):
    (hidden, weight, bias), targets = _inputs(256, 32, 101, dtype=dtype)
    upstream = torch.rand(256, generator=torch.Generator().manual_seed(5)) / 256
    wide = [tensor.detach().double().requires_grad_() for tensor in (hidden, weight, bias)]
    plain = [tensor.detach().clone().requires_grad_() for tensor in (hidden, weight, bias)]
    exact = _reference(wide[0], wide[1], targets, bias=wide[2])
    whole = F.cross_entropy(F.linear(plain[0], plain[1], plain[2]), targets, reduction="none")
    coefficients = torch.stack([upstream, *torch.zeros(3, 256)], dim=1)
    per_token = linear_nll(hidden, weight, targets, bias=bias, chunk=50)
    assert per_token.dtype == torch.float32
    assert (per_token - exact).norm() <= 1.05 * (whole - exact).norm()
    expected = _grads((exact * upstream).sum(), wide)
    theirs = _grads((whole * upstream).sum(), plain)
    for loss in (
        (per_token * upstream).sum(),
        linear_loss(hidden, weight, targets, coefficients, bias=bias, chunk=50),
    ):
        assert abs(float(loss.detach() - (exact * upstream).sum().detach())) < 2e-3
        for mine, their, right in zip(_grads(loss, (hidden, weight, bias)), theirs, expected, strict=True):
            assert mine.dtype == dtype
            assert (mine - right).norm() <= 1.1 * (their - right).norm()


def test_l1_a_huge_offset_changes_nothing():
    for scores, target, loss in (
        ([1e8, 1e8], 1, 0.693147),
        ([1e8] * 3, 0, 1.098612),
        ([2 + 1e6, -1 + 1e6], 0, 0.048587),
    ):
        weight, bias = torch.zeros(len(scores), 1), torch.tensor(scores)
        nll, lse = linear_terms(torch.zeros(1, 1), weight, torch.tensor([target]), bias=bias)
        assert nll.item() == pytest.approx(loss, abs=1e-6)
        assert lse.item() == pytest.approx(max(scores), rel=1e-6)


def test_l7_sums_are_wide_in_bfloat16():
    hidden, weight = torch.zeros(4096, 8, dtype=torch.bfloat16), torch.zeros(1000, 8, dtype=torch.bfloat16)
    coefficients = torch.zeros(4096, 4)
    coefficients[:, 0] = 1 / 4096
    loss = linear_loss(hidden, weight, torch.zeros(4096, dtype=torch.int64), coefficients, chunk=1000)
    assert loss.item() == pytest.approx(6.9078, abs=1e-4)


def test_l8_the_targets_gradient_is_never_one_minus_almost_one():
    weight = torch.tensor([[7.6], [0.0]], dtype=torch.bfloat16)
    hidden = torch.ones(1, 1, dtype=torch.bfloat16)
    bias = torch.zeros(2, requires_grad=True)
    linear_nll(hidden, weight, torch.tensor([0]), bias=bias).sum().backward()
    exact = torch.sigmoid(-weight[0, 0].double()).item()
    assert bias.grad.tolist() == pytest.approx([-exact, exact], rel=1e-3)
    deep = torch.tensor([40.0, 0.0], requires_grad=True)
    linear_nll(torch.zeros(1, 1), torch.zeros(2, 1), torch.tensor([0]), bias=deep).sum().backward()
    assert deep.grad.tolist() == pytest.approx([-4.248e-18, 4.248e-18], rel=1e-3)


def test_l10_l14_losses_are_never_negative():
    for dtype in (torch.bfloat16, torch.float32):
        (hidden, weight, bias), targets = _inputs(300, 16, 7, dtype=dtype)
        assert linear_nll(hidden, weight, targets, bias=bias * 10).min() >= 0


def test_l12_l13_softcap():
    capped = linear_terms(torch.tensor([[124.0]]), torch.ones(1, 1), torch.tensor([0]), softcap=30.0)[1]
    assert capped.item() == pytest.approx(29.9846, abs=1e-4)
    hidden, targets = torch.ones(2, 1), torch.tensor([5, 31])
    weight, padded = torch.full((320, 1), -100.0), torch.full((328, 1), -100.0)
    bias = torch.cat([torch.zeros(320), torch.full((8,), -torch.inf)])
    plain = linear_nll(hidden, weight, targets, softcap=30.0)
    assert plain.tolist() == pytest.approx([torch.log(torch.tensor(320.0)).item()] * 2, rel=1e-6)
    for softcap in (None, 30.0):
        with_padding = linear_nll(hidden, padded, targets, bias=bias, softcap=softcap)
        assert torch.allclose(with_padding, linear_nll(hidden, weight, targets, softcap=softcap))


def test_classes_of_probability_zero_are_as_if_they_were_not_there():
    (hidden, weight, bias), targets = _inputs(6, 3, 5, grad=False)
    gone = torch.tensor([False, False, True, False, True, False, False])
    wide = torch.zeros(7, 3, dtype=torch.float64)
    wide[~gone], wide[gone] = weight, 100.0
    masked = torch.full((7,), -torch.inf, dtype=torch.float64)
    masked[~gone] = bias
    moved = (~gone).nonzero().squeeze(1)[targets]
    inputs = [tensor.requires_grad_() for tensor in (hidden, weight, bias, wide, masked)]
    one, other = linear_nll(hidden, weight, targets, bias=bias), linear_nll(hidden, wide, moved, bias=masked)
    assert torch.allclose(one, other)
    small, large = _grads(one.sum(), inputs[:3]), _grads(other.sum(), [inputs[0], *inputs[3:]])
    assert torch.allclose(small[0], large[0])
    assert torch.allclose(small[1], large[1][~gone])
    assert torch.equal(large[1][gone], torch.zeros(2, 3, dtype=torch.float64))
    assert torch.equal(large[2][gone], torch.zeros(2, dtype=torch.float64))


def test_l3_a_row_without_classes_has_an_infinite_loss_and_no_gradient():
    bias = torch.full((3,), -torch.inf, requires_grad=True)
    hidden = torch.ones(2, 2, requires_grad=True)
    weight = torch.ones(3, 2, requires_grad=True)
    nll, lse = linear_terms(hidden, weight, torch.tensor([0, -100]), bias=bias)
    assert nll.tolist() == [torch.inf, 0]
    assert lse.tolist() == [-torch.inf] * 2
    for gradient in _grads(nll.sum(), (hidden, weight, bias)):
        assert torch.equal(gradient, torch.zeros_like(gradient))


def test_a_target_of_probability_zero_is_infinite_and_the_others_exact():
    bias = torch.tensor([0.0, -torch.inf, 0.0], requires_grad=True)
    nll = linear_nll(torch.zeros(2, 1), torch.zeros(3, 1), torch.tensor([1, 2]), bias=bias)
    assert nll.tolist() == pytest.approx([torch.inf, 0.693147], rel=1e-6)


def test_l4_logsumexp_of_nothing_has_no_gradient():
    scores = torch.tensor([[-torch.inf, -torch.inf], [1.0, -torch.inf]], requires_grad=True)
    found = ops.logsumexp(scores, 1)
    assert found.tolist() == [-torch.inf, 1]
    (gradient,) = torch.autograd.grad(found.sum(), scores)
    assert gradient.tolist() == [[0, 0], [1, 0]]


def test_l11_l15_l16_terms_of_vocabulary_shards_make_the_whole():
    """`lse` and the target's score of each shard give loss, smoothing and gradients of all classes."""
    (hidden, weight, _), targets = _inputs(6, 3, 8)
    spread = torch.full((4,), 1 / 8, dtype=torch.float64)
    total, own, mean = [], torch.zeros(6, dtype=torch.float64), torch.zeros(6, dtype=torch.float64)
    for shard in range(2):
        inside = targets // 4 == shard
        local = torch.where(inside, targets % 4, -100)
        rows = weight[4 * shard : 4 * shard + 4]
        nll, lse, part = linear_terms(hidden, rows, local, spread=spread, chunk=4)
        own = own + torch.where(inside, lse - nll, 0.0)
        mean = mean + part
        total.append(lse)
    lse = ops.logsumexp(torch.stack(total), 0)
    loss = (0.9 * (lse - own) + 0.1 * (lse - mean)).mean()
    expected = F.cross_entropy(hidden @ weight.T, targets, label_smoothing=0.1)
    assert torch.allclose(loss, expected)
    pairs = zip(_grads(loss, (hidden, weight)), _grads(expected, (hidden, weight)), strict=True)
    assert all(torch.allclose(one, other) for one, other in pairs)


def test_l31_ignore_index_and_targets_out_of_range():
    hidden, weight = torch.zeros(3, 2), torch.zeros(3, 2)
    nll = linear_nll(hidden, weight, torch.tensor([0, 255, 2]), ignore_index=255)
    assert nll.tolist() == pytest.approx([1.098612, 0, 1.098612], rel=1e-6)
    with pytest.raises(ValueError, match=r"`targets` must be -100 or lie in \[0, 3\), got -4"):
        linear_nll(hidden, weight, torch.tensor([0, -4, 2]))
    with pytest.raises(ValueError, match=r"got 3"):
        linear_nll(hidden, weight, torch.tensor([0, 3, 2]))


def test_bad_options_are_named():
    hidden, weight, targets = torch.zeros(3, 2), torch.zeros(3, 2), torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match="`chunk` must be at least 1"):
        linear_nll(hidden, weight, targets, chunk=0)
    with pytest.raises(ValueError, match="`softcap` must be positive"):
        linear_nll(hidden, weight, targets, softcap=-1.0)


def test_strided_input_any_batch_shape_and_untouched_inputs():
    (hidden, weight, bias), targets = _inputs(12, 4, 6, grad=False)
    expected = linear_nll(hidden, weight, targets, bias=bias)
    views = (hidden.T.contiguous().T, weight.repeat_interleave(2, 0)[::2], targets.repeat(2, 1).T[:, 0])
    before = [tensor.clone() for tensor in (hidden, weight, targets, bias)]
    assert torch.allclose(linear_nll(*views, bias=bias.repeat(2, 1).T[:, 0]), expected)
    shaped = linear_nll(hidden.reshape(3, 2, 2, 4), weight, targets.reshape(3, 2, 2), bias=bias)
    assert torch.allclose(shaped, expected.reshape(3, 2, 2))
    assert linear_nll(hidden[0], weight, targets[0], bias=bias).shape == ()
    assert all(map(torch.equal, before, (hidden, weight, targets, bias)))


def test_a_kept_graph_gives_its_gradients_again_whatever_was_done_to_the_first():
    (hidden, weight, bias), targets = _inputs(7, 3, 5)
    coefficients = torch.rand(7, 4, dtype=torch.float64)
    inputs = (hidden, weight, bias)
    loss = linear_loss(hidden, weight, targets, coefficients, bias=bias, chunk=3)
    right = _grads(linear_loss(hidden, weight, targets, coefficients, bias=bias), inputs)
    first = torch.autograd.grad(loss, inputs, torch.tensor(2.0).double(), retain_graph=True)
    for one, other in zip(first, right, strict=True):
        assert torch.allclose(one, 2 * other)
        one.zero_()
    second = torch.autograd.grad(loss, inputs, retain_graph=True)
    third = torch.autograd.grad(loss, inputs, create_graph=True)
    assert all(torch.allclose(one, other) for one, other in zip(third, right, strict=True))
    loss.backward(retain_graph=True)
    loss.backward()
    for one, tensor, other in zip(second, inputs, right, strict=True):
        assert torch.allclose(one, other)
        assert torch.allclose(tensor.grad, 2 * other)


def test_a_batch_of_gradients_and_fake_tensors():
    (hidden, weight, _), targets = _inputs(4, 3, 5)
    coefficients = torch.rand(4, 4, dtype=torch.float64)
    batch = torch.tensor([1.0, 2.0, -3.0], dtype=torch.float64)
    for loss in (
        linear_loss(hidden, weight, targets, coefficients),
        (linear_nll(hidden, weight, targets) * coefficients[:, 0]).sum(),
    ):
        (one,) = torch.autograd.grad(loss, weight, retain_graph=True)
        (many,) = torch.autograd.grad(loss, weight, batch, is_grads_batched=True)
        assert torch.allclose(many, batch[:, None, None] * one)
    expected = linear_nll(hidden, weight, targets)
    with torch._subclasses.fake_tensor.FakeTensorMode(allow_non_fake_inputs=True):
        linear_terms(torch.empty(4, 3, dtype=torch.float64), torch.empty(5, 3, dtype=torch.float64), targets)
    assert torch.equal(linear_nll(hidden, weight, targets), expected)


def test_gradients_only_for_what_requires_them(monkeypatch):
    wanted = []
    original = _linear_work.Sums.__init__

    def spy(self, work, hidden, asked):
        wanted.append(asked)
        original(self, work, hidden, asked)

    monkeypatch.setattr(_linear_work.Sums, "__init__", spy)
    (hidden, weight, bias), targets = _inputs(4, 3, 5)
    linear_nll(hidden, weight.detach(), targets, bias=bias.detach()).sum().backward()
    linear_nll(hidden.detach(), weight, targets).sum().backward()
    assert [tuple(map(bool, asked)) for asked in wanted] == [(True, False, False), (False, True, False)]


def test_autocast_makes_products_low_and_losses_wide():
    (hidden, weight, _), targets = _inputs(8, 16, 11, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        nll = linear_nll(hidden, weight, targets)
    low = linear_nll(hidden.bfloat16(), weight.bfloat16(), targets)
    assert nll.dtype == torch.float32
    assert torch.equal(nll, low)
    gradient = _grads(nll.sum(), weight)[0]
    assert gradient.dtype == torch.float32


def test_small_upstream_gradients_survive_float16():
    (hidden, weight, _), targets = _inputs(64, 16, 97, dtype=torch.float16)
    nll = linear_nll(hidden, weight, targets)
    scaled = _grads(nll.sum() * 1e-4, (hidden, weight))
    exact = _grads(linear_nll(hidden.double(), weight.double(), targets).sum() * 1e-4, (hidden, weight))
    for one, other in zip(scaled, exact, strict=True):
        assert (one.double() - other.double()).norm() < 0.02 * other.double().norm()


def test_torch_func_reaches_the_fast_forms():
    (hidden, weight, _), targets = _inputs(6, 3, 5, grad=False)

    def mean(hidden, weight):
        return linear_nll(hidden, weight, targets, chunk=4).mean()

    one = torch.func.grad(mean, (0, 1))(hidden, weight)
    other = torch.func.grad(lambda h, w: F.cross_entropy(h @ w.T, targets), (0, 1))(hidden, weight)
    assert all(torch.allclose(a, b) for a, b in zip(one, other, strict=True))
    many = torch.func.vmap(torch.func.grad(mean, 1), (0, None))(torch.stack([hidden, -hidden]), weight)
    assert torch.allclose(many[1], torch.func.grad(mean, 1)(-hidden, weight))
    with pytest.raises((ValueError, RuntimeError)):
        torch.func.vmap(lambda t: linear_nll(hidden, weight, t))(torch.full((2, 6), 9))


@pytest.mark.compile
def test_compiles_whole_with_the_same_values_and_gradients():
    (hidden, weight, bias), targets = _inputs(20, 4, 9)
    coefficients = torch.rand(20, 4, dtype=torch.float64)

    def both(hidden, weight, bias):
        terms = linear_terms(hidden, weight, targets, bias=bias, softcap=2.0, chunk=8)
        return sum(term.sum() for term in terms) + linear_loss(
            hidden, weight, targets, coefficients, bias=bias, chunk=8
        )

    compiled = torch.compile(both, fullgraph=True)
    inputs = (hidden, weight, bias)
    assert torch.allclose(compiled(*inputs), both(*inputs))
    for one, other in zip(_grads(compiled(*inputs), inputs), _grads(both(*inputs), inputs), strict=True):
        assert torch.allclose(one, other)


@pytest.mark.compile
def test_a_target_out_of_range_is_an_assertion_under_compile():
    compiled = torch.compile(lambda t: linear_nll(torch.zeros(3, 2), torch.zeros(3, 2), t), fullgraph=True)
    assert compiled(torch.tensor([0, 1, -100])).tolist() == pytest.approx([1.098612, 1.098612, 0], rel=1e-6)
    with pytest.raises(RuntimeError, match="a target is no class"):
        compiled(torch.tensor([0, 7, 1]))


def test_chunks_follow_from_the_vocabulary():
    assert ops.chunk_rows(32768, torch.device("cpu")) * 32768 <= 22 << 20
    assert ops.chunk_rows(262144, torch.device("cpu")) >= 16
    assert ops.chunk_rows(10, torch.device("cpu"), 7) == 7


def test_a_huge_offset_leaves_the_gradient_of_each_token_alone():
    """A log-sum-exp of 1e8 in float32 is off by several nats; the gradient must not be made from it."""
    v = 1000
    weight, bias = torch.zeros(v, 2, requires_grad=True), torch.full((v,), 1e8, requires_grad=True)
    nll = ops.linear_nll(torch.ones(3, 2), weight, torch.tensor([0, 1, 2]), bias=bias)
    nll.sum().backward()
    expected = torch.full((v,), 3 / v)
    expected[:3] -= 1
    torch.testing.assert_close(bias.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_are_the_same_bits_whether_the_last_chunk_is_still_there_or_not(dtype, monkeypatch):
    hidden, weight, targets = _randn(11, 4).to(dtype), _randn(7, 4, seed=1).to(dtype), torch.arange(11) % 7
    upstream = torch.rand(11)
    filled, fill = [], Work.fill
    monkeypatch.setattr(Work, "fill", lambda work, part: filled.append(len(part)) or fill(work, part))

    def gradients(between):
        leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
        nll = ops.linear_nll(*leaves, targets, chunk=4)
        between(leaves)
        filled.clear()
        found = torch.autograd.grad(nll, leaves, upstream.to(nll.dtype), retain_graph=True)
        again = torch.autograd.grad(nll, leaves, upstream.to(nll.dtype))
        assert all(map(torch.equal, found, again))
        return found, list(filled)

    found, used = gradients(lambda leaves: None)
    assert used == [4, 4, 3, 4, 4]  # at first the chunk of 3 was there, at the second time it was not
    other, made = gradients(lambda leaves: ops.linear_nll(leaves[0] + 1, leaves[1], targets, chunk=4))
    assert made == [3, 4, 4, 3, 4, 4]
    assert all(map(torch.equal, found, other))


def _gradients_of(hidden, weight, targets, between, *, chunk=4):
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    nll = linear_nll(*leaves, targets, chunk=chunk)
    between()
    return torch.autograd.grad(nll.sum(), leaves)


def _interrupted(hidden, weight, targets, monkeypatch):
    """A pass that ends half way, its memory still in the hands of a generator."""
    work = Work(_linear_work.LinearOptions(), hidden, weight, None, 4)
    chunks = work.chunks(len(hidden))
    next(chunks)
    work.fill(hidden[:4] + 7)
    return chunks


@pytest.mark.parametrize("use", ["loss", "statistics", "interrupted", "thread", "nothing"])
def test_whatever_uses_the_memory_in_between_gradients_are_right(use, monkeypatch):
    hidden, weight, targets = _randn(11, 4), _randn(7, 4, seed=1), torch.arange(11) % 7
    left = []

    def between():
        if use == "loss":
            ops.linear_loss(hidden + 1, weight, targets, torch.ones(11, 4).double(), chunk=4)
        elif use == "statistics":
            ops.token_statistics(hidden + 1, weight, targets, reference_hidden=hidden, chunk=4)
        elif use == "interrupted":
            left.append(_interrupted(hidden, weight, targets, monkeypatch))

    if use == "thread":  # forward in another thread than backward
        leaves, made = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()], []
        thread = threading.Thread(target=lambda: made.append(linear_nll(*leaves, targets, chunk=4)))
        thread.start()
        thread.join()
        linear_nll(hidden + 1, weight, targets, chunk=4)
        found = torch.autograd.grad(made[0].sum(), leaves)
    else:
        found = _gradients_of(hidden, weight, targets, between)
    wide = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    right = torch.autograd.grad(F.cross_entropy(wide[0] @ wide[1].T, targets, reduction="sum"), wide)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


def test_memory_that_comes_back_while_the_backward_pass_begins_is_not_taken_for_its_own(monkeypatch):
    """An interrupted pass is finalised by the garbage collector whenever it likes, here at the worst moment."""
    hidden, weight, targets = _randn(11, 4), _randn(7, 4, seed=1), torch.arange(11) % 7
    left, new = [], _linear_work.Sums.__init__
    monkeypatch.setattr(_linear_work.Sums, "__init__", lambda sums, *given: (left.clear(), new(sums, *given))[1])
    found = _gradients_of(
        hidden, weight, targets, lambda: left.append(_interrupted(hidden, weight, targets, monkeypatch))
    )
    wide = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    right = torch.autograd.grad(F.cross_entropy(wide[0] @ wide[1].T, targets, reduction="sum"), wide)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


def test_a_hook_that_rounds_saved_tensors_does_not_lead_to_foreign_scores():
    hidden, weight, targets = _randn(11, 4), _randn(7, 4, seed=1), torch.arange(11) % 7
    leaves = [hidden.clone().requires_grad_(), weight.clone().requires_grad_()]
    lossy = torch.autograd.graph.saved_tensors_hooks(
        lambda saved: (saved.dtype, saved if saved.is_floating_point() else saved.bfloat16()),
        lambda packed: packed[1].to(packed[0]),
    )
    with lossy:
        nll = linear_nll(*leaves, targets, chunk=4)
    linear_nll(hidden + 1, weight, targets, chunk=4)
    found = torch.autograd.grad(nll.sum(), leaves)
    right = torch.autograd.grad(F.cross_entropy(leaves[0] @ leaves[1].T, targets, reduction="sum"), leaves)
    for one, other in zip(found, right, strict=True):
        torch.testing.assert_close(one, other)


def test_examples_under_vmap_do_not_take_each_others_scores():
    hidden, weight, targets = _randn(5, 3, 4), _randn(7, 4, seed=1), torch.arange(15).view(5, 3) % 7

    def loss(h, y):
        return ops.linear_nll(h, weight, y).sum()

    mapped = torch.func.vmap(torch.func.grad(loss))(hidden, targets)
    for place in range(5):
        one = hidden[place].clone().requires_grad_()
        (right,) = torch.autograd.grad(F.cross_entropy(one @ weight.T, targets[place], reduction="sum"), one)
        torch.testing.assert_close(mapped[place], right)
