"""A small Llama body with Hugging Face's names and numbers, so what it saves loads in transformers unchanged.

Shapes: B sequences, T positions, D hidden size, V vocabulary, H query heads, K key and value heads, C head size.
The scheme is Llama's (Touvron et al., 2023, arXiv:2302.13971): RMSNorm before each part, rotary positions, SwiGLU.
"""

import json
import math
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Float, Int
from safetensors.torch import load_file, save
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention, silu

from unembed.results import InputError, write_whole


@dataclass(frozen=True)
class LlamaConfig:
    """The sizes of a `Llama`; the names and the meaning are transformers'.

    Attributes:
        num_key_value_heads: Heads that keys and values have; as many as queries when None.
        max_position_embeddings: Positions the model is trained for. Written to the folder, not enforced.
        bos_token_id: First token of a document; `eos_token_id` is its end. Both are only written to the folder.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int | None = None
    max_position_embeddings: int = 256
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    bos_token_id: int = 0
    eos_token_id: int = 0

    def __post_init__(self) -> None:
        """Refuse sizes that do not divide.

        Raises:
            ValueError: If the heads do not divide the hidden size evenly, or key heads the query heads.
        """
        if self.hidden_size % (2 * self.num_attention_heads):
            raise ValueError(
                f"`hidden_size` must be an even multiple of `num_attention_heads`, "
                f"got {self.hidden_size} and {self.num_attention_heads}."
            )
        if self.num_attention_heads % self.key_value_heads:
            raise ValueError(
                f"`num_attention_heads` must be a multiple of `num_key_value_heads`, "
                f"got {self.num_attention_heads} and {self.num_key_value_heads}."
            )

    @property
    def head_dim(self) -> int:
        """Size of one head."""
        return self.hidden_size // self.num_attention_heads

    @property
    def key_value_heads(self) -> int:
        """Heads of keys and values, with the default filled in."""
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads


class _RMSNorm(nn.Module):
    """Divides by the root mean square. In float32 whatever comes in, float64 too, because transformers does."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B D"]:
        wide = hidden.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(hidden.dtype)


class _Attention(nn.Module):
    """Causal attention with rotary positions and, optionally, fewer key heads than query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        inner = config.key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, inner, bias=False)
        self.o_proj = nn.Linear(config.hidden_size, config.hidden_size, bias=False)

    def forward(
        self, hidden: Float[Tensor, "B T D"], cos: Float[Tensor, "T C"], sin: Float[Tensor, "T C"]
    ) -> Float[Tensor, "B T D"]:
        query, key, value = (
            part(hidden).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for part in (self.q_proj, self.k_proj, self.v_proj)
        )
        repeats = query.shape[1] // key.shape[1]
        mixed = scaled_dot_product_attention(
            _rotate(query, cos, sin),
            _rotate(key, cos, sin).repeat_interleave(repeats, dim=1),
            value.repeat_interleave(repeats, dim=1),
            is_causal=True,
        )
        return self.o_proj(mixed.transpose(1, 2).flatten(2))


class _MLP(nn.Module):
    """SwiGLU (Shazeer, 2020, arXiv:2002.05202)."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.down_proj(silu(self.gate_proj(hidden)) * self.up_proj(hidden))


class _Layer(nn.Module):
    """Attention, then the MLP, each on a normalised copy and added back."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.self_attn = _Attention(config)
        self.mlp = _MLP(config)
        self.input_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self, hidden: Float[Tensor, "B T D"], cos: Float[Tensor, "T C"], sin: Float[Tensor, "T C"]
    ) -> Float[Tensor, "B T D"]:
        hidden = hidden + self.self_attn(self.input_layernorm(hidden), cos, sin)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))


class _Body(nn.Module):
    """Embedding, layers and final norm: what transformers keeps under the name `model`."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Layer(config) for _ in range(config.num_hidden_layers))
        self.norm = _RMSNorm(config.hidden_size, config.rms_norm_eps)


class Llama(nn.Module):
    """A Llama whose unembedding is its embedding.

    `state_dict` has the names of transformers' `LlamaForCausalLM` with `tie_word_embeddings`.

    Args:
        config: The sizes.
        generator: Source of the initial weights: normal, deviation 0.02, and 0.02 / sqrt(2 layers) for the two
            projections that add to the residual stream (Radford et al., 2019).
    """

    def __init__(self, config: LlamaConfig, *, generator: torch.Generator | None = None) -> None:
        super().__init__()
        self.config = config
        self.model = _Body(config)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                residual = name.endswith(("o_proj.weight", "down_proj.weight"))
                scale = 1 / math.sqrt(2 * config.num_hidden_layers) if residual else 1.0
                nn.init.normal_(weight, std=0.02 * scale, generator=generator)

    def forward(self, ids: Int[Tensor, "B T"]) -> Float[Tensor, "B T D"]:
        """Hidden states after the final norm; position t has seen `ids[:, : t + 1]`."""
        hidden = self.model.embed_tokens(ids)
        cos, sin = _rotary(ids.shape[1], self.config, device=ids.device)
        cos, sin = cos.to(hidden.dtype), sin.to(hidden.dtype)
        for layer in self.model.layers:
            hidden = layer(hidden, cos, sin)
        return self.model.norm(hidden)

    def scores(self, hidden: Float[Tensor, "*B D"]) -> Float[Tensor, "*B V"]:
        """Scores of the next token, not normalised: the inner products with every row of the embedding."""
        return linear(hidden, self.model.embed_tokens.weight)


def _rotary(
    length: int, config: LlamaConfig, *, device: torch.device
) -> tuple[Float[Tensor, "T C"], Float[Tensor, "T C"]]:
    """Cosines and sines of the rotary positions (Su et al., 2021, arXiv:2104.09864), float32, halves repeated."""
    exponent = torch.arange(0, config.head_dim, 2, device=device).float() / config.head_dim
    angles = torch.arange(length, device=device).float()[:, None] * (1.0 / config.rope_theta**exponent)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(
    x: Float[Tensor, "B H T C"], cos: Float[Tensor, "T C"], sin: Float[Tensor, "T C"]
) -> Float[Tensor, "B H T C"]:
    """Turn each pair (c, c + C/2) by its position's angle."""
    low, high = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-high, low), dim=-1) * sin


def save_llama(model: Llama, folder: str | Path) -> None:
    """Write `config.json` and `model.safetensors`, which `AutoModelForCausalLM.from_pretrained` loads.

    Each file is written under a temporary name and renamed, so that a reader never meets half a file.

    Args:
        model: The model; its weights are stored in the type they have.
        folder: Where to write; made if absent. Files of the same names are replaced.
    """
    folder = Path(folder)
    weights = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    with write_whole(folder / "model.safetensors", "wb") as file:
        file.write(save(weights, metadata={"format": "pt"}))
    with write_whole(folder / "config.json") as file:
        file.write(json.dumps(_hf_config(model), indent=2) + "\n")


def _hf_config(model: Llama) -> dict[str, object]:
    """The `config.json` of transformers for this model."""
    c = model.config
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": c.bos_token_id,
        "dtype": str(model.model.embed_tokens.weight.dtype).removeprefix("torch."),
        "eos_token_id": c.eos_token_id,
        "head_dim": c.head_dim,
        "hidden_act": "silu",
        "hidden_size": c.hidden_size,
        "initializer_range": 0.02,
        "intermediate_size": c.intermediate_size,
        "max_position_embeddings": c.max_position_embeddings,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": c.num_attention_heads,
        "num_hidden_layers": c.num_hidden_layers,
        "num_key_value_heads": c.key_value_heads,
        "rms_norm_eps": c.rms_norm_eps,
        "rope_parameters": {"rope_theta": c.rope_theta, "rope_type": "default"},
        "tie_word_embeddings": True,
        "vocab_size": c.vocab_size,
    }


def load_llama(folder: str | Path) -> Llama:
    """Read a folder that `save_llama` wrote; the weights keep their type.

    Raises:
        FileNotFoundError: If one of the two files is absent.
        InputError: If `config.json` is not of a Llama with tied embeddings.
    """
    folder = Path(folder)
    hf = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if hf.get("model_type") != "llama" or not hf.get("tie_word_embeddings"):
        raise InputError(
            f"{folder / 'config.json'}: expected `model_type` llama with `tie_word_embeddings` true, "
            f"got {hf.get('model_type')!r} and {hf.get('tie_word_embeddings')!r}."
        )
    fields = {name: hf[name] for name in LlamaConfig.__dataclass_fields__ if name in hf}
    model = Llama(LlamaConfig(**fields, rope_theta=hf["rope_parameters"]["rope_theta"]))
    model.load_state_dict(load_file(folder / "model.safetensors"), assign=True)
    return model
