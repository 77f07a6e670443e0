"""Heads that score all classes, against their definition written out in float64; `check_head` does the rest."""

from __future__ import annotations

import importlib

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed import heads
from unembed.heads import LowRank, Mixtape, MonotonicSoftmax, Sigsoftmax

KINDS = {"_low_rank": LowRank, "_mixtape": Mixtape, "_monotonic": MonotonicSoftmax, "_sigsoftmax": Sigsoftmax}


def _examples(module: str, d: int, v: int, dtype: torch.dtype = torch.float64, *, seed: int = 0) -> list[heads.Head]:
    """Examples of a class, with parameters large enough for the head to be far from a linear one."""
    torch.manual_seed(seed)
    found = []
    for head in KINDS[module].examples(d, v):
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_()
        found.append(head.to(dtype))
    return found


def _gradients(value: torch.Tensor, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    found = torch.autograd.grad(value, inputs, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(inputs, found, strict=True)]


@pytest.mark.parametrize("module", KINDS)
@settings(deadline=None, max_examples=25)
@given(n=st.integers(0, 7), d=st.integers(1, 5), v=st.integers(1, 13), chunk=st.integers(1, 5), seed=st.integers(0, 99))
def test_scores_loss_and_gradients_are_the_definition_for_every_shape(*, module, n, d, v, chunk, seed):
    reference = importlib.import_module(f"unembed.heads.{module}")._reference
    for head in _examples(module, d, v, seed=seed):
        hidden, targets = torch.randn(n, d, dtype=torch.float64, requires_grad=True), torch.randint(v, (n,))
        targets[n // 2 : n // 2 + 1] = -100
        inputs, upstream = [hidden, *head.parameters()], torch.randn(n, dtype=torch.float64)
        scores = reference(head, hidden)
        wanted = torch.nn.functional.cross_entropy(scores, targets, reduction="none")
        torch.testing.assert_close(head(hidden), scores)
        torch.testing.assert_close(head.log_prob(hidden), scores.log_softmax(-1))
        found = head.nll(hidden, targets, chunk=chunk)
        torch.testing.assert_close(found, wanted)
        expected = _gradients((wanted * upstream).sum(), inputs)
        torch.testing.assert_close(_gradients((found * upstream).sum(), inputs), expected)


@pytest.mark.parametrize("module", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_large_scores_stay_finite(module, dtype):
    for head in _examples(module, 3, 6, dtype):
        with torch.no_grad():
            head.weight.copy_(torch.tensor([100.0, -100.0, 100.0, 0.1, -0.01, 0.0])[:, None].expand_as(head.weight))
        hidden = (100 * torch.eye(3, dtype=dtype)).requires_grad_()
        loss = head.nll(hidden, torch.tensor([0, 1, 3]))
        assert loss.isfinite().all()
        assert (loss >= 0).all()
        assert all(gradient.isfinite().all() for gradient in _gradients(loss.sum(), [hidden, *head.parameters()]))
        assert head.log_prob(hidden).isfinite().all()
