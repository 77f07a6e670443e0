"""`check_head` on a head that is right, and on heads that are each wrong in one way."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from unembed import heads, ops
from unembed.testing import CHECKS, HeadError, Outcome, check_head
from unembed.testing._checks_decode import SIGNIFICANCE, chi_square


def refuse(wrong: Tensor) -> None:
    try:
        some = bool(wrong.any())
    except RuntimeError:  # vmap: a value cannot be looked at
        return
    if some:
        raise ValueError("A target is no class.")


class Plain(nn.Module):
    """A third party's head: nothing of `unembed.heads`, every score in memory, and right."""

    def __init__(self, in_features: int = 8, out_features: int = 13) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.rank_bound = min(in_features + 2, out_features)
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.empty(out_features))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4)

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight, self.bias)

    def log_prob(self, hidden: Tensor) -> Tensor:
        scores = self(hidden)
        return torch.log_softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), -1)

    def nll(self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
        counts = targets != ignore_index
        refuse(counts & ((targets < 0) | (targets >= self.out_features)))
        return self.loss_of(hidden, torch.where(counts, targets, 0), counts)

    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        own = self.log_prob(hidden).gather(-1, targets[..., None]).squeeze(-1)
        return torch.where(counts, -own, 0.0)

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        if not 1 <= k <= self.out_features:
            raise ValueError(f"`k` must lie in [1, {self.out_features}], got {k}.")
        return tuple(self.log_prob(hidden).topk(k, -1))

    def sample(self, hidden: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return self.drawn(self.log_prob(hidden).exp(), generator)

    def drawn(self, probabilities: Tensor, generator: torch.Generator | None) -> Tensor:
        flat = probabilities.reshape(-1, self.out_features)
        if not len(flat):
            return torch.zeros(probabilities.shape[:-1], dtype=torch.int64)
        return torch.multinomial(flat, 1, generator=generator).reshape(probabilities.shape[:-1])

    def cost(self, tokens: int) -> Any:
        size = sum(parameter.numel() for parameter in self.parameters())
        work = 2 * tokens * size
        return SimpleNamespace(
            parameters=size, forward_flops=work, backward_flops=2 * work, bytes_moved=4 * size, peak_bytes=4 * work
        )

    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Plain:
        head = cls(linear.in_features, linear.out_features)
        with torch.no_grad():
            head.weight.copy_(linear.weight)
            head.bias.zero_() if linear.bias is None else head.bias.copy_(linear.bias)
        return head


OF_OUR_HEADS = {"cross_entropy", "smoothing_real", "empty_batch", "save_load", "meta_context"}
BROKEN: dict[type[nn.Module], tuple[set[str], str]] = {}


def fails(*names: str, says: str) -> Any:
    """Register a class that must fail these checks and no other, the first with a message that has `says` in it."""

    def register(kind: type[nn.Module]) -> type[nn.Module]:
        BROKEN[kind] = (set(names), says)
        return kind

    return register


@fails("law", says="sum of probabilities")
class Unnormalised(Plain):
    def log_prob(self, hidden: Tensor) -> Tensor:
        return self(hidden).to(torch.promote_types(hidden.dtype, torch.float32))


@fails("law", says="sum of probabilities in torch.float64")
class FloorInside(Plain):
    def forward(self, hidden: Tensor) -> Tensor:
        return torch.log(torch.softmax(super().forward(hidden), -1) + 1e-8)

    def log_prob(self, hidden: Tensor) -> Tensor:
        return self(hidden)


@fails("law", says="log_prob against log_softmax of scores")
class BiasTwice(Plain):
    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden) + self.bias

    def log_prob(self, hidden: Tensor) -> Tensor:
        return torch.log_softmax(super().forward(hidden), -1)


@fails("nll", says="nll in torch.float32")
class BiasTwiceInLoss(Plain):
    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        scores = self(hidden) + self.bias
        own = torch.log_softmax(scores, -1).gather(-1, targets[..., None]).squeeze(-1)
        return torch.where(counts, -own, 0.0)


@fails("nll", says="nll in torch.float64")
class FloorInLoss(Plain):
    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        own = torch.softmax(self(hidden), -1).gather(-1, targets[..., None]).squeeze(-1)
        return torch.where(counts, -torch.log(own + 1e-8), 0.0)


@fails("nll", says="expected shape (2, 3), got (6,)")
class FlatLoss(Plain):
    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        return super().loss_of(hidden, targets, counts).flatten()


@fails("tail", says="least likely token")
class Capped(Plain):
    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        return super().loss_of(hidden, targets, counts).clamp(max=18.4)


@fails("shapes", says="one sequence at a time")
class ReadsTheBatch(Plain):
    from_linear = None

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden - hidden.mean(0, keepdim=True) if hidden.ndim > 1 else hidden)


@fails("shapes", says="tokens (): raised IndexError")
class NeedsTwoDimensions(Plain):
    def forward(self, hidden: Tensor) -> Tensor:
        hidden.shape[-3 if hidden.ndim > 1 else -2]
        return super().forward(hidden)


@fails("strides", says="view size is not compatible")
class NeedsContiguous(Plain):
    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        flat = hidden.view(-1, self.in_features)
        return super().loss_of(flat, targets.reshape(-1), counts.reshape(-1)).reshape(targets.shape)


@fails("ignore_index", says="ignore_index=-100")
class CountsEverything(Plain):
    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        return super().loss_of(hidden, targets, torch.ones_like(counts))


@fails("ignore_index", says="ignore_index=255")
class KnowsOneIndex(Plain):
    def nll(self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
        return super().nll(hidden, targets)


@fails("ignored_nan", says="NaN of an ignored token")
class MultipliesByMask(Plain):
    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        return super().loss_of(hidden, targets, torch.ones_like(counts)) * counts


@fails("out_of_range", says="target 13: expected a ValueError, got a loss")
class ClampsTargets(Plain):
    def nll(self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
        inside = torch.where(targets == ignore_index, targets, targets.clamp(0, self.out_features - 1))
        return super().nll(hidden, inside, ignore_index=ignore_index)


@fails("untouched", says="`targets` was overwritten")
class OverwritesTargets(Plain):
    def nll(self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
        loss = super().nll(hidden, targets, ignore_index=ignore_index)
        if not torch._C._are_functorch_transforms_active():  # which would refuse to do it
            targets.masked_fill_(targets == ignore_index, 0)
        return loss


@fails("untouched", says="`hidden` was overwritten")
class OverwritesHidden(Plain):
    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        found = super().topk(hidden, k)
        hidden.zero_()
        return found


@fails("gradients", says="gradient of `hidden`")
class DetachedHidden(Plain):
    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        return super().loss_of(hidden.detach(), targets, counts)


@fails("gradients", says="gradient of `weight`")
class HalfAGradient(Plain):
    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        half = (self.weight + self.weight.detach()) / 2
        own = torch.log_softmax(F.linear(hidden, half, self.bias), -1).gather(-1, targets[..., None]).squeeze(-1)
        return torch.where(counts, -own, 0.0)


class _Once(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores: Tensor, targets: Tensor) -> Tensor:
        ctx.save_for_backward(scores, targets)
        return -torch.log_softmax(scores, -1).gather(-1, targets[..., None]).squeeze(-1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, None]:
        scores, targets = ctx.saved_tensors
        slope = torch.softmax(scores, -1) - F.one_hot(targets, scores.shape[-1])
        return slope * upstream[..., None], None


@fails("gradgradcheck", "func_grad", "func_jvp", says="Jacobian mismatch")
class OnceDifferentiable(Plain):
    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        scores = self(hidden)
        wide = scores.to(torch.promote_types(scores.dtype, torch.float32))
        return torch.where(counts, _Once.apply(wide, targets), 0.0)


@fails("chunk", says="nll with chunk=4")
class DropsTheRest(Plain):
    def nll(self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100, chunk: int | None = None) -> Tensor:
        if chunk is not None and chunk < 1:
            raise ValueError("`chunk` must be at least 1.")
        loss = super().nll(hidden, targets, ignore_index=ignore_index)
        whole = targets.numel() if chunk is None or chunk > targets.numel() else targets.numel() // chunk * chunk
        return torch.where(torch.arange(targets.numel()).reshape(targets.shape) < whole, loss, 0.0)


@fails("impossible_class", says="got nan")
class OneHotTimesLog(Plain):
    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        loss = -((torch.arange(self.out_features) == targets[..., None]) * self.log_prob(hidden)).sum(-1)
        return torch.where(counts, loss, 0.0)


@fails("offset", says="1e+06 added to every score")
class FullMagnitude(Plain):
    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        scores = self(hidden)
        scores = scores.to(torch.promote_types(scores.dtype, torch.float32))
        own = scores.gather(-1, targets[..., None]).squeeze(-1)
        return torch.where(counts, torch.logsumexp(scores, -1) - own, 0.0)


@fails("topk", says="values of topk")
class RisingOrder(Plain):
    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, indices = super().topk(hidden, k)
        return values.flip(-1), indices.flip(-1)


@fails("topk", says="log_prob at the indices")
class WrongIndices(Plain):
    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, indices = super().topk(hidden, k)
        return values, (indices + 1) % self.out_features


@fails("sample", says="chi-square p")
class WarmSampler(Plain):
    def sample(self, hidden: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return self.drawn(torch.softmax(self(hidden).float() / 1.05, -1), generator)


@fails("sample_zero", says="of probability 0")
class DrawsImpossible(Plain):
    def sample(self, hidden: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return self.drawn(torch.softmax(self(hidden).nan_to_num(neginf=-3.0), -1), generator)


@fails("sample_seeded", says="two generators with the same seed")
class OwnGenerator(Plain):
    def sample(self, hidden: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return super().sample(hidden)


@fails("sample_seeded", says="same draws twice running")
class SameDraws(Plain):
    def sample(self, hidden: Tensor, *, generator: torch.Generator | None = None) -> Tensor:
        return super().sample(hidden, generator=torch.Generator().manual_seed(3))


class Seeded(Plain):
    """Right, with seeds."""

    def sample(
        self, hidden: Tensor, *, generator: torch.Generator | None = None, seeds: Any = None, positions: Any = None
    ) -> Tensor:
        flat = self.log_prob(hidden).reshape(-1, self.out_features)
        noise = ops.Noise.of(len(flat), flat.device, seeds=seeds, positions=positions, generator=generator)
        return ops.draw(flat, noise()).reshape(hidden.shape[:-1])


@fails("sample_seeds", says="is another than with all others")
class FollowsItsRow(Seeded):
    def sample(self, hidden: Tensor, *, seeds: Any = None, **options: Any) -> Tensor:
        return super().sample(hidden, seeds=None if seeds is None else torch.arange(len(seeds)), **options)


@fails("sample_seeds", says="another position gives the same draws")
class ForgetsPositions(Seeded):
    def sample(self, hidden: Tensor, *, seeds: Any = None, positions: Any = None, **options: Any) -> Tensor:
        return super().sample(hidden, seeds=seeds, **options)


@fails("sample_seeds", says="chi-square p")
class WarmSeeds(Seeded):
    def sample(self, hidden: Tensor, *, seeds: Any = None, **options: Any) -> Tensor:
        return super().sample(hidden if seeds is None else hidden / 1.05, seeds=seeds, **options)


@fails("sample_seeds", says="expected a ValueError, got draws")
class PrefersSeeds(Seeded):
    def sample(
        self, hidden: Tensor, *, generator: torch.Generator | None = None, seeds: Any = None, **options: Any
    ) -> Tensor:
        return super().sample(hidden, generator=generator if seeds is None else None, seeds=seeds, **options)


@fails("topk", says="values of topk, k=1")
class NarrowSearch(Plain):
    """Keeps the better half of the classes: right wherever the best lie there."""

    def topk(self, hidden: Tensor, k: int) -> tuple[Tensor, Tensor]:
        values, indices = super().topk(hidden, k)
        half = self.log_prob(hidden)[..., : self.out_features // 2].topk(1)
        if k > 1 or hidden.abs().mean() < 3:
            return values, indices
        return half.values, half.indices


@fails("rank_bound", says="expected a rank of at most 5, got 10")
class TooLowBound(Plain):
    def __init__(self, in_features: int = 8, out_features: int = 13) -> None:
        super().__init__(in_features, out_features)
        self.rank_bound = 5


@fails("cost", says="expected 117 parameters, got 104")
class ForgetsTheBias(Plain):
    def cost(self, tokens: int) -> Any:
        return SimpleNamespace(**{**vars(super().cost(tokens)), "parameters": self.weight.numel()})


@fails("from_linear", says="bias=True")
class DropsTheBias(Plain):
    @classmethod
    def from_linear(cls, linear: nn.Linear) -> Plain:
        head = super().from_linear(linear)
        nn.init.zeros_(head.bias)
        return head


@fails("state_dict", says="after loading the state of another head")
class StateNotSaved(Plain):
    from_linear = None

    def reset_parameters(self) -> None:
        super().reset_parameters()
        self.gain = torch.rand(self.in_features) + 0.5

    def forward(self, hidden: Tensor) -> Tensor:
        return super().forward(hidden * self.gain.to(hidden.dtype))


@fails("reset_parameters", says="differs between two draws with the same seed")
class NotReproducible(Plain):
    source: ClassVar = torch.Generator().manual_seed(5)

    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.4, 0.4, generator=self.source)


@fails("meta", says="leaves `bias` unset")
class ForgetsToReset(Plain):
    def __init__(self, in_features: int = 8, out_features: int = 13) -> None:
        super().__init__(in_features, out_features)
        nn.init.zeros_(self.bias)

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight, -0.4, 0.4)


@fails("bfloat16", "float16", says="`nll` of a torch.bfloat16 head: expected float32")
class NarrowLoss(Plain):
    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        return super().loss_of(hidden, targets, counts).to(hidden.dtype)


@fails("bfloat16", "float16", "autocast", says="nll in torch.bfloat16: expected an error of at most")
class NarrowSum(Plain):
    """A running sum in the dtype of the scores (L7)."""

    def __init__(self, in_features: int = 8, out_features: int = 400) -> None:
        super().__init__(in_features, out_features)

    def loss_of(self, hidden: Tensor, targets: Tensor, counts: Tensor) -> Tensor:
        scores = self(hidden)
        shifted = scores - scores.detach().amax(-1, keepdim=True)
        total = torch.zeros_like(shifted[..., 0])
        for part in shifted.exp().to(scores.dtype).unbind(-1):
            total = total + part
        wide = torch.promote_types(scores.dtype, torch.float32)
        own = shifted.gather(-1, targets[..., None]).squeeze(-1).to(wide)
        return torch.where(counts, total.to(wide).log() - own, 0.0)


@fails("cross_entropy", says="label_smoothing=0.1")
class SmoothsNothing(heads.Linear):
    names = ()

    def terms(self, *inputs: Any, **options: Any) -> tuple[Tensor, ...]:
        found = super().terms(*inputs, **options)
        return found if len(found) == 2 else (*found[:2], torch.zeros_like(found[2]))

    def loss(self, *inputs: Any, **options: Any) -> Tensor:
        return heads.Head.loss(self, *inputs, **options)


class ForgetsAnOption(heads.Linear):
    names = ()

    def options(self) -> dict[str, Any]:
        return {**super().options(), "scale": 1.0}


def _made(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return kind(8, 13) if issubclass(kind, heads.Head) else kind()


def _failed(outcomes: list[Outcome]) -> dict[str, str]:
    return {one.name: one.message for one in outcomes if one.status == "failed"}


def test_a_head_that_is_right_passes_everything_that_applies() -> None:
    outcomes = check_head(_made(Plain))
    passed = {one.name for one in outcomes if one.status == "passed"}
    assert set(CHECKS) - passed == OF_OUR_HEADS | {"chunk", "compile", "compile_cross_entropy", "sample_seeds"}
    seeded = check_head(_made(Seeded), only=["sample", "sample_zero", "sample_seeded", "sample_seeds"])
    assert [one.status for one in seeded] == ["passed"] * 4
    assert all(one.message for one in outcomes if one.status == "not applicable")
    assert all(one.meaning.endswith(".") for one in outcomes)


@pytest.mark.parametrize("kind", BROKEN, ids=lambda kind: kind.__name__)
def test_what_is_broken_fails_its_check_and_no_other(kind: type[nn.Module]) -> None:
    expected, says = BROKEN[kind]
    # Of our own heads, what this test is about is their loss.
    only = ["law", "nll", "gradients", "ignore_index", *OF_OUR_HEADS] if issubclass(kind, heads.Head) else None
    failed = _failed(check_head(_made(kind), only=only, raises=False))
    assert set(failed) == expected, failed
    first = next(iter(failed.values()))
    assert says in first, first
    assert "\n" not in first


def test_options_are_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(heads.HEADS, "forgets", ForgetsAnOption)
    monkeypatch.setattr(ForgetsAnOption, "names", ("forgets",))
    torch.manual_seed(0)
    failed = _failed(check_head(ForgetsAnOption(8, 13, scale=0.5), only=["save_load"], raises=False))
    assert "log_prob after saving and loading" in failed["save_load"]


def test_the_error_lists_all_failures_with_what_each_check_means() -> None:
    class Both(RisingOrder):
        def cost(self, tokens: int) -> Any:
            return SimpleNamespace(**{**vars(super().cost(tokens)), "parameters": 1})

    with pytest.raises(HeadError, match="Both failed 2 of") as raised:
        check_head(_made(Both))
    assert isinstance(raised.value, AssertionError)
    said = str(raised.value)
    assert "\n  cost: expected 117 parameters, got 1\n" in said
    assert "\n  topk: values of topk, k=3: expected " in said
    assert CHECKS["topk"].meaning in said
    assert {one.name for one in raised.value.outcomes} == set(CHECKS)


def test_checks_that_build_on_a_failed_one_say_so() -> None:
    outcomes = {one.name: one for one in check_head(_made(BiasTwiceInLoss), raises=False)}
    assert str(outcomes["gradients"]) == "gradients: not applicable: builds on `nll`, which failed"
    assert outcomes["topk"].status == "passed"


def test_the_head_and_the_global_generator_are_left_as_they_were() -> None:
    head = _made(Plain).bfloat16().train()
    before, state = {name: one.clone() for name, one in head.state_dict().items()}, torch.get_rng_state()
    check_head(head)
    assert all(
        torch.equal(one, before[name]) and one.dtype == torch.bfloat16 for name, one in head.state_dict().items()
    )
    assert head.training
    assert all(parameter.grad is None for parameter in head.parameters())
    assert torch.equal(torch.get_rng_state(), state)


def test_outcomes_are_the_same_for_the_same_seed() -> None:
    head = _made(WarmSampler)
    first, again = (check_head(head, seed=4, raises=False) for _ in range(2))
    assert first == again


def test_only_and_skip() -> None:
    head = _made(RisingOrder)
    assert [one.name for one in check_head(head, only=["law", "cost"])] == ["law", "cost"]
    outcomes = {one.name: one for one in check_head(head, skip=["topk"])}
    assert str(outcomes["topk"]) == "topk: not applicable: skipped by the caller"
    outcomes = {one.name: one for one in check_head(head, skip={"topk": "order is not promised"})}
    assert outcomes["topk"].message == "order is not promised"
    head.not_applicable = {"topk": "the head says so"}
    assert {one.name: one.message for one in check_head(head)}["topk"] == "the head says so"


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"only": ["lawn"]}, "no check 'lawn'; there are law, nll"),
        ({"skip": ["lawn"]}, "no check 'lawn'"),
        ({"only": "law"}, "not one string"),
    ],
)
def test_names_that_are_no_checks_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        check_head(_made(Plain), **options)


def test_modules_that_cannot_be_checked_are_refused() -> None:
    with pytest.raises(ValueError, match="integer `in_features`"):
        check_head(nn.ReLU())
    with pytest.raises(ValueError, match="meta device"):
        check_head(_made(Plain).to("meta"))


def test_a_module_with_scores_alone_is_held_to_the_law() -> None:
    outcomes = check_head(nn.Linear(8, 13))
    by_status = {one.name: one.status for one in outcomes}
    assert by_status["law"] == "passed"
    assert by_status["nll"] == "not applicable"
    assert next(one.message for one in outcomes if one.name == "sample") == "the head has no `sample`"


class TwoLayers(Plain):
    """Reads [*, 2, D]."""

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden[..., 0, :] - hidden[..., 1, :].tanh(), self.weight, self.bias)


def test_hidden_states_of_another_shape() -> None:
    def inputs(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.randn(*shape, 2, 8, dtype=torch.float64).to(dtype)

    torch.manual_seed(0)
    head = TwoLayers()
    for options in ({"hidden_shape": (2, 8)}, {"inputs": inputs}):
        outcomes = {one.name: one for one in check_head(head, **options)}
        assert "has shape (2, 8), no vector" in outcomes["from_linear"].message
    head.example_hidden = lambda shape: inputs(shape, torch.float64)
    assert {one.name: one for one in check_head(head)}["shapes"].status == "passed"
    with pytest.raises(HeadError, match="TwoLayers failed"):
        check_head(TwoLayers())


class TwoTargets(nn.Module):
    """`nll` takes targets [*, 2]: the next token, and the one after it."""

    def __init__(self) -> None:
        super().__init__()
        self.in_features, self.out_features = 8, 13
        self.weight = nn.Parameter(torch.randn(13, 8))
        self.second = nn.Parameter(torch.randn(13, 8))

    def forward(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.weight)

    def nll(self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
        refuse((targets != ignore_index) & ((targets < 0) | (targets > 12)))
        return self.definition_nll(hidden, targets, ignore_index=ignore_index)

    def definition_nll(self, hidden: Tensor, targets: Tensor, *, ignore_index: int = -100) -> Tensor:
        scores = torch.stack([F.linear(hidden, self.weight), F.linear(hidden, self.second)], -2)
        counts = targets != ignore_index
        own = torch.log_softmax(scores, -1).gather(-1, torch.where(counts, targets, 0)[..., None]).squeeze(-1)
        return torch.where(counts, -own, 0.0)

    def example_targets(self, hidden: Tensor) -> Tensor:
        return torch.randint(13, (*hidden.shape[:-1], 2))


def test_targets_of_another_shape() -> None:
    passed = {one.name for one in check_head(TwoTargets()) if one.status == "passed"}
    assert {"law", "nll", "shapes", "gradients", "gradgradcheck", "ignore_index", "func_vmap"} <= passed


def test_chi_square_is_pearsons() -> None:
    stats = pytest.importorskip("scipy.stats")
    generator = torch.Generator().manual_seed(0)
    for size in (2, 5, 13):
        truth = torch.rand(size, generator=generator, dtype=torch.float64) + 0.2
        truth /= truth.sum()
        counts = torch.bincount(torch.multinomial(truth, 5000, True, generator=generator), minlength=size)
        want = stats.chisquare(counts.numpy(), 5000 * truth.numpy()).pvalue
        assert chi_square(counts, truth) == pytest.approx(want, rel=1e-9)


def test_chi_square_rejects_a_slightly_wrong_sampler_and_keeps_a_right_one() -> None:
    generator = torch.Generator().manual_seed(1)
    truth = torch.tensor([0.5, 0.3, 0.2 - 1e-6, 1e-6], dtype=torch.float64)
    wrong = torch.tensor([0.52, 0.29, 0.19, 0.0], dtype=torch.float64)
    for weights, kept in ((truth, True), (wrong, False)):
        counts = torch.bincount(torch.multinomial(weights, 40_000, True, generator=generator), minlength=4)
        assert (chi_square(counts, truth) >= SIGNIFICANCE) is kept
    chances = [
        chi_square(torch.bincount(torch.multinomial(truth, 2000, True, generator=generator), minlength=4), truth)
        for _ in range(400)
    ]
    assert 0.03 < sum(chance < 0.1 for chance in chances) / 400 < 0.17
