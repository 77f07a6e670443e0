"""Multi-facet softmax (Chang and McCallum, 2022, ACL long 554): facets read a block of recent states and layers.

Shapes: T positions, n or * tokens, L layers, K facets, J partitions, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unembed import ops
from unembed.heads._base import Head, start_of, uniform_
from unembed.heads._facets import block_input, split_nll, split_scores
from unembed.heads._product import log_softmax, product


def _reference(head: MultiFacet, hidden: Tensor) -> Float[Tensor, "B T V"]:
    """What the head means: log-probabilities in float64, position by position."""
    batch, length = hidden.shape[:2]
    wide = {name: parameter.double() for name, parameter in head.named_parameters()}
    states, rows = hidden.double(), []
    for place in range(batch * length):
        b, t = divmod(place, length)
        total = wide["block_bias"]
        for back in range(min(head.window, t + 1)):
            for layer in range(head.layers):
                total = total + wide["block"][:, back, layer] @ states[b, t - back, layer]
        read = torch.cat([states[b, t, -1], nn.functional.gelu(total)])
        prior = (wide["prior"] @ read + wide["prior_bias"]).softmax(0)
        facets = wide["facets"] @ read + wide["facet_bias"]
        of_token = [facets[token % head.partitions] for token in range(head.out_features)]
        bias = wide.get("bias", 0.0)
        split = (wide["weight"] * torch.stack(of_token)).sum(1) + bias
        others = [wide["weight"] @ facet + bias for facet in facets[head.partitions :]]
        parts = [scores.softmax(0) for scores in (split, *others)]
        rows.append((prior[:, None] * torch.stack(parts)).sum(0).log())
    return torch.stack(rows).view(batch, length, -1) if rows else states.new_zeros(batch, length, head.out_features)


class MultiFacet(Head):
    r"""A mixture of softmaxes over $f_k(q_t) = F_k q_t + f_k$, with $q_t$ from a block of hidden states.

    $$p = \sum_k \pi_k\, \mathrm{softmax}(W f_k + b), \qquad \pi = \mathrm{softmax}(\Pi q_t + c), \qquad
      q_t = \Big[h_t^L;\ \mathrm{gelu}\big(\sum_{w<W}\sum_l B_{wl} h_{t-w}^l + d\big)\Big]$$

    Takes `hidden` [*, T, L, D], sequences with the last layer last; position t reads t - W + 1 to t, zeros before the
    start. Facet 0 has J projections and scores token v with projection `v mod J`; its softmax runs over all V.

    `flattened` gives $q$ [n, 2D] of all tokens, and every method takes that in the place of `hidden`: tokens have lost
    their neighbours there, but need them no more. In a row of packed documents the block reaches back into the one
    before, unless $q$ is made with `document_ids`; `losses` with `document_ids` do so. Losses under J > 1 take
    differences of normalisers, so scores far from zero cost digits: a bias of 1e8 on all classes would.

    Args:
        in_features: D, of every layer.
        out_features: V.
        k: Facets.
        window: W, the positions read.
        layers: L, the layers given.
        partitions: J, the projections of facet 0.
        bias: Whether the shared matrix has a bias b.
        device: Where the parameters are.
        dtype: Of the parameters.
    """

    names = ("multi_facet",)
    normalised = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        k: int = 3,
        window: int = 3,
        layers: int = 3,
        partitions: int = 1,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        for name, value in (("k", k), ("window", window), ("layers", layers), ("partitions", partitions)):
            if value < 1:
                raise ValueError(f"`{name}` must be at least 1, got {value}.")
        if partitions > out_features:
            raise ValueError(f"`partitions` must be at most {out_features}, the classes; got {partitions}.")
        self.k, self.window, self.layers, self.partitions = k, window, layers, partitions
        like, width, rows = {"device": device, "dtype": dtype}, 2 * in_features, k - 1 + partitions
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **like))
        self.block = nn.Parameter(torch.empty(in_features, window, layers, in_features, **like))
        self.block_bias = nn.Parameter(torch.empty(in_features, **like))
        self.facets = nn.Parameter(torch.empty(rows, in_features, width, **like))
        self.facet_bias = nn.Parameter(torch.empty(rows, in_features, **like))
        self.prior = nn.Parameter(torch.empty(k, width, **like))
        self.prior_bias = nn.Parameter(torch.empty(k, **like))
        self.bias = nn.Parameter(torch.empty(out_features, **like)) if bias else None
        self.reset_parameters()

    def options(self) -> dict[str, Any]:
        """As given to `__init__`."""
        names = ("k", "window", "layers", "partitions")
        return {**{name: getattr(self, name) for name in names}, "bias": self.bias is not None}

    def reset_parameters(self) -> None:
        """Draw all as `nn.Linear` does, each from the size of what it reads."""
        of_block = self.window * self.layers * self.in_features
        reads = {"weight": self.in_features, "bias": self.in_features, "block": of_block, "block_bias": of_block}
        for name, parameter in self.named_parameters():
            uniform_(parameter, reads.get(name, 2 * self.in_features))

    @property
    def rank_bound(self) -> int | None:
        """None; with one facet the scores are linear in J D numbers, and those in 2 D + 1: the smaller, and one more.

        A bias of the matrix adds one to the first.
        """
        bound = min(self.partitions * self.in_features + 1 + (self.bias is not None), 2 * self.in_features + 2)
        return min(bound, self.out_features) if self.k == 1 else None

    @property
    def alive(self) -> int:
        """K scores a class."""
        return self.k * self.out_features

    def example_hidden(self, shape: tuple[int, ...]) -> Tensor:
        """Random hidden states of all layers for tokens of a shape, float64; a row of tokens is as many sequences.

        Raises:
            NotImplementedError: For a single token, which is no sequence.
        """
        if not shape:
            raise NotImplementedError("the head reads sequences")
        tokens = (*shape, 1) if len(shape) == 1 else shape
        return 2 * torch.randn(*tokens, self.layers, self.in_features, dtype=torch.float64)

    def hidden_shape(self, hidden: Tensor) -> tuple[int, ...]:
        """Layers and hidden size; of what `flattened` gives, its last dimension.

        Raises:
            ValueError: If `hidden` is neither.
        """
        shape, raw = tuple(hidden.shape), (self.layers, self.in_features)
        if hidden.ndim == 2 and shape[1] == 2 * self.in_features:
            return shape[1:]
        if hidden.ndim < 3 or shape[-2:] != raw:
            raise ValueError(f"Expected `hidden` [*, T, {raw[0]}, {raw[1]}], got {shape}.")
        return raw

    def features(self, hidden: Tensor, *, document_ids: Tensor | None = None) -> Float[Tensor, "*n 2*D"]:
        """What facets and prior of each token read: q, of its own document where `document_ids` [*, T] are given."""
        if len(self.hidden_shape(hidden)) == 1:
            return hidden
        return block_input(hidden, self.block, self.block_bias, document_ids=document_ids)

    def flattened(
        self, hidden: Tensor, targets: Tensor, *, document_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor, tuple[int, ...]]:
        """What each token reads and its target, with one token dimension, and the shape that was.

        Raises:
            ValueError: If the shapes do not fit.
        """
        shape = self.tokens_shape(hidden)
        if tuple(targets.shape) != shape:
            raise ValueError(f"Expected `targets` {shape} like the tokens of `hidden`, got {tuple(targets.shape)}.")
        features = self.features(hidden, document_ids=document_ids)
        return features.reshape(-1, 2 * self.in_features), targets.reshape(-1).long(), shape

    def components(self, features: Float[Tensor, "*n 2*D"]) -> Float[Tensor, "*n J+K-1 D"]:
        """The projections of facet 0, then the other facets."""
        turned = product(features, self.facets.flatten(0, 1))
        return turned.unflatten(-1, (-1, self.in_features)) + self.facet_bias

    def log_prior(self, features: Float[Tensor, "*n 2*D"]) -> Float[Tensor, "*n K"]:
        """Log of the facet weights, float32 or wider."""
        return log_softmax(product(features, self.prior, self.prior_bias))

    def forward(self, hidden: Float[Tensor, "*B T L D"]) -> Float[Tensor, "*B T V"]:
        """Log-probabilities, float32 or wider."""
        features = self.features(hidden)
        components = self.components(features)
        split = split_scores(components[..., : self.partitions, :], self.weight, self.bias)
        others = product(components[..., self.partitions :, :], self.weight, self.bias)
        parts = log_softmax(torch.cat([split[..., None, :], others], dim=-2))
        return ops.logsumexp(self.log_prior(features)[..., None] + parts, dim=-2)

    def terms(
        self,
        hidden: Float[Tensor, "*B T L D"],
        targets: Int[Tensor, "*B T"],
        *,
        ignore_index: int = -100,
        spread: Float[Tensor, " V"] | None = None,
        chunk: int | None = None,
    ) -> tuple[Float[Tensor, "*B T"], ...]:
        """From K linear losses a token; a sum over all classes needs all log-probabilities of a chunk."""
        features, flat, shape = self.flattened(hidden, targets)
        if spread is not None:
            found = super().terms(features, flat, ignore_index=ignore_index, spread=spread, chunk=chunk)
            return tuple(part.reshape(shape) for part in found)
        ops.check_targets(flat, self.out_features, ignore_index)
        components, log_prior, first = self.components(features), self.log_prior(features), self.partitions
        if first == 1:
            nll = ops.mixture_nll(
                components,
                log_prior,
                self.weight,
                flat,
                bias=self.bias,
                ignore_index=ignore_index,
                chunk=chunk,
            )
        else:
            options: dict[str, Any] = {"bias": self.bias, "ignore_index": ignore_index, "chunk": chunk}
            split = split_nll(components[:, :first], self.weight, flat, **options)
            repeated = flat[:, None].expand(-1, self.k - 1)
            others = ops.linear_terms(components[:, first:], self.weight, repeated, **options)[0]
            nll = ops.combined(log_prior, torch.cat([split[:, None], others], dim=1), flat != ignore_index)
        nll = nll.reshape(shape)
        return nll, torch.zeros_like(nll)

    def loss(
        self,
        hidden: Float[Tensor, "n 2*D"],
        targets: Int[Tensor, " n"],
        coefficients: Float[Tensor, "n 4"],
        *,
        ignore_index: int = -100,
        spread: Float[Tensor, " V"] | None = None,
        chunk: int | None = None,
    ) -> Float[Tensor, ""]:
        """Three products with one partition, gradients included; four with more."""
        features, targets, _ = self.flattened(hidden, targets)
        if self.partitions > 1:
            return super().loss(features, targets, coefficients, ignore_index=ignore_index, spread=spread, chunk=chunk)
        return ops.mixture_loss(
            self.components(features),
            self.log_prior(features),
            self.weight,
            targets,
            coefficients[:, ::3],
            bias=self.bias,
            ignore_index=ignore_index,
            spread=spread,
            chunk=chunk,
        )

    @torch.no_grad()
    def topk(self, hidden: Float[Tensor, "*B T L D"], k: int) -> tuple[Tensor, Tensor]:
        """The k largest log-probabilities and their tokens, exact."""
        shape = self.tokens_shape(hidden)
        values, indices = super().topk(self.features(hidden).reshape(-1, 2 * self.in_features), k)
        return values.reshape(*shape, k), indices.reshape(*shape, k)

    @torch.no_grad()
    def sample(
        self,
        hidden: Float[Tensor, "*B T L D"],
        *,
        generator: torch.Generator | None = None,
        seeds: ops.Numbers | None = None,
        positions: ops.Numbers | None = None,
    ) -> Int[Tensor, "*B T"]:
        """One exact draw a token, never one of probability 0; options as those of every head."""
        features = self.features(hidden).reshape(-1, 2 * self.in_features)
        drawn = super().sample(features, generator=generator, seeds=seeds, positions=positions)
        return drawn.reshape(self.tokens_shape(hidden))

    @property
    def alive_drawn(self) -> int:
        """Those of one softmax."""
        return 3 * self.out_features

    def draws(self, hidden: Float[Tensor, "n 2*D"], noise: ops.Noise) -> Int[Tensor, " n"]:
        """The facet first, then its one softmax."""
        chosen, components = ops.draw(self.log_prior(hidden), noise(0)), self.components(hidden)
        first, split = self.partitions, chosen == 0
        scores = product(components[~split, first - 1 + chosen[~split]], self.weight, self.bias)
        tokens = torch.zeros_like(chosen)
        parts = (split, split_scores(components[split, :first], self.weight, self.bias)), (~split, scores)
        for rows, own in parts:
            tokens[rows] = ops.draw(log_softmax(own), noise.at(rows.nonzero().squeeze(1))(1))
        return tokens

    def flops(self) -> int:
        """`W L D^2 + 2 (J + K - 1) D^2 + K D V` multiply-adds, and 2 K D for the prior."""
        width = self.in_features
        features = self.window * self.layers * width**2 + 2 * (self.partitions + self.k - 1) * width**2
        return 2 * (features + self.k * width * (self.out_features + 2))

    @classmethod
    def from_linear(cls, linear: Any, *, k: int = 3, window: int = 3, layers: int = 3, partitions: int = 1) -> Self:
        """A head that starts as `linear` on the last layer: every facet copies $h_t^L$ and leaves the block alone.

        Args:
            linear: An `nn.Linear`, or a `Linear` head without soft-cap; its scale goes into weight and bias.
            k: Facets.
            window: Positions read.
            layers: Layers given.
            partitions: Projections of facet 0.
        """
        weight, bias = start_of(linear, cls)
        sizes = (linear.in_features, linear.out_features)
        options: dict[str, Any] = {"k": k, "window": window, "layers": layers, "partitions": partitions}
        head = cls(*sizes, **options, bias=bias is not None, device=weight.device, dtype=weight.dtype)
        with torch.no_grad():
            head.weight.copy_(weight)
            head.facets.zero_()[..., : sizes[0]] = torch.eye(sizes[0], dtype=weight.dtype, device=weight.device)
            head.facet_bias.zero_()
            if head.bias is not None and bias is not None:
                head.bias.copy_(bias)
        return head

    @classmethod
    def examples(cls, in_features: int, out_features: int) -> Sequence[Self]:
        """One matrix for all classes, a split vocabulary, and a split vocabulary alone."""
        split = min(2, out_features)
        return [
            cls(in_features, out_features, k=2, window=2, layers=2),
            cls(in_features, out_features, k=3, window=1, layers=1, partitions=split, bias=True),
            cls(in_features, out_features, k=1, window=3, layers=2, partitions=min(3, out_features)),
        ]
