"""Multi-token prediction: n losses a position over one unembedding, one offset's scores alive at a time.

Shapes: n or * tokens, T positions, D hidden size, V vocabulary; offset i, from 0, is the token i + 1 ahead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from unembed import ops
from unembed.heads._base import Head, start_of, uniform_
from unembed.heads._offsets import SequentialBlock, block_reference, normalised
from unembed.heads._product import product


def _reference(
    head: MultiTokenPrediction,
    hidden: Float[Tensor, "B T D"],
    targets: Int[Tensor, "B T n"],
    *,
    ignore_index: int = -100,
) -> Float[Tensor, "B T n"]:
    """What `nll` means, in float64 with all scores at once."""
    wide = {name: parameter.double() for name, parameter in head.named_parameters()}
    state, losses = hidden.double(), []
    for offset in range(head.n):
        if head.mode == "parallel":
            up, down = wide["up"][offset], wide["down"][offset]
            read = state + nn.functional.silu(state @ up.T) @ down.T
        elif offset == 0:
            read = state
        else:
            known = targets[..., offset - 1, None] != ignore_index
            table = wide.get("embedding", wide["weight"])
            token = torch.where(known, table[targets[..., offset - 1].clamp(min=0)], 0.0)
            state, read = block_reference(head.blocks[offset - 1], state, token)
        scores = read @ wide["weight"].T + wide.get("bias", 0.0)
        chosen = targets[..., offset]
        each = -scores.log_softmax(-1).gather(-1, chosen.clamp(min=0)[..., None]).squeeze(-1)
        losses.append(torch.where(chosen == ignore_index, 0.0, each))
    return torch.stack(losses, -1)


class MultiTokenPrediction(Head):
    r"""Predicts the next n tokens of a position from its hidden state; `forward` is the head of the next one.

    - `parallel` (Gloeckle et al., 2024, arXiv:2404.19737): $z^i = W\,(h + B_i\, \mathrm{silu}(A_i h)) + b$. The paper's
      trunks are transformer layers; these read one position only, so `hidden` is any [*, D].
    - `sequential` (DeepSeek-V3, 2024, arXiv:2412.19437): $z^0 = W h^0 + b$ with $h^0 = h$, and
      $h^k = \mathrm{Block}_k(M_k [\mathrm{norm}(h^{k-1});\ \mathrm{norm}(E x_{t+k})])$ gives the scores
      $z^k = W\,\mathrm{norm}(h^k) + b$ of $x_{t+k+1}$; `hidden` is [*, T, D]. What $x_{t+k}$ is, the targets say: an
      ignored one counts as a zero embedding (see `inputs`). Attention does not know documents.

    Every function of `Head` (`losses.cross_entropy` too) treats it as the linear head of the next token; `nll` takes
    targets of all offsets also, and `joint_loss` is the training loss.

    PyTorch's fused attention has no second derivative: take those of `sequential` within
    `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.

    Args:
        in_features: D.
        out_features: V.
        n: Tokens predicted.
        mode: How the offsets get their hidden states.
        width: Of each trunk, or of the MLP of each block; 2 D when None.
        attention_heads: Of each block; one for every 64 of D, as far as that divides D, when None.
        offset_weights: $w_i$ of `joint_loss`; ones when None.
        bias: Whether the unembedding has a bias b.
        tied: Whether E is `weight`; else it is the parameter `embedding`, to which the model's own can be assigned.
        device: Where the parameters are.
        dtype: Of the parameters.
    """

    names = ("mtp",)

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        n: int = 4,
        mode: Literal["parallel", "sequential"] = "parallel",
        width: int | None = None,
        attention_heads: int | None = None,
        offset_weights: Sequence[float] | None = None,
        bias: bool = False,
        tied: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features)
        self.n, self.mode, self.tied = n, mode, tied
        self.width = 2 * in_features if width is None else width
        fitting = math.gcd(in_features, max(1, in_features // 64))
        self.attention_heads = fitting if attention_heads is None else attention_heads
        self.offset_weights = [1.0] * n if offset_weights is None else [float(one) for one in offset_weights]
        self._check_options()
        like, sequential = {"device": device, "dtype": dtype}, mode == "sequential"
        self.weight = nn.Parameter(torch.empty(out_features, in_features, **like))
        self.bias = nn.Parameter(torch.empty(out_features, **like)) if bias else None
        own = sequential and not tied
        self.embedding = nn.Parameter(torch.empty(out_features, in_features, **like)) if own else None
        self.up = None if sequential else nn.Parameter(torch.empty(n, self.width, in_features, **like))
        self.down = None if sequential else nn.Parameter(torch.empty(n, in_features, self.width, **like))
        sizes = {"width": self.width, "attention_heads": self.attention_heads, **like}
        self.blocks = nn.ModuleList(SequentialBlock(in_features, **sizes) for _ in range(n - 1 if sequential else 0))
        self.reset_parameters()

    def _check_options(self) -> None:
        for name in ("n", "width", "attention_heads"):
            if getattr(self, name) < 1:
                raise ValueError(f"`{name}` must be at least 1, got {getattr(self, name)}.")
        if self.mode not in ("parallel", "sequential"):
            raise ValueError(f"`mode` must be parallel or sequential, got {self.mode!r}.")
        if self.in_features % self.attention_heads:
            raise ValueError(f"`attention_heads` must divide {self.in_features}, got {self.attention_heads}.")
        if len(self.offset_weights) != self.n or not all(0 <= one < math.inf for one in self.offset_weights):
            raise ValueError(f"`offset_weights` must be {self.n} numbers of at least 0, got {self.offset_weights}.")

    def options(self) -> dict[str, Any]:
        """As given to `__init__`, defaults filled in."""
        names = ("n", "mode", "width", "attention_heads", "offset_weights", "tied")
        return {**{name: getattr(self, name) for name in names}, "bias": self.bias is not None}

    def reset_parameters(self) -> None:
        """Draw all as `nn.Linear` does; gains of norms are one."""
        for parameter in (self.weight, self.bias, self.embedding, self.up):
            if parameter is not None:
                uniform_(parameter, self.in_features)
        if self.down is not None:
            uniform_(self.down, self.width)
        for block in self.blocks:
            assert isinstance(block, SequentialBlock)
            block.reset_parameters()

    @property
    def rank_bound(self) -> int | None:
        """Of each offset: D + 1, one more for a bias."""
        return min(self.in_features + 1 + (self.bias is not None), self.out_features)

    def forward(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n V"]:
        """Scores of the next token."""
        return product(self._next(hidden), self.weight, self.bias)

    def states(
        self, hidden: Float[Tensor, "*n D"], inputs: Int[Tensor, "*n m"] | None = None, *, ignore_index: int = -100
    ) -> Iterator[Float[Tensor, "*n D"]]:
        """The hidden state of each offset, one after the other, which `weight` and `bias` make scores of.

        Args:
            hidden: Hidden states of the model; [*, T, D] for `sequential`.
            inputs: For `sequential` the tokens 1, 2, ... ahead, at least n - 1; further ones are not read.
            ignore_index: Token that is not known.
        """
        if self.mode == "parallel":
            yield from (self._trunk(hidden, offset) for offset in range(self.n))
            return
        yield hidden
        table, state = self.weight if self.embedding is None else self.embedding, hidden
        for depth, block in enumerate(self.blocks):
            assert isinstance(block, SequentialBlock)
            assert inputs is not None
            tokens = inputs[..., depth]
            known = tokens != ignore_index
            found = nn.functional.embedding(torch.where(known, tokens, 0), table)
            state = block(state, torch.where(known[..., None], found, 0.0))
            yield normalised(state, block.norm_out)

    def nll(
        self,
        hidden: Float[Tensor, "*n D"],
        targets: Int[Tensor, "*n"] | Int[Tensor, "*n m"],
        *,
        ignore_index: int = -100,
        inputs: Int[Tensor, "*n m"] | None = None,
        chunk: int | None = None,
    ) -> Float[Tensor, "*n"] | Float[Tensor, "*n m"]:
        """Negative log-likelihood of each offset in nats, 0 where ignored.

        Args:
            hidden: Hidden states.
            targets: The next n tokens [*, n], as `targets_of` gives them; or the next token [*] alone.
            ignore_index: Target that does not count, at its own offset only.
            inputs: For `sequential` the tokens that its blocks read, [*, n], where `targets` hide some that are known
                (a prompt that is not learned); `targets` when None.
            chunk: Tokens whose scores are alive at once; chosen from V when None.

        Raises:
            ValueError: If shapes do not fit, or a target is no class.
        """
        if targets.ndim == hidden.ndim - 1:
            return super().nll(hidden, targets, ignore_index=ignore_index, chunk=chunk)
        inputs = self._checked(hidden, targets, inputs, ignore_index)
        options: dict[str, Any] = {"bias": self.bias, "ignore_index": ignore_index, "chunk": chunk}
        states = self.states(hidden, inputs, ignore_index=ignore_index)
        losses = [
            ops.linear_terms(state, self.weight, targets[..., offset], **options)[0]
            for offset, state in enumerate(states)
        ]
        return torch.stack(losses, dim=-1)

    def joint_loss(
        self,
        hidden: Float[Tensor, "*n D"],
        targets: Int[Tensor, "*n m"],
        *,
        ignore_index: int = -100,
        inputs: Int[Tensor, "*n m"] | None = None,
        when_empty: Literal["zero", "nan"] = "zero",
        chunk: int | None = None,
    ) -> Float[Tensor, ""]:
        r"""$\sum_i w_i\, \frac{1}{N_i} \sum_n \mathrm{nll}_{ni}$ with $N_i$ the targets of offset i that count.

        An offset without any adds 0. Gradients of an offset are made before the scores of the next one.

        Args:
            hidden: Hidden states.
            targets: The next n tokens.
            ignore_index: Target that does not count.
            inputs: As for `nll`.
            when_empty: What it is when no target of any offset counts.
            chunk: Tokens whose scores are alive at once; chosen from V when None.
        """
        if when_empty not in ("zero", "nan"):
            raise ValueError(f"`when_empty` must be zero or nan, got {when_empty!r}.")
        inputs = self._checked(hidden, targets, inputs, ignore_index)
        parts, options = [], {"bias": self.bias, "ignore_index": ignore_index, "chunk": chunk}
        for offset, state in enumerate(self.states(hidden, inputs, ignore_index=ignore_index)):
            own = targets[..., offset].reshape(-1)
            counts = (own != ignore_index).to(ops.widened(state.dtype))
            mean = counts / counts.sum().clamp(min=1)
            coefficients = nn.functional.pad(mean[:, None], (0, 3))
            flat = state.reshape(-1, self.in_features)
            total = ops.linear_loss(flat, self.weight, own, coefficients, **options)
            parts.append(self.offset_weights[offset] * total)
        loss = torch.stack(parts).sum()
        return torch.where((targets != ignore_index).any(), loss, torch.nan) if when_empty == "nan" else loss

    def targets_of(
        self, tokens: Int[Tensor, "*B T"], *, document_ids: Int[Tensor, "*B T"] | None = None, ignore_index: int = -100
    ) -> Int[Tensor, "*B T n"]:
        """At t the tokens at t + 1 to t + n, `ignore_index` past the end and in another document."""
        columns = []
        for ahead in range(1, self.n + 1):
            later = ops.tokens_ahead(tokens, ahead, document_ids=document_ids, ignore_index=ignore_index)
            columns.append(nn.functional.pad(later, (0, tokens.shape[-1] - later.shape[-1]), value=ignore_index))
        return torch.stack(columns, dim=-1)

    def terms(
        self,
        hidden: Float[Tensor, "*n D"],
        targets: Int[Tensor, "*n"],
        *,
        ignore_index: int = -100,
        spread: Float[Tensor, " V"] | None = None,
        chunk: int | None = None,
    ) -> tuple[Float[Tensor, "*n"], ...]:
        """Of the next token, by `ops.linear_terms`."""
        options: dict[str, Any] = {"bias": self.bias, "ignore_index": ignore_index, "spread": spread, "chunk": chunk}
        return ops.linear_terms(self._next(hidden), self.weight, targets, **options)

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
        """Of the next token, by `ops.linear_loss`."""
        options: dict[str, Any] = {"bias": self.bias, "ignore_index": ignore_index, "spread": spread, "chunk": chunk}
        return ops.linear_loss(self._next(hidden), self.weight, targets, coefficients, **options)

    def flops(self) -> int:
        """Of all n offsets, without the scores of the attention, which grow with the sequence."""
        width, unembedding = self.in_features, self.n * self.in_features * self.out_features
        if self.mode == "parallel":
            return 2 * (unembedding + 2 * self.n * width * self.width)
        return 2 * (unembedding + (self.n - 1) * (6 * width**2 + 3 * width * self.width))

    def _next(self, hidden: Float[Tensor, "*n D"]) -> Float[Tensor, "*n D"]:
        return self._trunk(hidden, 0) if self.mode == "parallel" else hidden

    def _trunk(self, hidden: Float[Tensor, "*n D"], offset: int) -> Float[Tensor, "*n D"]:
        assert self.up is not None
        assert self.down is not None
        inner = nn.functional.silu(product(hidden, self.up[offset]))
        return hidden + product(inner, self.down[offset])

    def _checked(self, hidden: Tensor, targets: Tensor, inputs: Tensor | None, ignore_index: int) -> Tensor:
        inputs, least = targets if inputs is None else inputs, 1 + (self.mode == "sequential")
        expected = (*hidden.shape[:-1], self.n)
        if hidden.ndim < least or not expected == tuple(targets.shape) == tuple(inputs.shape):
            raise ValueError(
                f"Expected `hidden` {'[*, T, D]' if least == 2 else '[*, D]'}, `targets` and `inputs` [*, {self.n}], "
                f"got {tuple(hidden.shape)}, {tuple(targets.shape)} and {tuple(inputs.shape)}."
            )
        for ids in (targets, inputs):
            ops.check_targets(ids, self.out_features, ignore_index)
        return inputs

    @classmethod
    def from_linear(
        cls, linear: Any, *, n: int = 4, mode: Literal["parallel", "sequential"] = "parallel", width: int | None = None
    ) -> Self:
        """A head whose next token starts as `linear`; with parallel trunks every offset does, as they add nothing yet.

        Args:
            linear: An `nn.Linear`, or a `Linear` head without soft-cap; its scale goes into weight and bias.
            n: Tokens predicted.
            mode: As in `__init__`.
            width: As in `__init__`.
        """
        weight, bias = start_of(linear, cls)
        biased = bias is not None
        sizes, like = (linear.in_features, linear.out_features), {"device": weight.device, "dtype": weight.dtype}
        head = cls(*sizes, n=n, mode=mode, width=width, bias=biased, **like)
        with torch.no_grad():
            head.weight.copy_(weight)
            if head.down is not None:
                head.down.zero_()
            if head.bias is not None and bias is not None:
                head.bias.copy_(bias)
        return head

    @classmethod
    def examples(cls, in_features: int, out_features: int) -> Sequence[Self]:
        """Both modes, plain and with everything."""
        return [
            cls(in_features, out_features, n=3, bias=True),
            cls(in_features, out_features, n=2, mode="sequential"),
            cls(in_features, out_features, n=3, mode="sequential", tied=False, offset_weights=[1.0, 0.3, 0.1]),
        ]
