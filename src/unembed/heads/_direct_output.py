"""Direct output connection (Takase et al., 2018, arXiv:1808.10143): a mixture that reads several layers.

Shapes: n or * tokens, L layers, K components, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unembed import ops
from unembed.heads._base import EXACT, Head, start_of, uniform_
from unembed.heads._product import log_softmax, product


def _reference(head: DirectOutputConnection, hidden: Tensor) -> Float[Tensor, "n V"]:
    """What the head means: log-probabilities in float64, one component after the other."""
    last, places = hidden[:, -1].double(), head.layer_of()
    prior = last @ head.prior.double().T
    if head.prior_bias is not None:
        prior = prior + head.prior_bias.double()
    prior = prior.softmax(1)
    total = hidden.new_zeros(len(hidden), head.out_features, dtype=torch.float64)
    for component, layer in enumerate(places):
        turned = hidden[:, layer].double() @ head.facets[component].double().T + head.facet_bias[component].double()
        turned = torch.tanh(turned) if head.activation == "tanh" else turned
        scores = turned @ head.weight.double().T
        scores = scores if head.bias is None else scores + head.bias.double()
        total = total + prior[:, component, None] * scores.softmax(1)
    return total.log()


class DirectOutputConnection(Head):
    r"""A mixture whose component k reads the layer $l_k$ and whose weights come from the last layer.

    $$p = \sum_k \pi_k\, \mathrm{softmax}(W f_k(h^{l_k}) + b), \qquad \pi = \mathrm{softmax}(\Pi h^L + c), \qquad
      f_k(h) = \tanh(F_k h + f_k)$$

    Takes `hidden` [*, L, D], the last layer last. The paper writes facets without an activation
    (`activation="identity"`) and the prior without c; with all components on the last layer it is a mixture of
    softmaxes.

    Args:
        in_features: D, of every layer.
        out_features: V.
        layers: L, the layers given.
        k: Components a layer: one number for all, or one for each layer, first to last (0 leaves a layer out).
        activation: Of the facets; `identity` can start as a linear head.
        bias: Whether the shared matrix has a bias b.
        prior_bias: Whether the prior has a bias c.
        device: Where the parameters are.
        dtype: Of the parameters.
    """

    names = ("doc",)
    normalised = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        layers: int = 2,
        k: int | Sequence[int] = 2,
        activation: Literal["tanh", "identity"] = "tanh",
        bias: bool = False,
        prior_bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        if layers < 1:
            raise ValueError(f"`layers` must be at least 1, got {layers}.")
        if activation not in ("tanh", "identity"):
            raise ValueError(f"`activation` must be tanh or identity, got {activation!r}.")
        self.layers, self.k, self.activation = layers, k if isinstance(k, int) else list(k), activation
        self.counts = [k] * layers if isinstance(k, int) else list(k)
        if len(self.counts) != layers or min(self.counts) < 0 or sum(self.counts) < 1:
            raise ValueError(f"`k` must be one number or {layers}, none negative, with a positive sum; got {k}.")
        like, total = {"device": device, "dtype": dtype}, sum(self.counts)
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **like))
        self.prior = nn.Parameter(torch.empty(total, in_features, **like))
        self.prior_bias = nn.Parameter(torch.empty(total, **like)) if prior_bias else None
        self.facets = nn.Parameter(torch.empty(total, in_features, in_features, **like))
        self.facet_bias = nn.Parameter(torch.empty(total, in_features, **like))
        self.bias = nn.Parameter(torch.empty(out_features, **like)) if bias else None
        self.reset_parameters()

    def options(self) -> dict[str, Any]:
        """As given to `__init__`."""
        return {
            "layers": self.layers,
            "k": self.k,
            "activation": self.activation,
            "bias": self.bias is not None,
            "prior_bias": self.prior_bias is not None,
        }

    def reset_parameters(self) -> None:
        """Draw all as `nn.Linear` does."""
        for parameter in self.parameters():
            uniform_(parameter, self.in_features)

    def layer_of(self) -> list[int]:
        """The layer that each component reads."""
        return [layer for layer, count in enumerate(self.counts) for _ in range(count)]

    @property
    def rank_bound(self) -> int | None:
        """None; a single component is a linear head of its facet: D + 1, one more for a bias."""
        bound = self.in_features + 1 + (self.bias is not None)
        return min(bound, self.out_features) if sum(self.counts) == 1 else None

    @property
    def alive(self) -> int:
        """K scores a class."""
        return sum(self.counts) * self.out_features

    def example_hidden(self, shape: tuple[int, ...]) -> Tensor:
        """Random hidden states of all layers for tokens of a shape, float64."""
        return 2 * torch.randn(*shape, self.layers, self.in_features, dtype=torch.float64)

    def hidden_shape(self, hidden: Tensor) -> tuple[int, ...]:
        """Layers and hidden size.

        Raises:
            ValueError: If `hidden` does not end in [L, D].
        """
        if tuple(hidden.shape[-2:]) != (self.layers, self.in_features):
            raise ValueError(f"Expected `hidden` [*, {self.layers}, {self.in_features}], got {tuple(hidden.shape)}.")
        return tuple(hidden.shape[-2:])

    def components(self, hidden: Float[Tensor, "*n L D"]) -> Float[Tensor, "*n K D"]:
        """The hidden state that each component scores with."""
        self.hidden_shape(hidden)
        turned, start = [], 0
        for layer, count in enumerate(self.counts):
            if count:
                facets = self.facets[start : start + count].flatten(0, 1)
                own = product(hidden[..., layer, :], facets)
                turned.append(own.unflatten(-1, (count, self.in_features)))
            start += count
        together = torch.cat(turned, dim=-2) + self.facet_bias
        return torch.tanh(together) if self.activation == "tanh" else together

    def log_prior(self, hidden: Float[Tensor, "*n L D"]) -> Float[Tensor, "*n K"]:
        """Log of the component weights, from the last layer; float32 or wider."""
        self.hidden_shape(hidden)
        return log_softmax(product(hidden[..., -1, :], self.prior, self.prior_bias))

    def penalty(self, hidden: Float[Tensor, "*n L D"], *, mask: Tensor | None = None) -> Float[Tensor, ""]:
        r"""Squared coefficient of variation of the components' mean weights: 0 where all are used alike.

        $$\left(\frac{\mathrm{std}_k\, m_k}{\mathrm{mean}_k\, m_k}\right)^2 = \frac1K \sum_k (K m_k - 1)^2, \qquad
          m_k = \frac1N \sum_n \pi_k(h_n)$$

        with the standard deviation over the K components as a population; the paper's sum over the batch in the place
        of its mean gives the same number, its published code K times it. Add it to the loss times a factor.

        Args:
            hidden: Hidden states of the batch.
            mask: Tokens that count, boolean [*]; all when None. None counting gives 0.
        """
        prior = self.log_prior(hidden).exp().reshape(-1, sum(self.counts))
        counts = prior.new_ones(len(prior)) if mask is None else mask.reshape(-1).to(prior.dtype)
        number = counts.sum()
        mean = (counts[:, None] * prior).sum(0) / torch.where(number == 0, 1.0, number)
        return torch.where(number == 0, 0.0, (len(mean) * mean - 1).square().mean())

    def forward(self, hidden: Float[Tensor, "*n L D"]) -> Float[Tensor, "*n V"]:
        """Log-probabilities, float32 or wider."""
        parts = self._log_softmax(self.components(hidden))
        return ops.logsumexp(self.log_prior(hidden)[..., None] + parts, dim=-2)

    def terms(
        self,
        hidden: Float[Tensor, "*n L D"],
        targets: Int[Tensor, "*n"],
        *,
        ignore_index: int = -100,
        spread: Float[Tensor, " V"] | None = None,
        chunk: int | None = None,
    ) -> tuple[Float[Tensor, "*n"], ...]:
        """From K linear losses a token; a sum over all classes needs all log-probabilities of a chunk."""
        if spread is not None:
            return super().terms(hidden, targets, ignore_index=ignore_index, spread=spread, chunk=chunk)
        flat, targets, shape = self.flattened(hidden, targets)
        nll = ops.mixture_nll(
            self.components(flat),
            self.log_prior(flat),
            self.weight,
            targets,
            bias=self.bias,
            ignore_index=ignore_index,
            chunk=chunk,
        ).reshape(shape)
        return nll, torch.zeros_like(nll)

    def loss(
        self,
        hidden: Float[Tensor, "n L D"],
        targets: Int[Tensor, " n"],
        coefficients: Float[Tensor, "n 4"],
        *,
        ignore_index: int = -100,
        spread: Float[Tensor, " V"] | None = None,
        chunk: int | None = None,
    ) -> Float[Tensor, ""]:
        """Three products, gradients included."""
        return ops.mixture_loss(
            self.components(hidden),
            self.log_prior(hidden),
            self.weight,
            targets,
            coefficients[:, ::3],
            bias=self.bias,
            ignore_index=ignore_index,
            spread=spread,
            chunk=chunk,
        )

    @property
    def alive_drawn(self) -> int:
        """Those of one softmax."""
        return 3 * self.out_features

    def draws(self, hidden: Float[Tensor, "n L D"], noise: ops.Noise) -> Int[Tensor, " n"]:
        """The component first, then its one softmax."""
        chosen = ops.draw(self.log_prior(hidden), noise(0))
        one = self.components(hidden)[torch.arange(len(hidden), device=hidden.device), chosen]
        return ops.draw(self._log_softmax(one), noise(1))

    def flops(self) -> int:
        """`K (D^2 + D V)` multiply-adds, and K D for the prior."""
        return 2 * sum(self.counts) * self.in_features * (self.in_features + self.out_features + 1)

    def _log_softmax(self, components: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        return log_softmax(product(components, self.weight, self.bias))

    @classmethod
    def from_linear(cls, linear: Any, *, layers: int = 2, k: int | Sequence[int] = 2, share: float = 1e-8) -> Self:
        """A head that starts as `linear` on the last layer: facets are the identity, earlier layers weigh `share`.

        The loss is at most `share` above the linear head's, and below it where an earlier layer gives the target more
        than `1 / share` times the probability. With no components on earlier layers the start is exact. Warns where the
        loss can be more than 1e-5 above.

        Args:
            linear: An `nn.Linear`, or a `Linear` head without soft-cap; its scale goes into weight and bias.
            layers: L.
            k: Components a layer, as in `__init__`; at least one for the last.
            share: Weight of all components of earlier layers together.
        """
        weight, bias = start_of(linear, cls)
        if not 0 < share < 1:
            raise ValueError(f"`share` must lie in (0, 1), got {share}.")
        head = cls(
            linear.in_features,
            linear.out_features,
            layers=layers,
            k=k,
            activation="identity",
            bias=bias is not None,
            prior_bias=True,
            device=weight.device,
            dtype=weight.dtype,
        )
        last = head.counts[-1]
        if last == 0:
            raise ValueError(f"`k` must give the last layer a component to start as a linear head, got {k}.")
        earlier = sum(head.counts) - last
        if earlier and share > EXACT:
            warnings.warn(
                f"{cls.__name__} starts up to {-math.log1p(-share):.1e} nats from the linear head: "
                f"components of earlier layers weigh {share:g}; see `share`.",
                stacklevel=2,
            )
        with torch.no_grad():
            head.weight.copy_(weight)
            head.facets.copy_(torch.eye(linear.in_features, dtype=weight.dtype, device=weight.device))
            head.facet_bias.zero_()
            head.prior.zero_()  # the weights must not depend on the hidden state, or `share` would not hold
            if head.bias is not None and bias is not None:
                head.bias.copy_(bias)
            assert head.prior_bias is not None
            head.prior_bias.zero_()[:earlier] = math.log(share / (1 - share) * last / earlier) if earlier else 0.0
        return head

    @classmethod
    def examples(cls, in_features: int, out_features: int) -> Sequence[Self]:
        """Two layers alike, and three with different numbers, biases and no activation."""
        return [
            cls(in_features, out_features),
            cls(in_features, out_features, layers=3, k=[1, 0, 2], activation="identity", bias=True, prior_bias=True),
        ]
