"""Mixtape (Yang et al., 2019, "Mixtape: Breaking the Softmax Bottleneck Efficiently"): a mixture inside one softmax.

Shapes: n or * tokens, D hidden size, G gate size, V vocabulary, F frequent tokens, K = 4 components.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unembed import ops
from unembed.heads._base import Head, start_of, uniform_
from unembed.heads._product import product

_K, _NODES = 4, 3  # components, and the nodes of the tree whose leaves they are


def _reference(head: Mixtape, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
    """Scores as the formula has them, in float64, a token of the vocabulary at a time."""
    h = hidden.double()
    parts = [h @ matrix.double().T for matrix in head.facets]
    parts = [torch.tanh(part) for part in parts] if head.activation == "tanh" else parts
    shared = [h @ u.double() for u in head.gate_shared]
    inner = [torch.tanh(h @ matrix.double().T) for matrix in head.gate_hidden]
    columns = []
    for v in range(head.out_features):
        logits = shared
        if v < head.gated:
            own, shift = head.gate_weight[v].double(), head.gate_bias[v].double()
            logits = [inner[k] @ own + shared[k] + shift[k] for k in range(3)]
        g1, g2, g3 = (torch.sigmoid(logit) for logit in logits)
        shares = (g1 * g2, g1 * (1 - g2), (1 - g1) * g3, (1 - g1) * (1 - g3))
        products = [share * (part @ head.weight[v].double()) for share, part in zip(shares, parts, strict=True)]
        score = torch.stack(products).sum(0)
        columns.append(score if head.bias is None else score + head.bias[v].double())
    return torch.stack(columns, -1)


class Mixtape(Head):
    r"""$z_v = \sum_{k=1}^4 \pi_{k,v}\, (\tanh(H_k h) \cdot w_v) + b_v$, with gates $\pi$ that differ by token.

    The gates of a frequent token are the leaves of a tree of three sigmoids: $g_1 g_2$, $g_1 (1 - g_2)$,
    $(1 - g_1) g_3$, $(1 - g_1)(1 - g_3)$ with $g_k = \sigma(v_v \cdot \tanh(U_k h) + u_k \cdot h + b_{v,k})$. Rare
    tokens share $g_k = \sigma(u_k \cdot h)$, so all of them need one product, with $\sum_k \pi_k \tanh(H_k h)$.

    Parameters: `weight` [V, D], `facets` H [4, D, D], `gate_weight` v [F, G], `gate_bias` [F, 3], `gate_hidden` U
    [3, G, D], `gate_shared` u [3, D].

    Args:
        in_features: D.
        out_features: V.
        gated: F, tokens with gates of their own: ids 0 to F - 1, so ids should go from frequent to rare. A tenth of
            V when None, at least 1; 0 and V are possible.
        gate_features: G; D but at most 64 when None.
        activation: Of the facets $H_k h$; `identity` can start as a linear head.
        bias: Whether to add one number a class.
        device: Where the parameters are.
        dtype: Of the parameters.
    """

    names = ("mixtape",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        gated: int | None = None,
        gate_features: int | None = None,
        activation: Literal["tanh", "identity"] = "tanh",
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        self.gated = max(1, out_features // 10) if gated is None else gated
        self.gate_features = min(in_features, 64) if gate_features is None else gate_features
        if not 0 <= self.gated <= out_features:
            raise ValueError(f"`gated` must lie in [0, {out_features}], got {gated}.")
        if self.gate_features < 1:
            raise ValueError(f"`gate_features` must be at least 1, got {gate_features}.")
        if activation not in ("tanh", "identity"):
            raise ValueError(f"`activation` must be tanh or identity, got {activation!r}.")
        self.activation = activation
        like = {"device": device, "dtype": dtype}
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **like))
        self.facets = nn.Parameter(torch.empty(_K, in_features, in_features, **like))
        self.gate_weight = nn.Parameter(torch.empty(self.gated, self.gate_features, **like))
        self.gate_bias = nn.Parameter(torch.empty(self.gated, _NODES, **like))
        self.gate_hidden = nn.Parameter(torch.empty(_NODES, self.gate_features, in_features, **like))
        self.gate_shared = nn.Parameter(torch.empty(_NODES, in_features, **like))
        self.bias = nn.Parameter(torch.empty(out_features, **like)) if bias else None
        self.reset_parameters()

    def options(self) -> dict[str, Any]:
        """As given to `__init__`."""
        options = {"gated": self.gated, "gate_features": self.gate_features, "activation": self.activation}
        return {**options, "bias": self.bias is not None}

    def reset_parameters(self) -> None:
        """Draw all as `nn.Linear` does."""
        for name, parameter in self.named_parameters():
            of_gates = name in ("gate_weight", "gate_bias")
            uniform_(parameter, self.gate_features if of_gates else self.in_features)

    @property
    def alive(self) -> int:
        """A score a class; for a frequent one K products and shares, and the logits and sigmoids of the tree."""
        return 2 * self.out_features + (2 * _K + 3 * _NODES) * self.gated

    def flops(self) -> int:
        """`D (V + 3 F) + 4 D^2` multiply-adds, `3 G (D + F)` and 3 D for the gates."""
        wide, gate, gated = self.in_features, self.gate_features, self.gated
        products = wide * (self.out_features + (_K - 1) * gated) + _K * wide**2
        return 2 * (products + _NODES * (gate * (wide + gated) + wide))

    def forward(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Scores, float32 or wider."""
        components = self._split(hidden, self.facets)
        components = torch.tanh(components) if self.activation == "tanh" else components
        common = _wide(product(hidden, self.gate_shared))
        frequent = self._frequent(hidden, components, common)
        mixed = (_shares(common)[..., None] * components).sum(-2).to(components.dtype)
        rare = _wide(product(mixed, self.weight[self.gated :]))
        scores = torch.cat([frequent, rare], dim=-1)
        return scores if self.bias is None else scores + self.bias

    def _frequent(self, hidden: Tensor, components: Tensor, common: Tensor) -> Float[Tensor, "*n F"]:
        inner = torch.tanh(self._split(hidden, self.gate_hidden))
        logits = _wide(product(inner, self.gate_weight)) + common[..., None] + self.gate_bias.T
        products = _wide(product(components, self.weight[: self.gated]))
        shares = _shares(logits.movedim(-2, -1)).movedim(-1, -2)
        return (shares * products).sum(-2)

    @staticmethod
    def _split(hidden: Tensor, matrices: Float[Tensor, "k m D"]) -> Float[Tensor, "*n k m"]:
        return product(hidden, matrices.flatten(0, 1)).unflatten(-1, tuple(matrices.shape[:2]))

    @classmethod
    def from_linear(cls, linear: Any, *, gated: int | None = None, gate_features: int | None = None) -> Self:
        """A head that starts as the linear head, exactly: facets that are the identity, whatever the gates.

        A facet can be the identity only without tanh, so `activation` is `identity`. The gates are drawn, so the
        facets part as soon as they learn.

        Args:
            linear: An `nn.Linear`, or a `Linear` head without soft-cap; its scale goes into weight and bias.
            gated: As in `__init__`.
            gate_features: As in `__init__`.

        Raises:
            ValueError: If the linear head has a soft-cap.
        """
        weight, bias = start_of(linear, cls)
        head = cls(
            linear.in_features,
            linear.out_features,
            gated=gated,
            gate_features=gate_features,
            activation="identity",
            bias=bias is not None,
            device=weight.device,
            dtype=weight.dtype,
        )
        with torch.no_grad():
            head.weight.copy_(weight)
            head.facets.copy_(torch.eye(linear.in_features, dtype=weight.dtype, device=weight.device))
            if head.bias is not None and bias is not None:
                head.bias.copy_(bias)
        return head

    @classmethod
    def examples(cls, in_features: int, out_features: int) -> Sequence[Self]:
        """Some gated; all gated; none gated, with a bias and no tanh."""
        return [
            cls(in_features, out_features, gated=(out_features + 1) // 2, gate_features=2),
            cls(in_features, out_features, gated=out_features),
            cls(in_features, out_features, gated=0, activation="identity", bias=True),
        ]


def _wide(scores: Tensor) -> Tensor:
    return scores.to(ops.widened(scores.dtype))


def _shares(logits: Float[Tensor, "*n 3"]) -> Float[Tensor, "*n 4"]:
    """Leaves of the tree, which sum to 1; `1 - g` is a sigmoid too, so that it keeps its digits near 0."""
    (g1, g2, g3), (not1, not2, not3) = torch.sigmoid(logits).unbind(-1), torch.sigmoid(-logits).unbind(-1)
    return torch.stack([g1 * g2, g1 * not2, not1 * g3, not1 * not3], dim=-1)
