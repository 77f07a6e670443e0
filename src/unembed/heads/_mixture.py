"""Mixture of softmaxes (Yang et al., 2018, arXiv:1711.03953): a distribution that no rank of `W` bounds.

Shapes: n or * tokens, K components, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unembed import ops
from unembed.heads._base import Head, start_of, uniform_
from unembed.heads._product import alike, log_softmax, product


class MixtureOfSoftmaxes(Head):
    r"""A weighted sum of softmaxes over one matrix, or over one matrix a component.

    $$p = \sum_k \pi_k\, \mathrm{softmax}(W \tanh(F_k h + f_k) + b) \quad\text{or}\quad
      \sum_k \pi_k\, \mathrm{softmax}(W_k h), \qquad \pi = \mathrm{softmax}(\Pi h)$$

    Args:
        in_features: D.
        out_features: V.
        k: Components.
        shared: One matrix `weight` [V, D] for all; or `weight` [K, V, D], which nothing can be tied to.
        activation: Of the facets of a shared matrix; `identity` can start as a linear head.
        sigsoftmax: Components are `softmax(u + log sigmoid(u))` (Kanai et al., 2018, arXiv:1805.10829).
        bias: Whether a shared matrix has a bias.
        device: Where the parameters are.
        dtype: Of the parameters.
    """

    names = ("mos", "mixture")
    normalised = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        k: int = 4,
        shared: bool = True,
        activation: Literal["tanh", "identity"] = "tanh",
        sigsoftmax: bool = False,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        if k < 1:
            raise ValueError(f"`k` must be at least 1, got {k}.")
        if activation not in ("tanh", "identity"):
            raise ValueError(f"`activation` must be tanh or identity, got {activation!r}.")
        if bias and not shared:
            raise ValueError("`bias` belongs to a shared matrix; leave it out or use shared=True.")
        self.k, self.shared, self.activation, self.sigsoftmax = k, shared, activation, sigsoftmax
        like = {"device": device, "dtype": dtype}
        shape = (out_features, in_features) if shared else (k, out_features, in_features)
        self.weight = nn.Parameter(torch.empty(shape, **like))
        self.prior = nn.Parameter(torch.empty(k, in_features, **like))
        self.facets = nn.Parameter(torch.empty(k, in_features, in_features, **like)) if shared else None
        self.facet_bias = nn.Parameter(torch.empty(k, in_features, **like)) if shared else None
        self.bias = nn.Parameter(torch.empty(out_features, **like)) if bias else None
        self.reset_parameters()

    def options(self) -> dict[str, Any]:
        """As given to `__init__`."""
        return {
            "k": self.k,
            "shared": self.shared,
            "activation": self.activation,
            "sigsoftmax": self.sigsoftmax,
            "bias": self.bias is not None,
        }

    def reset_parameters(self) -> None:
        """Draw all as `nn.Linear` does."""
        for parameter in self.parameters():
            uniform_(parameter, self.in_features)

    @property
    def alive(self) -> int:
        """K scores a class."""
        return self.k * self.out_features

    def components(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n K D"]:
        """The hidden state that each component reads."""
        if self.facets is None or self.facet_bias is None:
            return hidden[..., None, :].expand(*hidden.shape[:-1], self.k, self.in_features)
        turned = product(hidden, self.facets.flatten(0, 1)).unflatten(-1, (self.k, self.in_features))
        turned = turned + self.facet_bias
        return torch.tanh(turned) if self.activation == "tanh" else turned

    def log_prior(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n K"]:
        """Log of the component weights, float32 or wider."""
        return log_softmax(product(hidden, self.prior))

    def forward(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Log-probabilities, float32 or wider."""
        parts = self._component_log_prob(self.components(hidden))
        return ops.logsumexp(self.log_prior(hidden)[..., None] + parts, dim=-2)

    def terms(
        self,
        hidden: Float[Tensor, "*n D"],
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
        components, log_prior = self.components(flat), self.log_prior(flat)
        if self.shared:
            nll = ops.mixture_nll(
                components,
                log_prior,
                self.weight,
                targets,
                bias=self.bias,
                sigsoftmax=self.sigsoftmax,
                ignore_index=ignore_index,
                chunk=chunk,
            )
        else:
            each = [
                ops.linear_terms(
                    flat, weight, targets, sigsoftmax=self.sigsoftmax, ignore_index=ignore_index, chunk=chunk
                )[0]
                for weight in self.weight
            ]
            nll = ops.combined(log_prior, torch.stack(each, dim=-1), targets != ignore_index)
        nll = nll.reshape(shape)
        return nll, torch.zeros_like(nll)

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
        """Three products for a shared matrix, gradients included."""
        if not self.shared:
            return super().loss(hidden, targets, coefficients, ignore_index=ignore_index, spread=spread, chunk=chunk)
        return ops.mixture_loss(
            self.components(hidden),
            self.log_prior(hidden),
            self.weight,
            targets,
            coefficients[:, ::3],
            bias=self.bias,
            sigsoftmax=self.sigsoftmax,
            ignore_index=ignore_index,
            spread=spread,
            chunk=chunk,
        )

    @property
    def alive_drawn(self) -> int:
        """Those of one softmax."""
        return 3 * self.out_features

    def draws(self, hidden: Float[Tensor, "n D"], noise: ops.Noise) -> Int[Tensor, " n"]:
        """The component first, then its one softmax."""
        chosen = ops.draw(self.log_prior(hidden), noise(0))
        if self.shared:
            one = self.components(hidden)[torch.arange(len(hidden), device=hidden.device), chosen]
            return ops.draw(self._component_log_prob(one[:, None])[:, 0], noise(1))
        tokens = torch.empty_like(chosen)
        for place in chosen.unique().tolist():
            rows = (chosen == place).nonzero().squeeze(1)
            log_prob = self._log_softmax(product(hidden[rows], self.weight[place]))
            tokens[rows] = ops.draw(log_prob, noise.at(rows)(1))
        return tokens

    def flops(self) -> int:
        """`K (D^2 + D V)` multiply-adds, and K D for the prior."""
        facets = self.in_features**2 if self.shared else 0
        return 2 * self.k * (facets + self.in_features * self.out_features + self.in_features)

    def _component_log_prob(self, components: Float[Tensor, "*n K D"]) -> Float[Tensor, "*n K V"]:
        if self.shared:
            return self._log_softmax(product(components, self.weight, self.bias))
        return self._log_softmax(torch.einsum("...kd,kvd->...kv", *alike(components, self.weight)))

    def _log_softmax(self, scores: Tensor) -> Tensor:
        scores = scores.to(ops.widened(scores.dtype))
        if self.sigsoftmax:
            scores = scores + nn.functional.logsigmoid(scores)
        return torch.log_softmax(scores, -1)

    @classmethod
    def from_linear(cls, linear: Any, *, k: int = 4, shared: bool = True) -> Self:
        """A mixture that starts as the linear head: its components are equal, its weights are not.

        A shared matrix needs facets that can be the identity, so `activation` is that.

        Args:
            linear: An `nn.Linear`, or a `Linear` head without soft-cap; its scale goes into weight and bias.
            k: Components.
            shared: As in `__init__`; with one matrix a component the linear head must have no bias.
        """
        weight, bias = start_of(linear, cls)
        if bias is not None and not shared:
            raise ValueError("One matrix a component has no bias, so it cannot start as this head; use shared=True.")
        head = cls(
            linear.in_features,
            linear.out_features,
            k=k,
            shared=shared,
            activation="identity",
            bias=bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        with torch.no_grad():
            head.weight.copy_(weight)
            if head.facets is not None and head.facet_bias is not None:
                head.facets.copy_(torch.eye(linear.in_features, dtype=weight.dtype, device=weight.device))
                head.facet_bias.zero_()
            if head.bias is not None and bias is not None:
                head.bias.copy_(bias)
        return head

    @classmethod
    def examples(cls, in_features: int, out_features: int) -> Sequence[Self]:
        """Shared and separate matrices, plain and with everything."""
        return [
            cls(in_features, out_features, k=3, bias=True),
            cls(in_features, out_features, k=2, shared=False),
            cls(in_features, out_features, k=2, activation="identity", sigsoftmax=True),
        ]
