"""Cross-entropy against soft targets that are given as a few classes a token.

Shapes: * tokens, D hidden size, m classes given a token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from unembed import ops
from unembed.heads import Head
from unembed.losses._head_rows import of_scores, reduced
from unembed.losses._targets import Alignment, check_is_head, states_of


def soft_cross_entropy(
    head: Head,
    hidden: Float[Tensor, "*n D"],
    classes: Int[Tensor, "*n m"],
    probabilities: Float[Tensor, "*n m"],
    *,
    reduction: Literal["mean", "sum", "none"] = "mean",
    token_weight: Float[Tensor, "*n"] | None = None,
    shift: int = 0,
    document_ids: Int[Tensor, "*n"] | None = None,
    when_empty: Literal["zero", "nan"] = "zero",
    chunk: int | None = None,
) -> Tensor:
    r"""$-\sum_j q_j \log p(c_j)$ of each token, in nats; a class with $q_j = 0$ adds nothing, whatever its score.

    Args:
        head: Any head.
        hidden: Hidden states.
        classes: c, the classes that have a probability; one may occur twice.
        probabilities: q; need not sum to 1.
        reduction: `mean` over the token weights, `sum`, or `none` for one loss a token (with `shift`, for each token
            but the first ones).
        token_weight: A factor on each token's loss; 0 takes it out.
        shift: Position t predicts what is given at t + `shift`, along the last dimension of the tokens.
        document_ids: With `shift`, no prediction across a change of document.
        when_empty: What `mean` is when the weights sum to zero.
        chunk: Tokens whose scores are alive at once; chosen from V when None.

    Raises:
        ValueError: If an option is out of range, shapes do not fit or a class is none.
    """
    check_is_head(head)
    shape = head.tokens_shape(hidden)
    if tuple(classes.shape[:-1]) != shape or classes.shape != probabilities.shape:
        raise ValueError(
            f"Expected `classes` and `probabilities` {shape} and one dimension more, "
            f"got {tuple(classes.shape)} and {tuple(probabilities.shape)}."
        )
    aligned = Alignment(shape, shift, document_ids)
    aligned.check(token_weight=token_weight)
    classes, probabilities = aligned.ahead(classes), aligned.ahead(probabilities)
    ops.check_targets(classes, head.out_features, None, name="classes")

    def loss_of(scores: Sequence[Tensor], more: Sequence[Tensor]) -> Tensor:
        chosen, share = more
        lse = torch.logsumexp(scores[0], -1, keepdim=True)
        missing = lse - scores[0].gather(1, chosen)
        return (torch.where(share == 0, 0.0, missing) * share).sum(-1)

    more = [part.reshape(-1, part.shape[-1]) for part in (classes.long(), probabilities)]
    loss = of_scores([head], [states_of(head, hidden, aligned)], more, loss_of, chunk=chunk)
    return reduced(loss, aligned.weight(token_weight), aligned.predictions, reduction, when_empty)
