"""What the base class does for every head."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from unembed import heads, losses

KINDS = list(dict.fromkeys(heads.HEADS.values()))


@pytest.mark.parametrize(
    "given",
    [pytest.param(one, id=f"{kind.__name__}-{i}") for kind in KINDS for i, one in enumerate(kind.examples(8, 13))],
)
def test_shapes_and_dtypes_of_losses_on_the_meta_device_are_the_real_ones(given: Any) -> None:
    def losses_of(head: heads.Head, hidden: torch.Tensor) -> list[torch.Tensor]:
        targets = torch.zeros(head.tokens_shape(hidden), dtype=torch.int64, device=hidden.device)
        options = {
            "label_smoothing": 0.0 if head.sparse else 0.1,
            "token_weight": torch.ones_like(targets, dtype=torch.float32),
        }
        found = [head.nll(hidden, targets), losses.cross_entropy(head, hidden, targets)]
        found += [losses.cross_entropy(head, hidden, targets, reduction=name, **options) for name in ("none", "sum")]
        if targets.ndim > 1:
            found.append(losses.cross_entropy(head, hidden, targets, shift=1, document_ids=targets, reduction="none"))
        return [*found, *torch.autograd.grad(found[1], [hidden, *head.parameters()], materialize_grads=True)]

    head = copy.deepcopy(given).to(torch.bfloat16)
    hidden = head.example_hidden((2, 3)).float().requires_grad_()
    empty = losses_of(copy.deepcopy(head).to("meta"), hidden.detach().to("meta").requires_grad_())
    for one, real in zip(empty, losses_of(head, hidden), strict=True):
        assert one.is_meta
        assert (one.shape, one.dtype) == (real.shape, real.dtype)


def test_a_subclass_without_a_name_of_its_own_takes_none_away():
    class Variant(heads.Linear):
        """As a wrapper makes one."""

    assert Variant.names == heads.Linear.names
    assert heads.HEADS["linear"] is heads.Linear


@pytest.mark.parametrize("kind", [kind for kind in KINDS if hasattr(kind, "from_linear")])
def test_a_start_from_what_is_more_than_a_matrix_is_refused(kind: Any) -> None:
    for given in (heads.Sigsoftmax(4, 9), torch.nn.Embedding(9, 4)):
        with pytest.raises(ValueError, match=f"takes an nn.Linear or a heads.Linear, got {type(given).__name__}"):
            kind.from_linear(given)


def test_cost_counts_the_tokens_of_a_chunk_that_the_loss_takes():
    few, many = heads.Linear(8, 262144, device="meta"), heads.Linear(8, 1 << 22, device="meta")
    assert few.cost(1024).peak_bytes == 4 * (8 * 262144 + 128 * 262144)
    assert many.cost(1024).peak_bytes == 4 * (8 << 22) + 4 * 11 * (1 << 22)  # within twice the bounds
