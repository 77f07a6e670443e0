"""What every head can do, in terms of its `forward`; a head overrides what it can do better.

Shapes: n or * tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unembed import ops
from unembed.heads._streamed import HeadLoss, HeadTerms, refuse_random
from unembed.ops import Noise, Numbers, chunk_rows, evaluate, requiring, weighted, widened

HEADS: dict[str, Any] = {}  # by every name that `build` takes
_COPIES = 4  # of `alive` that a chunk counts as: some are held, and small chunks add up large gradients often
EXACT = 1e-5  # nats a token: a start nearer to the linear head than that counts as exact
_LEAST = 32  # tokens of a chunk where scores are made to choose from: a product of fewer than 16 is slow for its size


@dataclass(frozen=True)
class Cost:
    """What a head costs for a number of tokens; a multiply-add is two operations.

    Args:
        parameters: Numbers that are trained.
        forward_flops: Operations of one forward pass.
        backward_flops: Operations of the backward pass after it.
        bytes_moved: Bytes of parameters and hidden states read, and of gradients written, once each.
        peak_bytes: Scores and gradients of parameters that a training step holds at once.
    """

    parameters: int
    forward_flops: int
    backward_flops: int
    bytes_moved: int
    peak_bytes: int


class Head(nn.Module):
    """Maps hidden states to scores whose `log_softmax` is the distribution of the next token.

    A subclass defines `names`, `__init__(in_features, out_features, *, ...)`, `forward` and `reset_parameters`, and is
    known to `build`, `save` and `load` as soon as its module is imported.

    Args:
        in_features: D.
        out_features: V.
    """

    names: ClassVar[tuple[str, ...]] = ()
    normalised: ClassVar[bool] = False  # whether `forward` gives log-probabilities

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        for name in cls.__dict__.get("names", ()):  # not those of a base: wrappers and variants make subclasses
            taken = HEADS.get(name)
            if taken is not None and (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
                raise ValueError(f"{cls.__name__}: the name {name!r} is taken by {taken.__name__}.")
            HEADS[name] = cls

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__()
        for name, value in (("in_features", in_features), ("out_features", out_features)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        self.in_features = in_features
        self.out_features = out_features

    def reset_parameters(self) -> None:
        """Draw all parameters anew."""
        raise NotImplementedError

    def options(self) -> dict[str, Any]:
        """Arguments of `__init__` beside the two sizes, as JSON types: those kept under their own name."""
        taken = inspect.signature(type(self).__init__).parameters.values()
        given = [one.name for one in taken if one.kind is one.KEYWORD_ONLY and one.name not in ("device", "dtype")]
        return {name: getattr(self, name) for name in given}

    @property
    def rank_bound(self) -> int | None:
        """Bound on the rank of the log-probability matrix, None where there is none below V."""
        return None

    @property
    def sparse(self) -> bool:
        """Whether which classes have probability 0 depends on the hidden state."""
        return False

    def real_classes(self) -> Tensor | None:
        """Which classes can have a probability, None for all: a bias of `-inf` takes one out."""
        bias = getattr(self, "bias", None)
        return None if bias is None else bias.detach() != -torch.inf

    least_rows: ClassVar[int] = 1  # tokens of a chunk at least, where its loss is made of chunks

    @property
    def alive(self) -> int:
        """Numbers held for a token while its loss is computed."""
        return self.out_features

    def forward(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Scores; `log_softmax` of them is the distribution."""
        raise NotImplementedError

    def log_prob(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Log-probabilities, float32 or wider."""
        scores = self(hidden)
        scores = scores.to(widened(scores.dtype))
        return scores if self.normalised else torch.log_softmax(scores, -1)

    def nll(
        self,
        hidden: Float[Tensor, "*n D"],
        targets: Int[Tensor, "*n"],
        *,
        ignore_index: int = -100,
        chunk: int | None = None,
    ) -> Float[Tensor, "*n"]:
        """Negative log-likelihood in nats, 0 where ignored; peak memory does not grow with tokens times V.

        Args:
            hidden: Hidden states.
            targets: Next tokens.
            ignore_index: Target of tokens that do not count.
            chunk: Tokens whose scores are alive at once; chosen from V when None.
        """
        return self.terms(hidden, targets, ignore_index=ignore_index, chunk=chunk)[0]

    def terms(
        self,
        hidden: Float[Tensor, "*n D"],
        targets: Int[Tensor, "*n"],
        *,
        ignore_index: int = -100,
        spread: Float[Tensor, " V"] | None = None,
        chunk: int | None = None,
    ) -> tuple[Float[Tensor, "*n"], ...]:
        """`(nll, lse)` of each token, and the sum of its scores weighted by `spread` where that is given.

        For heads normalised by construction `lse` is 0.
        """
        hidden, targets, shape = self.flattened(hidden, targets)
        ops.check_targets(targets, self.out_features, ignore_index)
        refuse_random(self)
        rows = chunk_rows(_COPIES * self.alive, hidden.device, chunk)
        function = HeadTerms(self, rows, ignore_index, spread=spread is not None)
        shared = (*self.parameters(), *(() if spread is None else (spread,)))
        outputs, _ = evaluate(function, (hidden, targets), shared)
        return tuple(part.reshape(shape) for part in outputs)

    def loss(
        self,
        hidden: Float[Tensor, "n D"],
        targets: Int[Tensor, " n"],
        coefficients: Float[Tensor, "n 4"],
        *,
        ignore_index: int = -100,
        spread: Float[Tensor, " V"] | None = None,
        chunk: int | None = None,
    ) -> Float[Tensor, ""]:
        """The sum of `nll`, `lse`, `lse^2` and spread, each with its coefficient; see `ops.linear_loss`."""
        if type(self).terms is not Head.terms and spread is None:
            # A head with terms of its own has a way to them that needs not all scores.
            terms = self.terms(hidden, targets, ignore_index=ignore_index, spread=spread, chunk=chunk)
            nll, lse, *last = terms
            return weighted((nll, lse, lse.square(), *last), coefficients)
        ops.check_targets(targets, self.out_features, ignore_index)
        refuse_random(self)
        rows = chunk_rows(_COPIES * self.alive, hidden.device, chunk)
        tokens = (hidden, targets.long(), coefficients)
        shared = (*self.parameters(), *(() if spread is None else (spread,)))
        asked = (requiring(tokens), requiring(shared))
        function = HeadLoss(self, rows, ignore_index, asked, spread=spread is not None)
        _, (total,) = evaluate(function, tokens, shared)
        return total

    @torch.no_grad()
    def topk(self, hidden: Float[Tensor, "*n D"], k: int) -> tuple[Float[Tensor, "*n k"], Int[Tensor, "*n k"]]:
        """The k largest log-probabilities and their tokens, exact; equal ones in any order.

        Raises:
            ValueError: If `k` is not in [1, V].
        """
        self.check_k(k)
        flat, shape = hidden.reshape(-1, *self.hidden_shape(hidden)), self.tokens_shape(hidden)
        parts = flat.split(chunk_rows(3 * self.alive, hidden.device, least=_LEAST))
        found = [self.log_prob(part).topk(k, dim=-1) for part in parts]
        if not found:
            return hidden.new_zeros(*shape, k), torch.zeros(*shape, k, dtype=torch.int64, device=hidden.device)
        return (
            torch.cat([part.values for part in found]).reshape(*shape, k),
            torch.cat([part.indices for part in found]).reshape(*shape, k),
        )

    @torch.no_grad()
    def sample(
        self,
        hidden: Float[Tensor, "*n D"],
        *,
        generator: torch.Generator | None = None,
        seeds: Numbers | None = None,
        positions: Numbers | None = None,
    ) -> Int[Tensor, "*n"]:
        """One exact draw a token, never one of probability 0.

        Args:
            hidden: Hidden states.
            generator: Its draws are reproducible for one batch.
            seeds: Instead of it, one whole number a token: a draw is then a function of the token's seed, position and
                hidden state alone, and the same in any batch.
            positions: With `seeds`, one whole number a token that counts the draws of a seed; 0 when None.

        Raises:
            ValueError: If these do not fit together or to the tokens, or a distribution is not finite.
        """
        flat, shape = hidden.reshape(-1, *self.hidden_shape(hidden)), self.tokens_shape(hidden)
        noise = Noise.of(len(flat), hidden.device, seeds=seeds, positions=positions, generator=generator)
        step, drawn = chunk_rows(self.alive_drawn, hidden.device, least=_LEAST), [flat.new_zeros(0, dtype=torch.int64)]
        for start in range(0, len(flat), step):
            part = slice(start, start + step)
            drawn.append(self.draws(flat[part], noise.at(part)))
        return torch.cat(drawn).reshape(shape)

    @property
    def alive_drawn(self) -> int:
        """Numbers held for a token while it is drawn."""
        return 3 * self.alive

    def draws(self, hidden: Float[Tensor, "n D"], noise: Noise) -> Int[Tensor, " n"]:
        """`sample` of some tokens; a head that draws in several choices takes a step of the noise for each."""
        return ops.draw(self(hidden), noise())

    def cost(self, tokens: int) -> Cost:
        """Parameters, operations, bytes moved and peak bytes of a training step of `tokens` tokens."""
        per_token = self.flops()
        size = sum(parameter.numel() for parameter in self.parameters())
        itemsize = next(iter(self.parameters())).element_size()
        rows = min(tokens, chunk_rows(self.alive, torch.device("cpu"), least=self.least_rows))
        return Cost(
            parameters=size,
            forward_flops=tokens * per_token,
            backward_flops=2 * tokens * per_token,
            bytes_moved=itemsize * (3 * size + 2 * tokens * self.in_features),
            peak_bytes=itemsize * size + max(itemsize, 4) * rows * self.alive,
        )

    def flops(self) -> int:
        """Operations of the forward pass for one token."""
        return 2 * self.in_features * self.out_features

    def extra_repr(self) -> str:
        """Sizes and options."""
        options = "".join(f", {name}={value!r}" for name, value in self.options().items())
        return f"in_features={self.in_features}, out_features={self.out_features}{options}"

    def example_hidden(self, shape: tuple[int, ...]) -> Tensor:
        """Random hidden states for tokens of a shape, float64."""
        return torch.randn(*shape, self.in_features, dtype=torch.float64)

    def hidden_shape(self, hidden: Tensor) -> tuple[int, ...]:
        """Shape of the hidden state of one token: its last dimension."""
        return tuple(hidden.shape[-1:])

    def tokens_shape(self, hidden: Tensor) -> tuple[int, ...]:
        """Shape of the tokens: what is in front of `hidden_shape`."""
        return tuple(hidden.shape[: hidden.ndim - len(self.hidden_shape(hidden))])

    def flattened(
        self, hidden: Tensor, targets: Tensor, *, document_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """Hidden states and targets with one token dimension, and the shape it was.

        `document_ids` matter to a head that reads more than one position.

        Raises:
            ValueError: If the shapes do not fit.
        """
        shape = self.tokens_shape(hidden)
        if targets.is_floating_point() or targets.dtype == torch.bool:
            raise ValueError(f"`targets` must hold integers, got {targets.dtype}.")
        if tuple(targets.shape) != shape or hidden.shape[-1] != self.in_features:
            raise ValueError(
                f"Expected `hidden` [*, {self.in_features}] and `targets` [*] of one shape, "
                f"got {tuple(hidden.shape)} and {tuple(targets.shape)}."
            )
        return hidden.reshape(-1, *self.hidden_shape(hidden)), targets.reshape(-1).long(), shape

    def check_k(self, k: int) -> None:
        """Refuse a number of tokens that there are not."""
        if not 1 <= k <= self.out_features:
            raise ValueError(f"`k` must lie in [1, {self.out_features}], got {k}.")

    @classmethod
    def examples(cls, in_features: int, out_features: int) -> Sequence[Self]:
        """Small instances that `testing.check_head` is run on; more than one where options change the code path."""
        return [cls(in_features, out_features)]


def start_of(linear: Any, kind: type[Head]) -> tuple[Float[Tensor, "V D"], Float[Tensor, " V"] | None]:
    """Weight and bias for a head of another kind to start from; the scale of a `Linear` head goes into both.

    Raises:
        ValueError: If it is no linear layer or head, or has a soft-cap.
    """
    check_linear(linear, kind)
    if getattr(linear, "softcap", None) is not None:
        raise ValueError(f"{kind.__name__} has no soft-cap, so it cannot start as a head with one.")
    scale, bias = getattr(linear, "scale", 1.0), linear.bias
    return linear.weight.detach() * scale, None if bias is None else bias.detach() * scale


def check_linear(linear: Any, kind: type[Head]) -> None:
    """Refuse to start from what is more than a matrix: a copy of that alone would be another distribution.

    Raises:
        ValueError: If it is neither an `nn.Linear` nor a `Linear` head.
    """
    if not isinstance(linear, nn.Linear) and getattr(type(linear), "names", ()) != ("linear",):
        raise ValueError(
            f"{kind.__name__}.from_linear takes an nn.Linear or a heads.Linear, got {type(linear).__name__}."
        )


def uniform_(tensor: Tensor, fan_in: int) -> None:
    """The initial values of `nn.Linear`: uniform within one over the root of the inputs."""
    bound = 1 / math.sqrt(fan_in)
    with torch.no_grad():
        tensor.uniform_(-bound, bound)
