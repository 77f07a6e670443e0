"""Negative log-likelihood of a linear softmax head, a chunk of scores alive at a time.

Shapes: N tokens, D hidden size, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed.ops._linear_loss import LinearLoss
from unembed.ops._linear_terms import LinearTerms
from unembed.ops._linear_work import LinearOptions
from unembed.ops._rows import evaluate

_SCORES_CPU = 22 << 20  # alive at once: 88 MiB in float32; each chunk packs the matrix anew, so few of them
_SCORES_GPU = 1 << 27
LEAST_ROWS = 128  # of a linear head: a chunk adds up a gradient as large as the matrix, so not too many of them


def _reference(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " N"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    ignore_index: int = -100,
) -> Float[Tensor, " N"]:
    """What `linear_nll` means, in float64 with all scores at once."""
    scores = hidden.double() @ weight.double().T
    scores = scale * (scores if bias is None else scores + bias.double())
    if softcap is not None:  # a class that the bias takes out is masked after the cap
        capped = softcap * torch.tanh(scores / softcap)
        scores = torch.where(scores == -torch.inf, scores, capped)
    counts = targets != ignore_index
    own = scores.gather(1, torch.where(counts, targets, 0)[:, None]).squeeze(1)
    return torch.where(counts, torch.logsumexp(scores, 1) - own, 0.0)


def linear_nll(
    hidden: Float[Tensor, "*N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "*N"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    ignore_index: int = -100,
    chunk: int | None = None,
) -> Float[Tensor, "*N"]:
    r"""Negative log-likelihood of each token, in nats, float32 or wider.

    $$\ell_n = \log\sum_v e^{z_{nv}} - z_{n t_n}, \qquad z = \mathrm{cap}(s\,(h W^T + b))$$

    Gradients are exact, of any order, in backward and forward mode; a backward pass makes the scores once more.

    Args:
        hidden: Hidden states after the final norm.
        weight: The unembedding matrix.
        targets: Next tokens.
        bias: Added before scale and soft-cap; `-inf` takes a class out.
        softcap: Cap of the scores; none when None.
        scale: Factor on the scores.
        ignore_index: Target of tokens that do not count: their loss is 0, their gradients too.
        chunk: Tokens whose scores are alive at once. Chosen from V when None.

    Raises:
        ValueError: If shapes do not fit, `chunk` is not positive, or a target is not a class.
    """
    nll, _ = linear_terms(
        hidden, weight, targets, bias=bias, softcap=softcap, scale=scale, ignore_index=ignore_index, chunk=chunk
    )
    return nll


def linear_terms(
    hidden: Float[Tensor, "*N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, "*N"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    sigsoftmax: bool = False,
    ignore_index: int = -100,
    spread: Float[Tensor, " V"] | None = None,
    chunk: int | None = None,
) -> tuple[Float[Tensor, "*N"], ...]:
    """`(nll, lse)` of each token, and the sum of scores weighted by `spread` where it is given; as `linear_nll`."""
    options, hidden, shared = prepared(
        hidden,
        weight,
        targets,
        bias=bias,
        softcap=softcap,
        scale=scale,
        sigsoftmax=sigsoftmax,
        ignore_index=ignore_index,
        spread=spread,
    )
    rows = chunk_rows(len(shared[0]), hidden.device, chunk, least=LEAST_ROWS)
    flat = (hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).long())
    outputs, _ = evaluate(LinearTerms(options, rows), flat, shared)
    return tuple(term.reshape(targets.shape) for term in outputs)


def linear_loss(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    targets: Int[Tensor, " N"],
    coefficients: Float[Tensor, "N 4"],
    *,
    bias: Float[Tensor, " V"] | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    sigsoftmax: bool = False,
    ignore_index: int = -100,
    spread: Float[Tensor, " V"] | None = None,
    chunk: int | None = None,
) -> Float[Tensor, ""]:
    r"""$\sum_n a_n \mathrm{nll}_n + b_n \mathrm{lse}_n + c_n \mathrm{lse}_n^2 + d_n \sum_v s_v z_{nv}$.

    Where a gradient will be asked for, it is made in the forward pass: three products of the size of the scores in all.

    Args:
        hidden: Hidden states after the final norm.
        weight: The unembedding matrix.
        targets: Next tokens.
        coefficients: a, b, c, d of each token; a term with coefficient 0 counts as 0.
        bias: Added before scale and soft-cap; `-inf` takes a class out.
        softcap: Cap of the scores; none when None.
        scale: Factor on the scores.
        sigsoftmax: Scores are `z + log sigmoid(z)` of those.
        ignore_index: Target of tokens that do not count; their a is taken for 0.
        spread: s, 0 where a score may be `-inf`; no last term when None.
        chunk: Tokens whose scores are alive at once. Chosen from V when None.
    """
    options, hidden, shared = prepared(
        hidden,
        weight,
        targets,
        bias=bias,
        softcap=softcap,
        scale=scale,
        sigsoftmax=sigsoftmax,
        ignore_index=ignore_index,
        spread=spread,
    )
    rows = chunk_rows(len(shared[0]), hidden.device, chunk, least=LEAST_ROWS)
    tokens = (hidden, targets.long(), coefficients)
    asked = (requiring(tokens), (*requiring(shared[: 1 + options.biased]), *(False,) * options.spread))
    _, (total,) = evaluate(LinearLoss(options, rows, asked), tokens, shared)
    return total


def requiring(tensors: Sequence[Tensor]) -> tuple[bool, ...]:
    """Which tensors will be asked for a gradient."""
    return tuple(torch.is_grad_enabled() and tensor.requires_grad for tensor in tensors)


def chunk_rows(scores_per_token: int, device: torch.device, chunk: int | None = None, *, least: int = 1) -> int:
    """Tokens a chunk: `chunk`, or as many as keep the scores alive at once in bounds.

    At least `least`, if that is within twice the bounds.

    Raises:
        ValueError: If `chunk` is not positive.
    """
    if chunk is not None:
        if chunk < 1:
            raise ValueError(f"`chunk` must be at least 1, got {chunk}.")
        return chunk
    budget = _SCORES_CPU if device.type == "cpu" else _SCORES_GPU
    return max(1, min(least, 2 * budget // scores_per_token), budget // scores_per_token)


def check_targets(targets: Tensor, classes: int, ignore_index: int | None, *, name: str = "targets") -> None:
    """Refuse a target that is neither a class nor ignored; under compile and vmap the device fails on it.

    Raises:
        ValueError: In eager mode.
    """
    if targets.is_floating_point() or targets.dtype == torch.bool:
        raise ValueError(f"`{name}` must hold integers, got {targets.dtype}.")
    if targets.is_meta:  # no values to look at
        return
    fits = (targets >= 0) & (targets < classes)
    if ignore_index is not None:
        fits = fits | (targets == ignore_index)
    if torch.compiler.is_compiling():
        torch._assert_async(fits.all(), "a target is no class and not ignored")
        return
    try:
        wrong = not bool(fits.all())
    except RuntimeError:  # vmap: a value cannot be looked at, so the look-up of its score will fail
        return
    if wrong:
        raise ValueError(
            f"`{name}` must {'' if ignore_index is None else f'be {ignore_index} or '}lie in [0, {classes}), "
            f"got {int(targets[~fits].flatten()[0])}."
        )


def prepared(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    softcap: float | None = None,
    scale: float = 1.0,
    sigsoftmax: bool = False,
    ignore_index: int = -100,
    spread: Tensor | None = None,
) -> tuple[LinearOptions, Tensor, tuple[Tensor, ...]]:
    """The options of a linear head, the hidden states and the shared tensors, as autocast would have them.

    Raises:
        ValueError: If shapes do not fit, a target is no class, or the soft-cap is none.
    """
    hidden, weight, bias = as_autocast(hidden, weight, bias)
    check_targets(targets, len(weight), ignore_index)
    if hidden.shape[:-1] != targets.shape or hidden.shape[-1] != weight.shape[1]:
        raise ValueError(
            f"Expected `hidden` [*, {weight.shape[1]}] and `targets` [*] of one shape, "
            f"got {tuple(hidden.shape)} and {tuple(targets.shape)}."
        )
    if softcap is not None and not 0 < softcap < math.inf:
        raise ValueError(f"`softcap` must be positive and finite, got {softcap}; None means no cap.")
    for name, tensor in (("bias", bias), ("spread", spread)):
        if tensor is not None and tensor.shape != weight.shape[:1]:
            raise ValueError(f"Expected `{name}` ({len(weight)},), got {tuple(tensor.shape)}.")
    options = LinearOptions(
        softcap=softcap,
        scale=scale,
        sigsoftmax=sigsoftmax,
        ignore_index=ignore_index,
        biased=bias is not None,
        spread=spread is not None,
    )
    return options, hidden, tuple(tensor for tensor in (weight, bias, spread) if tensor is not None)


def as_autocast(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """What autocast would do to the operands of a product; everything after the product is wide in any case."""
    device = hidden.device.type
    if hidden.is_meta or not torch.is_autocast_enabled(device):
        return hidden, weight, bias
    dtype = torch.get_autocast_dtype(device)
    low = [
        tensor if tensor is None or tensor.dtype == torch.float64 else tensor.to(dtype) for tensor in (hidden, weight)
    ]
    return low[0], low[1], bias
