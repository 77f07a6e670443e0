"""UNE103 of heads that need not be linear: the Jacobian at each token in the place of W."""

import math

import pytest
import torch

from unembed import heads
from unembed.diagnostics import Gradient, HeadGradient, LinearHead
from unembed.diagnostics._jacobian import WideHead, token_gradient_reference
from unembed.heads._base import HEADS
from unembed.results import InputError

V = 23
EXAMPLES = [
    head
    for kind in sorted(set(HEADS.values()), key=lambda kind: kind.__name__)
    for head in kind.examples(4, V)
    if not head.sparse
]


@pytest.fixture(autouse=True)
def _seeded():
    torch.manual_seed(0)


def _measured(head, hidden, targets, **options):
    gradient = HeadGradient(head)
    gradient.update(hidden, targets, **options)
    return gradient.result()


@pytest.mark.parametrize("head", EXAMPLES, ids=lambda head: f"{type(head).__name__}-{head.options()}"[:60])
def test_every_head_keeps_what_autograds_whole_jacobian_and_a_v_by_v_projector_keep(head):
    head = head.double()
    hidden, targets = head.example_hidden((2, 4)), torch.randint(0, V, (2, 4))
    flat, flat_targets, _ = head.flattened(hidden, targets)
    with torch.no_grad():
        pairs = [token_gradient_reference(head, h, int(y)) for h, y in zip(flat, flat_targets, strict=True)]
        full, kept = (torch.stack(parts) for parts in zip(*pairs, strict=True))
    numbers = _measured(head, hidden, targets).values["centred"]
    assert numbers["kept"] == pytest.approx(float(kept.norm() / full.norm()), rel=1e-9)
    assert numbers["destroyed"] == pytest.approx(float((full - kept).norm() / full.norm()), rel=1e-7)


def test_a_mixture_written_out_by_hand():
    """Log-probabilities, Jacobian by autograd, projector by SVD and null, with nothing of the package in them."""
    k, d, n = 3, 4, 9
    head = heads.MixtureOfSoftmaxes(d, V, k=k).double()
    hidden, targets = torch.randn(n, d, dtype=torch.float64), torch.arange(n) % V
    parameters = {name: parameter.detach() for name, parameter in head.named_parameters()}

    def log_p(h):
        prior = (parameters["prior"] @ h).softmax(0)
        facets = torch.tanh(torch.einsum("kde,e->kd", parameters["facets"].view(k, d, d), h) + parameters["facet_bias"])
        return (prior[:, None] * (facets @ parameters["weight"].T).softmax(1)).sum(0).log()

    energy = kept = expected = 0.0
    for h, y in zip(hidden, targets, strict=True):
        torch.testing.assert_close(log_p(h), head.log_prob(h[None])[0].detach())
        jacobian = torch.autograd.functional.jacobian(log_p, h)
        basis, values, _ = torch.linalg.svd(jacobian - jacobian.mean(0), full_matrices=False)
        basis = basis[:, values > 1e-9 * values[0]]
        gradient = log_p(h).exp() - torch.nn.functional.one_hot(y, V)
        energy += float(gradient.square().sum())
        kept += float((basis.T @ gradient).square().sum())
        expected += float(gradient.square().sum()) * basis.shape[1] / (V - 1)
    values = _measured(head, hidden, targets).values
    numbers = values["centred"]
    assert values["raw"] is None
    assert values["tokens"] == n
    assert numbers["rank"] == numbers["rank_least"] == d
    assert numbers["kept"] == pytest.approx(math.sqrt(kept / energy), rel=1e-10)
    assert numbers["kept_null"] == pytest.approx(math.sqrt(expected / energy), rel=1e-10)
    assert numbers["ratio"] == pytest.approx(math.sqrt(kept / expected), rel=1e-10)
    assert values["mean_squared_norm"] == pytest.approx(energy / n, rel=1e-10)


def test_of_a_linear_head_it_is_the_row_centred_convention():
    head = heads.Linear(5, V, bias=True, scale=0.7).double()
    hidden, targets = torch.randn(40, 5, dtype=torch.float64), torch.randint(0, V, (40,))
    documents = torch.arange(40) // 4
    linear = LinearHead.of(head)
    gradient = Gradient(linear)
    gradient.update(hidden, targets, documents=documents)
    right, mine = gradient.result(), _measured(head, hidden, targets, documents=documents)
    for name, value in right.values["centred"].items():
        assert mine.values["centred"][name] == pytest.approx(value, rel=1e-6), name
    assert mine.values["interval"] == right.values["interval"]
    for name, column in right.tables[0].columns.items():
        torch.testing.assert_close(torch.tensor(mine.tables[0].columns[name]), torch.tensor(column))


class _Lifted(heads.Linear):
    """Adds a function of the hidden state to all scores, which changes no probability."""

    def forward(self, hidden):
        return super().forward(hidden) + 1e3 * hidden.square().sum(-1, keepdim=True)


def test_what_is_added_to_all_scores_changes_nothing():
    plain, lifted = heads.Linear(4, V).double(), _Lifted(4, V).double()
    lifted.load_state_dict(plain.state_dict())
    hidden, targets = torch.randn(12, 4, dtype=torch.float64), torch.randint(0, V, (12,))
    expected, found = (_measured(head, hidden, targets).values["centred"] for head in (plain, lifted))
    assert found["rank"] == expected["rank"]
    assert found["kept"] == pytest.approx(expected["kept"], rel=1e-9)


def test_classes_that_the_bias_takes_out_are_not_there():
    head = heads.Sigsoftmax(4, V, bias=True).double()
    small = heads.Sigsoftmax(4, V - 3, bias=True).double()
    stay = torch.tensor([place not in (0, 7, V - 1) for place in range(V)])
    with torch.no_grad():
        head.bias[~stay] = -torch.inf
        small.weight.copy_(head.weight[stay])
        small.bias.copy_(head.bias[stay])
    hidden, places = torch.randn(9, 4, dtype=torch.float64), torch.randint(0, V - 3, (9,))
    found = _measured(head, hidden, stay.nonzero().flatten()[places]).values
    expected = _measured(small, hidden, places).values
    for name in ("rank", "kept", "kept_null", "ratio"):
        assert found["centred"][name] == pytest.approx(expected["centred"][name], rel=1e-9)
    with pytest.raises(InputError, match="class 7"):
        _measured(head, hidden[:1], torch.tensor([7]))


def test_a_factorised_head_has_the_rank_of_its_factors_also_as_stored_in_float32():
    head = heads.LowRank(16, 300, rank=3)
    numbers = _measured(head, torch.randn(5, 16), torch.arange(5)).values["centred"]
    assert numbers["rank"] == numbers["rank_least"] == 3
    assert numbers["kept_null"] == pytest.approx(math.sqrt(3 / 299))


def test_random_mixtures_keep_what_random_subspaces_keep():
    """The spread is that over heads: most lie within three of the standard deviations that are given."""
    ratios, spreads = [], []
    for seed in range(12):
        torch.manual_seed(seed)
        head = heads.MixtureOfSoftmaxes(8, 400, k=2)
        numbers = _measured(head, torch.randn(30, 8), torch.randint(0, 400, (30,))).values["centred"]
        ratios.append(numbers["ratio"])
        spreads.append(numbers["ratio_null_sd"])
    spread = sum(spreads) / len(spreads)
    assert abs(sum(ratios) / len(ratios) - 1) < 3 * spread / math.sqrt(len(ratios))
    assert sum(abs(ratio - 1) > 3 * spread for ratio in ratios) <= 1


def test_halves_merge_to_the_whole_and_a_state_goes_on():
    head = heads.Mixtape(4, V, gated=9)
    hidden, targets, documents = torch.randn(20, 4), torch.randint(0, V, (20,)), torch.arange(20) // 2
    index = torch.arange(20)
    whole = _measured(head, hidden, targets, documents=documents)
    first, second = HeadGradient(head), HeadGradient(head)
    first.update(hidden[:9], targets[:9], documents=documents[:9], index=index[:9])
    resumed = HeadGradient(head)
    resumed.load_state(first.state())
    second.update(hidden[9:], targets[9:], documents=documents[9:], index=index[9:])
    for merged in (first, resumed):
        merged.merge(second)
        assert merged.result().values["centred"]["rank"] == whole.values["centred"]["rank"]
        for name in ("kept", "kept_null", "ratio", "ratio_ci95", "ratio_null_sd"):
            assert merged.result().values["centred"][name] == pytest.approx(whole.values["centred"][name], rel=1e-9)
    with pytest.raises(ValueError, match="same head"):
        first.merge(HeadGradient(heads.Mixtape(4, V, gated=9)))
    plain, capped = heads.Linear(4, V), heads.Linear(4, V, softcap=2.0)
    capped.load_state_dict(plain.state_dict())
    with pytest.raises(ValueError, match="same head"):
        HeadGradient(plain).merge(HeadGradient(capped))
    with pytest.raises(ValueError, match="every"):
        first.merge(HeadGradient(head, every=2))


def test_every_takes_its_sample_by_running_number_and_ignored_targets_are_left_out():
    head = heads.Sigsoftmax(4, V)
    hidden, targets = torch.randn(2, 10, 4), torch.randint(0, V, (2, 10))
    targets[0, 3] = -100
    sampled = HeadGradient(head, every=3)
    sampled.update(hidden[:1], targets[:1])
    sampled.update(hidden[1:], targets[1:])  # the numbering goes on: 10 is not taken, 12 is
    assert sampled.result().values["tokens"] == 6  # 0, 6, 9, 12, 15, 18
    chosen = [0, 6, 9, 12, 15, 18]
    alone = _measured(head, hidden.reshape(-1, 4)[chosen], targets.reshape(-1)[chosen])
    assert sampled.result().values["centred"] == alone.values["centred"]


def test_the_head_is_left_as_it_was_and_half_precision_is_widened():
    head = heads.MixtureOfSoftmaxes(4, V, k=2).bfloat16()
    hidden, targets = torch.randn(3, 4).bfloat16(), torch.tensor([1, 2, 3])
    found = _measured(head, hidden, targets).values["centred"]
    assert all(p.dtype == torch.bfloat16 and p.grad is None for p in head.parameters())
    assert found["kept"] == pytest.approx(_measured(head.double(), hidden, targets).values["centred"]["kept"], rel=1e-9)


def test_a_confident_prediction_keeps_its_digits():
    """`p_y - 1` would have lost 4 of 16 digits here."""
    head = heads.Sigsoftmax(2, V).double()
    hidden = torch.randn(2, dtype=torch.float64)
    with torch.no_grad():
        head.weight.mul_(0.1)
        head.weight[5] = 24 * hidden / hidden.dot(hidden)
        scores = head(hidden[None])[0]
    others = torch.cat([scores[:5], scores[6:]])
    off = (others - scores.logsumexp(0)).exp()
    expected = float(off.square().sum() + off.sum().square())
    assert expected < 1e-18
    found = WideHead(head).gradient(hidden, 5, torch.zeros(V, 1, dtype=torch.float64))
    assert found.energy == pytest.approx(expected, rel=1e-12)


def test_nothing_seen_and_bad_input():
    head = heads.Sigsoftmax(4, V)
    assert HeadGradient(head).result().values is None
    with pytest.raises(ValueError, match="got Linear; wrap it"):
        HeadGradient(torch.nn.Linear(4, V))
    with pytest.raises(ValueError, match="every"):
        HeadGradient(head, every=0)
    with pytest.raises(ValueError, match=r"documents.*\(3,\)"):
        _measured(
            head, torch.randn(3, 4), torch.zeros(3, dtype=torch.int64), documents=torch.zeros(2, dtype=torch.int64)
        )
    with pytest.raises(ValueError, match="lie in"):
        _measured(head, torch.randn(1, 4), torch.tensor([V]))
    with pytest.raises(InputError, match="NaN"):
        _measured(head, torch.full((1, 4), torch.nan), torch.tensor([1]))


def test_a_head_with_exact_zeros_is_refused():
    with pytest.raises(ValueError, match="Entmax gives exact zeros"):
        HeadGradient(HEADS["entmax"](4, V))
