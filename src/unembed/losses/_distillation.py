"""Distillation: a student head against a teacher head, never tokens x vocabulary.

Shapes: * tokens, D hidden size of the student, E of the teacher, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed import ops
from unembed.heads import Head, Linear
from unembed.losses._head_rows import of_scores, reduced
from unembed.losses._targets import Alignment, check_is_head, states_of

_Side = tuple[Head, Tensor]  # a head and its hidden states with one token dimension


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
    shift: int = 0,
    document_ids: Int[Tensor, "*n"] | None = None,
    targets: Int[Tensor, "*n"] | None = None,
    ignore_index: int = -100,
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
        reduction: `mean` over the token weights, `sum`, or `none` for one loss a token (with `shift`, for each token
            but the first ones).
        token_weight: A factor on each token's loss, with `shift` of the token predicted; 0 takes it out.
        shift: How far ahead the predicted tokens lie: the last `shift` positions of a row predict nothing and are left
            out. Student and teacher stand side by side in any case.
        document_ids: With `shift`, positions that would predict a token of another document are left out.
        targets: As for `cross_entropy`, only to leave out what it ignores; all tokens count when None.
        ignore_index: Target of tokens that do not count.
        when_empty: What `mean` is when the weights sum to zero.
        chunk: Tokens whose scores are alive at once; chosen from V when None.

    Raises:
        ValueError: If an option is out of range, shapes or heads do not fit, or a target is no class.
    """
    if not 0 < temperature < float("inf"):
        raise ValueError(f"`temperature` must be positive and finite, got {temperature}.")
    if direction not in ("forward", "reverse"):
        raise ValueError(f"`direction` must be forward or reverse, got {direction!r}.")
    aligned = Alignment(_tokens(head, hidden, teacher, teacher_hidden), shift, document_ids)
    aligned.check(token_weight=token_weight, targets=targets)
    counts = None if targets is None else _counting(aligned.targets(targets, ignore_index), head, ignore_index)

    student, taught = (head, states_of(head, hidden, aligned)), (teacher, states_of(teacher, teacher_hidden, aligned))
    p, q = (taught, student) if direction == "forward" else (student, taught)
    loss = _kl(p, q, temperature, chunk)
    loss = loss * temperature**2 if times_squared else loss
    return reduced(loss, aligned.weight(token_weight, counts), aligned.predictions, reduction, when_empty)


def _kl(p: _Side, q: _Side, temperature: float, chunk: int | None) -> Tensor:
    """`KL(p || q)` of each token."""
    (head, hidden), (other, other_hidden) = p, q
    if type(head) is Linear and type(other) is Linear:
        others = {f"other_{name}": value for name, value in other.score_options(temperature).items()}
        options: dict[str, Any] = {**head.score_options(temperature), **others, "chunk": chunk}
        return ops.linear_kl(hidden, head.weight, other_hidden, other.weight, **options)

    def divergence(scores: Sequence[Tensor], _more: Sequence[Tensor]) -> Tensor:
        return ops.kl_divergence(*(torch.log_softmax(part / temperature, -1) for part in scores))

    return of_scores([head, other], [hidden, other_hidden], [], divergence, chunk=chunk)


def _tokens(head: Head, hidden: Tensor, teacher: Head, teacher_hidden: Tensor) -> tuple[int, ...]:
    """The shape of the tokens, which both heads agree on."""
    check_is_head(head)
    check_is_head(teacher, name="teacher")
    if head.out_features != teacher.out_features:
        raise ValueError(f"`teacher` has {teacher.out_features} classes, `head` {head.out_features}: not the same.")
    shape, came = head.tokens_shape(hidden), teacher.tokens_shape(teacher_hidden)
    if came != shape:
        raise ValueError(f"Expected `teacher_hidden` for tokens {shape}, got {came}.")
    return shape


def _counting(targets: Tensor, head: Head, ignore_index: int) -> Tensor:
    ops.check_targets(targets, head.out_features, ignore_index)
    return targets != ignore_index
