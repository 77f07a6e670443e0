from __future__ import annotations

import contextlib
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from unembed import heads, losses, ops
from unembed.heads import Linear, MultiTokenPrediction
from unembed.heads._multi_token import _reference

EXAMPLES = (0, 1, 2)
MODES = ("parallel", "sequential")


def made(example: int, d: int = 4, v: int = 7, dtype: torch.dtype = torch.float64) -> MultiTokenPrediction:
    torch.manual_seed(example)
    return MultiTokenPrediction.examples(d, v)[example].to(dtype)


def batch(head: MultiTokenPrediction, b: int, t: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = 2 * torch.randn(b, t, head.in_features, generator=generator, dtype=torch.float64)
    return hidden.requires_grad_(), torch.randint(0, head.out_features, (b, t, head.n), generator=generator)


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
    sizes=st.tuples(st.sampled_from([1, 2, 3, 4, 6]), st.integers(1, 11)),
    n=st.integers(1, 4),
    mode=st.sampled_from(MODES),
    heads_of_two=st.booleans(),
    options=st.fixed_dictionaries({"width": st.one_of(st.none(), st.integers(1, 5)), "bias": st.booleans()}),
    tied=st.booleans(),
    chunk=st.one_of(st.none(), st.integers(1, 8)),
)
def test_nll_and_gradients_are_the_definition_for_every_shape(
    *, shape, sizes, n, mode, heads_of_two, options, tied, chunk
):
    torch.manual_seed(n)
    attention = sizes[0] // 2 if heads_of_two and sizes[0] % 2 == 0 else None
    head = MultiTokenPrediction(
        *sizes, n=n, mode=mode, attention_heads=attention, tied=tied, **options, dtype=torch.float64
    )
    hidden, targets = batch(head, *shape)
    targets[torch.rand(targets.shape) < 0.3] = -100
    upstream = torch.randn(targets.shape, dtype=torch.float64)
    inputs = (hidden, *head.parameters())
    got, want = head.nll(hidden, targets, chunk=chunk), _reference(head, hidden, targets)
    torch.testing.assert_close(got, want)
    gradients = [torch.autograd.grad(one, inputs, upstream, materialize_grads=True) for one in (got, want)]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_joint_loss_divides_each_offset_by_its_own_targets(example):
    head = made(example)
    hidden, targets = batch(head, 2, 5)
    targets[:, -2:, 0] = -100
    targets[0, :, 1] = -100
    each = _reference(head, hidden, targets)
    counts = [7 - 1 if offset == 0 else (5 if offset == 1 else 10) for offset in range(head.n)]
    want = sum(head.offset_weights[i] * each[..., i].sum() / counts[i] for i in range(head.n))
    got = head.joint_loss(hidden, targets, chunk=3)
    torch.testing.assert_close(got, want)
    inputs = (hidden, *head.parameters())
    gradients = [torch.autograd.grad(one, inputs, materialize_grads=True) for one in (got, want)]
    torch.testing.assert_close(*gradients, atol=1e-10, rtol=1e-9)


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_offset_without_targets_adds_nothing(example):
    head = made(example)
    hidden, targets = batch(head, 2, 3)
    head.offset_weights = [1.0] * head.n
    targets[..., 1:] = -100
    want = nn.functional.cross_entropy(head(hidden).flatten(0, 1), targets[..., 0].flatten())
    torch.testing.assert_close(head.joint_loss(hidden, targets), want)
    targets.fill_(-100)
    assert head.joint_loss(hidden, targets, when_empty="nan").isnan()
    with pytest.raises(ValueError, match="when_empty"):
        head.joint_loss(hidden, targets, when_empty="x")


class _Nll(nn.Module):
    def __init__(self, head):
        super().__init__()
        self.head = head

    def forward(self, hidden, targets):
        return self.head.nll(hidden, targets, chunk=1)


@pytest.mark.parametrize("example", EXAMPLES)
def test_first_and_second_derivatives(example):
    torch.manual_seed(0)
    mode = MODES[example > 0]
    head = MultiTokenPrediction(2, 3, n=2, mode=mode, width=1, tied=example < 2, bias=example == 0, dtype=torch.float64)
    hidden, targets = batch(head, 1, 2)
    names = [f"head.{name}" for name, _ in head.named_parameters()]

    def nll(hidden, *parameters):
        own = dict(zip(names, parameters, strict=True))
        math_kernel = sdpa_kernel(SDPBackend.MATH) if mode == "sequential" else contextlib.nullcontext()
        with math_kernel:
            return torch.func.functional_call(_Nll(head), own, (hidden, targets))

    inputs = (hidden, *(parameter.detach().clone().requires_grad_() for parameter in head.parameters()))
    assert torch.autograd.gradcheck(nll, inputs)
    assert torch.autograd.gradgradcheck(nll, inputs)


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("place", [0, 2, 4])
def test_a_later_position_changes_no_earlier_one(example, place):
    head = made(example)
    hidden, targets = batch(head, 2, 5)
    before = head.nll(hidden, targets)
    changed = hidden.detach().clone()
    changed[:, place] += 1.0
    after = head.nll(changed, targets)
    assert torch.equal(before[:, :place], after[:, :place])
    moved = (before != after).all(0)
    assert moved[place].all()
    if head.mode == "parallel":  # its trunks read one position
        assert torch.equal(before[:, place + 1 :], after[:, place + 1 :])
    elif place < 4:
        assert moved[place + 1 :, 1:].any()


def test_a_sequential_module_reads_the_token_before_its_own_target_and_none_after():
    head = made(2)  # three offsets
    tokens = torch.randint(0, 7, (1, 9))
    hidden, _ = batch(head, 1, 9)
    before = torch.stack(list(head.states(hidden, head.targets_of(tokens))), dim=-2)  # [1, T, n, D]
    changed = tokens.clone()
    changed[0, 5] = (changed[0, 5] + 1) % 7
    after = torch.stack(list(head.states(hidden, head.targets_of(changed))), dim=-2)
    same = (before == after).all(-1)[0]
    # Offset k at t reads tokens up to t + k, so token 5 shows from t = 5 - k on, but for the next token it never does.
    assert same[:, 0].all()
    for offset in (1, 2):
        assert same[: 5 - offset, offset].all()
        assert not same[5 - offset, offset]


def test_known_tokens_that_are_no_targets_are_read_from_inputs():
    head = made(1)
    hidden, tokens = batch(head, 1, 4)
    targets = tokens.clone()
    targets[:, :2] = -100
    whole, hidden_prompt = head.nll(hidden, tokens), head.nll(hidden, targets, inputs=tokens)
    assert torch.equal(hidden_prompt[:, 2:], whole[:, 2:])
    assert not hidden_prompt[:, :2].any()
    assert not torch.equal(head.nll(hidden, targets)[:, 2:, 1], whole[:, 2:, 1])  # a zero embedding instead


def test_targets_of_tokens_by_hand():
    head = MultiTokenPrediction(4, 50, n=3)
    none = -100
    tokens = torch.tensor([10, 11, 12, 13])
    want = torch.tensor([[11, 12, 13], [12, 13, none], [13, none, none], [none, none, none]])
    assert torch.equal(head.targets_of(tokens), want)
    documents = torch.tensor([0, 0, 1, 1])
    want = torch.tensor([[11, none, none], [none, none, none], [13, none, none], [none, none, none]])
    assert torch.equal(head.targets_of(tokens, document_ids=documents), want)
    back = head.targets_of(tokens[None], document_ids=torch.tensor([[0, 1, 0, 0]]), ignore_index=-1)
    want = torch.tensor([[[-1, -1, -1], [-1, -1, -1], [13, -1, -1], [-1, -1, -1]]])
    assert torch.equal(back, want)  # the document 0 that comes back is another one
    assert head.targets_of(torch.zeros(2, 0, dtype=torch.int64)).shape == (2, 0, 3)
    assert head.targets_of(torch.tensor([5])).tolist() == [[none] * 3]
    with pytest.raises(ValueError, match="document_ids"):
        head.targets_of(tokens, document_ids=documents[:2])


@pytest.mark.parametrize("example", EXAMPLES)
@pytest.mark.parametrize("shape", [(0, 3), (2, 0), (2, 3)])
def test_batches_without_a_target_give_zero_and_no_gradient(example, shape):
    head = made(example)
    hidden, targets = batch(head, *shape)
    targets.fill_(-100)
    for loss in (
        head.nll(hidden, targets).sum(),
        head.joint_loss(hidden, targets),
        losses.cross_entropy(head, hidden, targets[..., 0]),
    ):
        assert loss.item() == 0
        for gradient in torch.autograd.grad(loss, (hidden, *head.parameters()), materialize_grads=True):
            assert not gradient.any()
    assert head.topk(hidden, 2)[1].shape == (*shape, 2)
    assert head.sample(hidden).shape == shape


@pytest.mark.parametrize("example", EXAMPLES)
def test_strided_hidden_states_give_the_same(example):
    head = made(example)
    hidden = torch.randn(4, 5, 2, dtype=torch.float64).permute(2, 1, 0)
    targets = torch.randint(0, 7, (head.n, 5, 2)).permute(2, 1, 0)
    torch.testing.assert_close(head.nll(hidden, targets), head.nll(hidden.contiguous(), targets.contiguous()))
    whole, plain = head.joint_loss(hidden, targets), head.joint_loss(hidden.contiguous(), targets.contiguous())
    torch.testing.assert_close(whole, plain)


@pytest.mark.parametrize("example", EXAMPLES)
def test_bfloat16_is_no_worse_than_plain_operations(example):
    head = made(example, 16, 300, torch.bfloat16)
    hidden, targets = batch(head, 4, 16)
    low = hidden.detach().bfloat16()
    want = _reference(head, low, targets)
    with torch.no_grad():
        states = torch.stack(list(head.states(low, targets)), dim=-2)
        plain = -nn.functional.linear(states, head.weight, head.bias).float().log_softmax(-1)
    plain = plain.gather(-1, targets[..., None]).squeeze(-1)
    got = head.nll(low, targets)
    assert got.dtype == torch.float32
    assert (got - want).abs().max() <= 1.1 * (plain - want).abs().max() + 1e-3


@pytest.mark.parametrize("example", EXAMPLES)
def test_for_the_losses_it_is_the_linear_head_of_the_next_token(example):
    head = made(example)
    hidden, targets = batch(head, 2, 5)
    nll = head.nll(hidden, targets)
    torch.testing.assert_close(head.nll(hidden, targets[..., 0]), nll[..., 0])
    own = targets[..., 0].clone()
    own[0, 1] = -100
    options = {"label_smoothing": 0.2, "class_weight": torch.rand(7, dtype=torch.float64)}
    got = losses.cross_entropy(head, hidden, own, **options)
    want = nn.functional.cross_entropy(
        head(hidden).flatten(0, 1), own.flatten(), weight=options["class_weight"], label_smoothing=0.2
    )
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(head.log_prob(hidden).exp().sum(-1), torch.ones(2, 5, dtype=torch.float64))
    shifted = losses.cross_entropy(head, hidden, own, shift=1, reduction="sum")
    first = head.targets_of(own)[..., 0]
    torch.testing.assert_close(shifted, head.nll(hidden, first).sum())


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("mode", MODES)
def test_starts_as_the_linear_head(mode, bias):
    linear = Linear(4, 7, bias=bias, dtype=torch.float64)
    head = MultiTokenPrediction.from_linear(linear, n=3, mode=mode)
    hidden, targets = batch(head, 2, 6)
    exact = 3 if mode == "parallel" else 1
    for offset in range(exact):
        want = linear.nll(hidden, targets[..., offset])
        torch.testing.assert_close(head.nll(hidden, targets)[..., offset], want)
    with pytest.raises(ValueError, match="soft-cap"):
        MultiTokenPrediction.from_linear(Linear(4, 7, softcap=2.0))


def test_trunks_that_add_nothing_yet_do_learn():
    head = MultiTokenPrediction.from_linear(Linear(4, 7), n=2)
    hidden, targets = batch(head, 2, 6)
    assert head.down is not None
    (gradient,) = torch.autograd.grad(head.joint_loss(hidden.float(), targets), head.down)
    assert gradient.flatten(1).norm(dim=1).min() > 1e-3


@pytest.mark.parametrize("example", EXAMPLES)
def test_draws_follow_the_probabilities_of_the_next_token(example):
    from scipy.stats import chisquare

    head = made(example)
    hidden, _ = batch(head, 1, 1)
    drawn = head.sample(hidden.expand(20_000, -1, -1), generator=torch.Generator().manual_seed(1))
    expected = 20_000 * head.log_prob(hidden)[0, 0].exp().detach()
    assert chisquare(drawn.flatten().bincount(minlength=7).numpy(), expected.numpy()).pvalue > 1e-4
    torch.testing.assert_close(head.topk(hidden, 3), head.log_prob(hidden).topk(3))


@pytest.mark.parametrize("example", EXAMPLES)
def test_saved_and_built(example, tmp_path):
    head = made(example, dtype=torch.float32)
    again = heads.load(heads.save(head, tmp_path / "head"))
    assert isinstance(again, MultiTokenPrediction)
    hidden, targets = batch(head, 2, 4)
    torch.testing.assert_close(again.nll(hidden.float(), targets), head.nll(hidden.float(), targets), rtol=0, atol=0)
    assert again.options() == head.options()


def test_built_by_name_and_without_memory():
    head = heads.build("mtp:n=2,mode=sequential,attention_heads=2,offset_weights=[1,0.3]", 4, 7)
    assert isinstance(head, MultiTokenPrediction)
    assert head.offset_weights == [1.0, 0.3]
    assert head.rank_bound == 5
    assert not any("embedding" in name for name in head.state_dict())  # tied
    for mode in MODES:
        empty = heads.build(f"mtp:mode={mode}", 4096, 100_000, device="meta")
        assert all(parameter.is_meta for parameter in empty.parameters())
        assert empty.options()["attention_heads"] == 64


def test_another_embedding_can_be_given():
    head = MultiTokenPrediction(4, 7, n=2, mode="sequential", tied=False, dtype=torch.float64)
    hidden, targets = batch(head, 1, 3)
    with torch.no_grad():
        model = nn.Parameter(torch.randn(7, 4, dtype=torch.float64))
    head.embedding = model
    (gradient,) = torch.autograd.grad(head.nll(hidden, targets)[..., 1].sum(), model)
    assert gradient.any()
    torch.testing.assert_close(head.nll(hidden, targets), _reference(head, hidden, targets))


@pytest.mark.parametrize("mode", MODES)
def test_no_tensor_holds_tokens_times_vocabulary(mode):
    head = MultiTokenPrediction(4, 500, n=3, mode=mode, dtype=torch.float64)
    hidden, targets = batch(head, 10, 20)
    with Largest() as largest:
        head.nll(hidden, targets, chunk=2).sum().backward()
        head.joint_loss(hidden, targets, chunk=2).backward()
    assert largest.numbers <= 10 * 20 * 3 * 8  # activations of a block; all scores of an offset are 100,000


@pytest.mark.parametrize("mode", MODES)
def test_one_offset_is_scored_after_the_other(monkeypatch, mode):
    seen = []

    def spied(plain):
        def spy(hidden, weight, targets, *rest, **options):
            seen.append((hidden.numel(), len(weight), targets.tolist()))
            return plain(hidden, weight, targets, *rest, **options)

        return spy

    monkeypatch.setattr(ops, "linear_terms", spied(ops.linear_terms))
    monkeypatch.setattr(ops, "linear_loss", spied(ops.linear_loss))
    head = MultiTokenPrediction(4, 7, n=3, mode=mode, dtype=torch.float64)
    hidden, targets = batch(head, 2, 5)
    head.nll(hidden, targets)
    assert seen == [(40, 7, targets[..., offset].tolist()) for offset in range(3)]
    seen.clear()
    head.joint_loss(hidden, targets)
    assert seen == [(40, 7, targets[..., offset].flatten().tolist()) for offset in range(3)]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"n": 0}, "n"),
        ({"mode": "x"}, "mode"),
        ({"width": 0}, "width"),
        ({"attention_heads": 3}, "attention_heads"),
        ({"offset_weights": [1.0]}, "offset_weights"),
        ({"n": 1, "offset_weights": [math.nan]}, "offset_weights"),
    ],
)
def test_bad_options_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        MultiTokenPrediction(4, 7, **options)


def test_bad_shapes_and_targets_are_refused():
    head = made(1)
    hidden, targets = batch(head, 2, 3)
    with pytest.raises(ValueError, match="Expected `hidden`"):
        head.nll(hidden, targets[..., :1])
    with pytest.raises(ValueError, match=r"\[\*, T, D\]"):
        head.nll(hidden[0, 0], targets[0, 0])
    with pytest.raises(ValueError, match="lie in"):
        head.nll(hidden, targets + 7)
    with pytest.raises(ValueError, match="lie in"):
        head.joint_loss(hidden, targets, inputs=targets + 7)


@pytest.mark.parametrize("example", EXAMPLES)
def test_functional_transforms_agree(example):
    head = made(example)
    hidden, targets = batch(head, 2, 3)
    hidden = hidden.detach()

    def total(hidden):
        with sdpa_kernel(SDPBackend.MATH):  # the fused kernel has no forward mode
            return head.nll(hidden, targets).sum()

    tangent = torch.randn_like(hidden)
    gradient = torch.func.grad(total)(hidden)
    _, moved = torch.func.jvp(total, (hidden,), (tangent,))
    torch.testing.assert_close(moved, (gradient * tangent).sum())
    both = torch.stack([hidden, hidden / 2])
    each = torch.func.vmap(torch.func.grad(total))(both)
    torch.testing.assert_close(each[0], gradient)
    torch.testing.assert_close(each[1], torch.func.grad(total)(hidden / 2))


@pytest.mark.parametrize("example", EXAMPLES)
def test_autocast_keeps_losses_wide_and_warns_of_nothing(example):
    head = made(example, dtype=torch.float32)
    hidden, targets = batch(head, 2, 3)
    low = hidden.detach().float().requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        nll = head.nll(low, targets)
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll, head.nll(low, targets), atol=0.05, rtol=0.05)
    for gradient in torch.autograd.grad(nll.sum(), (low, *head.parameters()), materialize_grads=True):
        assert gradient.dtype == torch.float32
        assert gradient.isfinite().all()


@pytest.mark.compile  # traced whole, but not lowered to C++: that takes a minute each and is the concern of ops
@pytest.mark.parametrize("example", EXAMPLES)
def test_compiled_is_eager(example):
    head = made(example, dtype=torch.float32)
    hidden, targets = batch(head, 2, 3)
    low, inputs = hidden.detach().float().requires_grad_(), tuple(head.parameters())
    for function in (head.nll, head.joint_loss):
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        got, want = compiled(low, targets, chunk=2), function(low, targets, chunk=2)
        torch.testing.assert_close(got, want)
        gradients = [torch.autograd.grad(one.sum(), (low, *inputs), materialize_grads=True) for one in (got, want)]
        torch.testing.assert_close(*gradients)
