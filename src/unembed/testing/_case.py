"""The head under test, with copies of it in any dtype, inputs, targets and the loss by definition.

Shapes: * tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

Inputs = Callable[[tuple[int, ...], torch.dtype], Tensor]
Loss = Callable[[Any, Tensor, Tensor], Tensor]
TOKENS = (2, 3)  # two sequences: enough for every shape a head may ask for
_STEP = 0.1  # parameters are moved so far first, so that a bias of zeros or a gain of ones cannot hide a mistake


class FailedError(Exception):
    """A check did not hold; the message says what was expected and what came."""


class NotApplicableError(Exception):
    """A check says nothing about this head; the message says why."""


class Case:
    """A head and what it is checked with; the head that was given is never written to.

    Args:
        head: A module with the public names of a head.
        inputs: `(tokens_shape, dtype) -> hidden`, random.
        seed: Of the parameters' step.
    """

    def __init__(self, head: Any, inputs: Inputs, seed: int) -> None:
        self.given = head
        self.kind: Any = type(head)
        self.classes: int = self.given.out_features
        self.device = next((parameter.device for parameter in head.parameters()), torch.device("cpu"))
        self._inputs = inputs
        self.backend = "inductor"  # of torch.compile
        torch.manual_seed(seed)
        self._moved = copy.deepcopy(head).eval().float()
        with torch.no_grad():
            for parameter in self._moved.parameters():
                if parameter.requires_grad:
                    parameter.add_(torch.randn(parameter.shape).to(parameter) * _STEP)

    def head(self, dtype: torch.dtype = torch.float32) -> Any:
        """A copy of the head in `dtype`, in evaluation mode."""
        return copy.deepcopy(self._moved).to(dtype)

    def fresh(self, **like: Any) -> Any:
        """A head made anew with the same options."""
        if not hasattr(self.given, "options"):
            raise NotApplicableError("the head has no `options()`, so a second one cannot be made")
        return self.kind(self.given.in_features, self.classes, **self.given.options(), **like).eval()

    def has(self, *names: str) -> None:
        """Not applicable unless the head has all these names."""
        for name in names:
            if not hasattr(self.given, name):
                raise NotApplicableError(f"the head has no `{name}`")
            if getattr(self.given, name) is None:
                raise NotApplicableError(f"`{name}` of the head is None")

    def plain(self) -> None:
        """Not applicable when the loss is not `-log_prob[target]`."""
        if hasattr(self.given, "definition_nll"):
            raise NotApplicableError("the head gives its own `definition_nll`, so the loss is not `-log_prob[target]`")

    def hidden(self, shape: tuple[int, ...] = TOKENS, dtype: torch.dtype = torch.float32) -> Tensor:
        """Random hidden states."""
        try:
            return self._inputs(shape, dtype).to(self.device, dtype)
        except NotImplementedError as error:
            raise NotApplicableError(f"no hidden states for tokens {shape}: {error}") from error

    def targets(self, head: Any, hidden: Tensor) -> Tensor:
        """Random targets for `hidden`; integers of 64 bits."""
        if hasattr(head, "example_targets"):
            return head.example_targets(hidden).to(self.device)
        return torch.randint(self.classes, self.tokens(head, hidden), device=self.device)

    def tokens(self, head: Any, hidden: Tensor) -> tuple[int, ...]:
        """Shape of the tokens of `hidden`."""
        if hasattr(head, "tokens_shape"):
            return tuple(head.tokens_shape(hidden))
        return tuple(head(hidden).shape[:-1])

    def pair(self, shape: tuple[int, ...] = TOKENS, dtype: torch.dtype = torch.float32) -> tuple[Any, Tensor, Tensor]:
        """A head in `dtype`, hidden states and targets."""
        self.has("nll")
        head, hidden = self.head(dtype), self.hidden(shape, dtype)
        return head, hidden, self.targets(head, hidden)

    def flat(self, hidden: Tensor, tokens: tuple[int, ...]) -> None:
        """Not applicable unless the hidden state of a token is one vector."""
        if hidden.ndim != len(tokens) + 1:
            raise NotApplicableError(
                f"the hidden state of a token has shape {tuple(hidden.shape[len(tokens) :])}, no vector"
            )


def log_prob(head: Any, hidden: Tensor) -> Tensor:
    """The head's own, or `log_softmax` of its scores where it has none."""
    if hasattr(head, "log_prob"):
        return head.log_prob(hidden)
    scores = head(hidden)
    return torch.log_softmax(scores.to(torch.promote_types(scores.dtype, torch.float32)), -1)


def definition(head: Any, hidden: Tensor, targets: Tensor, ignore_index: int = -100) -> Tensor:
    """The loss of each token by definition: `-log_prob[target]`, 0 where ignored; or the head's `definition_nll`."""
    if hasattr(head, "definition_nll"):
        return head.definition_nll(hidden, targets, ignore_index=ignore_index)
    counts = targets != ignore_index
    own = log_prob(head, hidden).gather(-1, torch.where(counts, targets, 0)[..., None]).squeeze(-1)
    return torch.where(counts, -own, 0.0)


def nll(head: Any, hidden: Tensor, targets: Tensor) -> Tensor:
    """The head's own loss."""
    return head.nll(hidden, targets)


def gradients(
    head: Any, hidden: Tensor, targets: Tensor, loss: Loss = nll, upstream: Tensor | None = None
) -> tuple[Tensor, dict[str, Tensor]]:
    """The loss of each token, and the gradients of their (weighted) sum by name: `hidden` and every parameter."""
    hidden = hidden.detach().clone().requires_grad_()
    inputs = {"hidden": hidden, **{name: one for name, one in head.named_parameters() if one.requires_grad}}
    values = loss(head, hidden, targets)
    if not values.requires_grad:
        raise FailedError("expected a loss with a graph behind it, got one that has no gradient at all")
    total = values.sum() if upstream is None else (values * upstream.to(values)).sum()
    found = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
    zero = (torch.zeros_like(one) for one in inputs.values())
    pairs = zip(inputs, found, zero, strict=True)
    return values.detach(), {name: nothing if one is None else one for name, one, nothing in pairs}


@contextlib.contextmanager
def during(what: str) -> Generator[None]:
    """Put `what` in front of the message of any error inside."""
    try:
        yield
    except (FailedError, NotApplicableError):
        raise
    except Exception as error:
        raise FailedError(f"{what}: raised {type(error).__name__}: {brief(error)}") from error


def brief(error: Exception) -> str:
    """The message of an error in one line of bounded length."""
    return " ".join(str(error).split())[:300]


def expect(condition: bool, message: str) -> None:
    """Fail with `message` unless `condition`."""
    if not condition:
        raise FailedError(message)


def close(got: Tensor, want: Tensor, tolerance: float, what: str) -> None:
    """Fail unless all numbers agree: within `tolerance` times the larger of 1 and the largest number expected."""
    expect(tuple(got.shape) == tuple(want.shape), f"{what}: expected shape {tuple(want.shape)}, got {tuple(got.shape)}")
    if not got.numel():
        return
    got, want = got.detach().double(), want.detach().double()
    difference = torch.where(got == want, 0.0, (got - want).abs()).flatten()
    finite = want[want.isfinite()].abs()
    allowed = tolerance * max(1.0, float(finite.max()) if finite.numel() else 1.0)
    bad = ~(difference <= allowed)  # so NaN is bad
    if bad.any():
        worst = int(torch.where(difference.isnan(), torch.inf, difference).argmax())
        raise FailedError(
            f"{what}: expected {want.flatten()[worst]:.7g}, got {got.flatten()[worst]:.7g} "
            f"({int(bad.sum())} of {bad.numel()} numbers differ by more than {allowed:.1e})"
        )


def close_gradients(got: dict[str, Tensor], want: dict[str, Tensor], tolerance: float, what: str = "") -> None:
    """`close` for each gradient by name."""
    for name, gradient in want.items():
        close(got[name], gradient, tolerance, f"gradient of `{name}`{what}")
