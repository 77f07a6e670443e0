"""What multi-token prediction puts between a hidden state and the unembedding: a transformer block a further token.

Shapes: T positions, D hidden size, F width of the MLP.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from unembed.heads._base import uniform_
from unembed.heads._product import alike, product

_EPSILON = 1e-6


def block_reference(
    block: nn.Module, state: Float[Tensor, "B T D"], token: Float[Tensor, "B T D"]
) -> tuple[Float[Tensor, "B T D"], Float[Tensor, "B T D"]]:
    """What a block means, in float64: the next state, and what the unembedding reads of it."""
    assert isinstance(block, SequentialBlock)
    own = {name: parameter.double() for name, parameter in block.named_parameters()}

    def norm(x: Tensor, gain: Tensor) -> Tensor:
        return gain * x / (x.square().mean(-1, keepdim=True) + _EPSILON).sqrt()

    state = torch.cat([norm(state, own["norm_state"]), norm(token, own["norm_token"])], -1) @ own["joined"].T
    together = norm(state, own["norm_attention"]) @ own["queries_keys_values"].T
    mixed = []
    heads = [part.chunk(block.attention_heads, -1) for part in together.chunk(3, -1)]
    for query, key, value in zip(*heads, strict=True):
        later = torch.ones(query.shape[1], query.shape[1], dtype=torch.bool, device=query.device).triu(1)
        weights = query @ key.mT / math.sqrt(query.shape[-1])
        mixed.append(weights.masked_fill(later, -torch.inf).softmax(-1) @ value)
    state = state + torch.cat(mixed, -1) @ own["attended"].T
    up, gate = (norm(state, own["norm_mlp"]) @ own["up_gate"].T).chunk(2, -1)
    state = state + (nn.functional.silu(up) * gate) @ own["down"].T
    return state, norm(state, own["norm_out"])


class SequentialBlock(nn.Module):
    r"""$h^k = \mathrm{Block}(M [\mathrm{norm}(h^{k-1});\ \mathrm{norm}(e)])$ (DeepSeek-V3, 2024, arXiv:2412.19437).

    The block is pre-norm: causal attention, then a gated MLP $D (\mathrm{silu}(U x) * G x)$, each with a residual. It
    has no positional encoding of its own: the hidden states it reads carry the model's.

    Args:
        in_features: D.
        width: F.
        attention_heads: Heads of the attention.
        device: Where the parameters are.
        dtype: Of the parameters.
    """

    def __init__(
        self,
        in_features: int,
        *,
        width: int,
        attention_heads: int,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attention_heads = attention_heads
        like = {"device": device, "dtype": dtype}
        self.norm_state = nn.Parameter(torch.empty(in_features, **like))
        self.norm_token = nn.Parameter(torch.empty(in_features, **like))
        self.joined = nn.Parameter(torch.empty(in_features, 2 * in_features, **like))
        self.norm_attention = nn.Parameter(torch.empty(in_features, **like))
        self.queries_keys_values = nn.Parameter(torch.empty(3 * in_features, in_features, **like))
        self.attended = nn.Parameter(torch.empty(in_features, in_features, **like))
        self.norm_mlp = nn.Parameter(torch.empty(in_features, **like))
        self.up_gate = nn.Parameter(torch.empty(2 * width, in_features, **like))
        self.down = nn.Parameter(torch.empty(in_features, width, **like))
        self.norm_out = nn.Parameter(torch.empty(in_features, **like))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Matrices as `nn.Linear` draws them, gains of the norms one."""
        for parameter in self.parameters():
            if parameter.ndim == 1:
                nn.init.ones_(parameter)
            else:
                uniform_(parameter, parameter.shape[1])

    def forward(self, state: Float[Tensor, "*B T D"], token: Float[Tensor, "*B T D"]) -> Float[Tensor, "*B T D"]:
        """The state of the next depth, from that of the one before and the embedding of the token it now knows."""
        both = torch.cat([normalised(state, self.norm_state), normalised(token, self.norm_token)], dim=-1)
        state = product(both, self.joined)
        state = state + self._attention(normalised(state, self.norm_attention))
        up, gate = product(normalised(state, self.norm_mlp), self.up_gate).chunk(2, dim=-1)
        return state + product(nn.functional.silu(up) * gate, self.down)

    def _attention(self, state: Float[Tensor, "*B T D"]) -> Float[Tensor, "*B T D"]:
        together = product(state, self.queries_keys_values)
        split = together.unflatten(-1, (3, self.attention_heads, -1)).transpose(-4, -2)  # heads, 3, T
        queries, keys, values = split.unbind(-3)
        mixed = nn.functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return product(mixed.transpose(-3, -2).flatten(-2), self.attended)


def normalised(state: Float[Tensor, "*n D"], gain: Float[Tensor, " D"]) -> Float[Tensor, "*n D"]:
    """RMSNorm, in the dtype of a product of the two."""
    state, gain = alike(state, gain)
    return nn.functional.rms_norm(state, gain.shape, gain, _EPSILON)
