"""The logit gradient and its kept part, against a V x V projector written out in float64."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.diagnostics import LinearHead, chunks
from unembed.diagnostics._logit_gradient import LogitGradient, _reference, kept_dense, kept_energy, kept_null


def _randn(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def _gradient(head, hidden, targets):
    (chunk,) = chunks(head, hidden, torch.as_tensor(targets))
    return LogitGradient(chunk)


def _projector(weight, rank, *, centre):
    weight = weight.double()
    weight = weight - weight.mean(0) if centre else weight
    basis = torch.linalg.svd(weight, full_matrices=False).U[:, :rank]
    return basis @ basis.T


def _definition(head, hidden, targets):
    """`G = dL/dz` before a soft-cap, by autograd."""
    weight, bias = head.weight.double(), None if head.bias is None else head.bias.double()
    scores = head.scale * torch.nn.functional.linear(hidden.double(), weight, bias)
    scores.requires_grad_()
    capped = scores if head.softcap is None else head.softcap * torch.tanh(scores / head.softcap)
    torch.nn.functional.cross_entropy(capped, torch.as_tensor(targets), reduction="sum").backward()
    return scores.grad


@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(1, 5),
    v=st.integers(2, 14),
    d=st.integers(1, 6),
    rank=st.integers(1, 6),
    biased=st.booleans(),
    softcap=st.sampled_from([None, 1.0, 30.0]),
    scale=st.sampled_from([1.0, 0.25, 4.0]),
    offset=st.sampled_from([0.0, 2.0]),
    dtypes=st.sampled_from(
        [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float32, torch.float64)]
    ),
)
def test_gradient_and_both_kept_parts_are_the_definition(*, n, v, d, rank, biased, softcap, scale, offset, dtypes):
    weight = _randn(v, rank) @ _randn(rank, d, seed=1) + offset
    bias = _randn(v, seed=2).to(dtypes[0]) if biased else None
    # Rounding to the dtype fills up the rank by amounts below the tolerance, so the tolerance is made to match.
    head = LinearHead(weight.to(dtypes[0]), bias=bias, softcap=softcap, scale=scale, noise_eps=1e-6)
    hidden, targets = _randn(n, d, seed=3).to(dtypes[1]), torch.arange(n) % v
    exact = _definition(head, hidden, targets)
    gradient = _gradient(head, hidden, targets)
    loose = 1e-9 if dtypes == (torch.float64,) * 2 else 5e-5
    size = float(exact.norm(dim=1).max()) + 1e-6  # the definition cancels: it is good to 1e-16, whatever its size

    # autograd's 1 - tanh^2 is exact to 1e-16 only, ours to a relative 1e-16
    torch.testing.assert_close(gradient.dense().double(), exact, rtol=loose, atol=loose * size + 1e-15)
    torch.testing.assert_close(gradient.energy(), exact.square().sum(-1), rtol=loose, atol=loose * size**2)
    coordinates = gradient.coordinates()
    raw, centred = kept_energy(head, coordinates)
    kept = exact @ _projector(head.weight, head.svd.rank_raw, centre=False)
    torch.testing.assert_close(raw, kept.square().sum(-1), rtol=loose, atol=loose * size**2)
    torch.testing.assert_close(
        kept_dense(head, coordinates, centre=False).double(), kept, rtol=loose, atol=loose * size
    )
    kept = exact @ _projector(head.weight, head.svd.rank, centre=True)
    if softcap is None:
        torch.testing.assert_close(centred, kept.square().sum(-1), rtol=loose, atol=loose * size**2)
        torch.testing.assert_close(
            kept_dense(head, coordinates, centre=True).double(), kept, rtol=loose, atol=loose * size
        )
    else:
        assert centred is None


@pytest.mark.parametrize("centre", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_the_reference_beside_the_fast_form_is_the_definition(softcap, centre):
    head = LinearHead(_randn(9, 4) @ torch.diag(torch.tensor([1.0, 1, 1, 0]).double()), _randn(9, seed=1), softcap, 0.5)
    hidden, targets = _randn(3, 4, seed=2), torch.tensor([0, 4, 8])
    full, kept = _reference(head, hidden, targets, centre=centre)
    exact = _definition(head, hidden, targets)
    torch.testing.assert_close(full, exact, rtol=1e-10, atol=1e-14)
    torch.testing.assert_close(kept, exact @ _projector(head.weight, 3, centre=centre), rtol=1e-10, atol=1e-14)


def test_a_nearly_certain_prediction_keeps_its_gradient():
    # 1 - p_y = 6e-9 and below: `p_y - 1` is 0 in float32, and then the kept energy is wrong by 100 %.
    for gap in (18.9, 25.0, 35.0):
        head = LinearHead(torch.tensor([[gap, 0.0], [0.0, 1.0], [-1.0, 0.5]]))
        hidden = torch.tensor([[1.0, 0.0]])
        exact = _definition(head, hidden, [0])
        weight = head.weight.double()
        scores = weight[:, 0]
        rest = torch.exp(scores[1:] - gap)
        exact = torch.cat([-rest.sum()[None], rest]) / (1 + rest.sum())  # autograd itself cancels at 35
        gradient = _gradient(head, hidden, [0])
        torch.testing.assert_close(gradient.dense()[0].double(), exact, rtol=1e-5, atol=0)
        torch.testing.assert_close(gradient.energy()[0], exact.square().sum(), rtol=1e-5, atol=0)
        raw, centred = kept_energy(head, gradient.coordinates())
        for kept, centre in ((raw, False), (centred, True)):
            expected = (exact @ _projector(weight, 2, centre=centre)).square().sum()
            torch.testing.assert_close(kept[0], expected, rtol=1e-5, atol=0)


@pytest.mark.parametrize("reach", [3.0, 9.0, 12.0, 20.0])
def test_a_saturated_soft_cap_still_passes_what_little_it_passes(reach):
    # From scores of 9 c on, `1 - tanh^2` is 0 in float32; cosh^-2 is 4 exp(-2 z / c).
    cap = 2.0
    head = LinearHead(torch.tensor([[1.0, 0.0], [0.9, 0.2], [-0.5, 1.0], [0.1, 0.1]]), softcap=cap)
    hidden = torch.tensor([[reach * cap, 0.0]])
    scores = (hidden.double() @ head.weight.double().T)[0]
    p = torch.softmax(cap * torch.tanh(scores / cap), -1)
    p[0] -= 1
    exact = p / torch.cosh(scores / cap) ** 2
    gradient = _gradient(head, hidden, [0])
    torch.testing.assert_close(gradient.dense()[0].double(), exact, rtol=1e-4, atol=1e-37)
    assert float(gradient.dense()[0, 0]) < 0
    raw, centred = kept_energy(head, gradient.coordinates())
    expected = (exact @ _projector(head.weight, 2, centre=False)).square().sum()
    torch.testing.assert_close(raw[0], expected, rtol=1e-4, atol=0)
    assert centred is None


def test_scores_far_beyond_the_cap_give_zeros_and_no_nan():
    head = LinearHead(torch.tensor([[1.0], [-1.0], [0.5]]), softcap=1.0)
    gradient = _gradient(head, torch.tensor([[1e4], [1e30], [0.0]]), [0, 1, 2])
    assert bool(torch.isfinite(gradient.dense()).all())
    assert gradient.energy()[:2].tolist() == [0.0, 0.0]
    assert float(gradient.energy()[2]) == pytest.approx(2 / 3, rel=1e-6)
    assert bool(torch.isfinite(gradient.coordinates()).all())


def test_an_error_on_the_target_alone_keeps_the_leverage_of_its_row():
    v, d, target = 50, 4, 7
    weight = _randn(v, d)
    # All the other probability is spread by a flat bias: G is -(1 - 1/v) at the target and 1/v elsewhere, so G is
    # along e_y once its mean is taken out.
    head = LinearHead(weight)
    gradient = _gradient(head, torch.zeros(1, d, dtype=torch.float64), [target])
    raw, centred = kept_energy(head, gradient.coordinates())
    leverage = _projector(weight, d, centre=True)[target, target]
    one_hot = torch.zeros(v, dtype=torch.float64)
    one_hot[target] = 1
    flat = one_hot - 1 / v
    assert float(gradient.energy()) == pytest.approx(float(flat.square().sum()), rel=1e-12)
    assert float(centred) == pytest.approx(float(leverage), rel=1e-10)
    expected = (flat @ _projector(weight, d, centre=False)).square().sum()
    assert float(raw) == pytest.approx(float(expected), rel=1e-10)


def test_masked_ids_take_no_part_in_the_gradient():
    weight, hidden = _randn(6, 3), _randn(2, 3, seed=1)
    bias = torch.zeros(6, dtype=torch.float64)
    bias[4] = -math.inf
    gradient = _gradient(LinearHead(weight, bias=bias), hidden, [0, 5])
    assert gradient.dense()[:, 4].tolist() == [0.0, 0.0]
    exact = _definition(LinearHead(weight, bias=bias), hidden, [0, 5])
    torch.testing.assert_close(gradient.dense(), exact)
    raw, _ = kept_energy(LinearHead(weight, bias=bias), gradient.coordinates())
    torch.testing.assert_close(raw, (exact @ _projector(weight, 3, centre=False)).square().sum(-1))


def test_the_centred_convention_does_not_see_a_constant_added_to_the_scores():  # TransformerLens#693
    weight, hidden, targets = _randn(40, 5), _randn(6, 5, seed=1), torch.arange(6)
    plain, shifted = LinearHead(weight), LinearHead(weight + 3 * _randn(5, seed=2))
    row_centred = LinearHead(weight - weight.mean(0))
    results = {}
    for name, head in {"plain": plain, "shifted": shifted, "row_centred": row_centred}.items():
        gradient = _gradient(head, hidden, targets)
        results[name] = (gradient.energy(), *kept_energy(head, gradient.coordinates()))
    for name in ("shifted", "row_centred"):
        torch.testing.assert_close(results[name][0], results["plain"][0], rtol=1e-9, atol=0)
        torch.testing.assert_close(results[name][2], results["plain"][2], rtol=1e-9, atol=0)
        assert float((results[name][1] / results["plain"][1] - 1).abs().max()) > 1e-3  # the raw one does


@pytest.mark.parametrize("centre", [False, True])
def test_a_random_subspace_keeps_the_null_with_the_spread_of_its_beta_law(centre):
    v, r, draws = 60, 6, 800
    generator = torch.Generator().manual_seed(0)
    bias = 2 * torch.randn(v, generator=generator, dtype=torch.float64)
    hidden = torch.zeros(1, r, dtype=torch.float64)  # the scores are the bias, so the gradient does not depend on W
    shares = []
    for _ in range(draws):
        head = LinearHead(torch.randn(v, r, generator=generator, dtype=torch.float64), bias=bias)
        gradient = _gradient(head, hidden, [3])
        raw, centred = kept_energy(head, gradient.coordinates())
        shares.append(float((centred if centre else raw) / gradient.energy()))
    shares = torch.tensor(shares, dtype=torch.float64)
    space = v - 1 if centre else v
    mean = r / space
    variance = 2 * r * (space - r) / (space**2 * (space + 2))  # Beta(r/2, (space - r)/2)
    assert kept_null(head, centre=centre) == pytest.approx(math.sqrt(mean), rel=1e-12)
    assert abs(float(shares.mean()) - mean) < 4 * math.sqrt(variance / draws)
    # Relative standard error of a variance, normal approximation with a margin for the skew.
    assert abs(float(shares.var()) / variance - 1) < 5 * math.sqrt(2 / draws)


def test_the_null_counts_the_numerical_rank():
    head = LinearHead(_randn(30, 2) @ _randn(2, 8, seed=1) + 1.0, noise_eps=1e-9)
    assert kept_null(head, centre=True) == pytest.approx(math.sqrt(2 / 29))
    assert kept_null(head, centre=False) == pytest.approx(math.sqrt(3 / 30))


def test_a_head_without_a_direction_has_null_zero():
    assert kept_null(LinearHead(torch.ones(4, 2)), centre=True) == 0
    assert kept_null(LinearHead(torch.ones(1, 2)), centre=True) == 0


@pytest.mark.parametrize("condition", [1.0, 1e4, 3e6])
@pytest.mark.parametrize("softcap", [None, 5.0])
def test_float32_agrees_with_float64_to_four_digits_at_a_real_size(condition, softcap):
    v, d, n = 20011, 64, 12
    left = _randn(v, d) * torch.logspace(0, -math.log10(condition), d, dtype=torch.float64)
    weight = (left @ torch.linalg.qr(_randn(d, d, seed=1)).Q + 0.3 * _randn(d, seed=2)).float()
    head = LinearHead(weight, softcap=softcap)
    hidden = (4 * _randn(n, d, seed=3)).float()
    targets = (hidden @ weight.T).topk(2, dim=-1).indices[:, 0]
    targets[::3] = torch.arange(len(targets[::3])) * 1001
    exact = _definition(head, hidden, targets)
    gradient = _gradient(head, hidden, targets)
    raw, centred = kept_energy(head, gradient.coordinates())
    torch.testing.assert_close(gradient.energy(), exact.square().sum(-1), rtol=1e-4, atol=0)
    wide = weight.double()
    full = torch.linalg.svd(wide, full_matrices=False).U
    torch.testing.assert_close(raw, (exact @ full).square().sum(-1), rtol=1e-4, atol=0)
    if softcap is None:
        full = torch.linalg.svd(wide - wide.mean(0), full_matrices=False).U
        torch.testing.assert_close(centred, (exact @ full).square().sum(-1), rtol=1e-4, atol=0)
