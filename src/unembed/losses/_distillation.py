"""Distillation: a student head against a teacher head, never tokens x vocabulary.

Shapes: * tokens, D hidden size of the student, E of the teacher, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from unembed import ops
from unembed.heads import Head
from unembed.losses._head_rows import of_scores, reduced


def distillation(
    head: Head,
    hidden: Float[Tensor, "*n D"],
    teacher: Head,
    teacher_hidden: Float[Tensor, "*n E"],
    *,
    temperature: float = 1.0,
    direction: Literal["forward", "reverse"] = "forward",
    times_squared: bool = True,
    reduction: Literal["mean", "sum", "none"] = "mean",
    token_weight: Float[Tensor, "*n"] | None = None,
    when_empty: Literal["zero", "nan"] = "zero",
    chunk: int | None = None,
) -> Tensor:
    r"""Divergence of student and teacher in nats, as (Hinton et al., 2015, arXiv:1503.02531).

    $$T^2\, \mathrm{KL}(\mathrm{teacher}_T \,\|\, \mathrm{student}_T)$$

    Args:
        head: The student.
        hidden: Its hidden states.
        teacher: Any head over the same classes; freeze its parameters, or they get gradients too.
        teacher_hidden: Hidden states of the teacher for the same tokens.
        temperature: T, divides the scores of both.
        direction: `forward` is KL(teacher || student), `reverse` KL(student || teacher).
        times_squared: Whether to multiply by $T^2$, which keeps the size of the gradient.
        reduction: `mean` over the token weights, `sum`, or `none`.
        token_weight: A factor on each token's loss; 0 takes it out.
        when_empty: What `mean` is when the weights sum to zero.
        chunk: Tokens whose scores are alive at once; chosen from V when None.

    Raises:
        ValueError: If an option is out of range or the heads do not fit.
    """
    if not 0 < temperature < float("inf"):
        raise ValueError(f"`temperature` must be positive and finite, got {temperature}.")
    if direction not in ("forward", "reverse"):
        raise ValueError(f"`direction` must be forward or reverse, got {direction!r}.")
    if head.out_features != teacher.out_features:
        raise ValueError(f"`teacher` has {teacher.out_features} classes, `head` {head.out_features}: not the same.")
    shape = head.tokens_shape(hidden)
    if teacher.tokens_shape(teacher_hidden) != shape:
        came = teacher.tokens_shape(teacher_hidden)
        raise ValueError(f"Expected `teacher_hidden` for tokens {shape}, got {came}.")

    def divergence(scores: Sequence[Tensor], _more: Sequence[Tensor]) -> Tensor:
        student, taught = (torch.log_softmax(part / temperature, -1) for part in scores)
        p, q = (taught, student) if direction == "forward" else (student, taught)
        return ops.kl_divergence(p, q)

    flat = hidden.reshape(-1, *head.hidden_shape(hidden))
    flat_teacher = teacher_hidden.reshape(-1, *teacher.hidden_shape(teacher_hidden))
    loss = of_scores([head, teacher], [flat, flat_teacher], [], divergence, chunk=chunk)
    loss = loss * temperature**2 if times_squared else loss
    return reduced(loss, token_weight, shape, reduction, when_empty)
