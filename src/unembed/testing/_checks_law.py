"""Checks of the distribution itself: the head law, the loss, shapes, rank and cost."""

from __future__ import annotations

import copy
from typing import Any

import torch

from unembed.testing._case import (
    Case,
    NotApplicableError,
    close,
    close_gradients,
    definition,
    during,
    expect,
    gradients,
    log_prob,
)
from unembed.testing._registry import check

_RANK_TOLERANCE = 1e-9  # of the largest singular value, in float64
_MOST_CLASSES = 2000  # beyond, an SVD is no quick check


@check("law", after=())
def law(case: Case) -> None:
    """`log_softmax(head(hidden))` is `log_prob(hidden)`, and its probabilities sum to 1 (1e-6; float64: 1e-12)."""
    for dtype, tolerance in ((torch.float32, 1e-6), (torch.float64, 1e-12)):
        head, hidden = case.head(dtype), case.hidden(dtype=dtype)
        scores = head(hidden)
        found = log_prob(head, hidden)
        expect(scores.shape[-1] == case.classes, f"expected {case.classes} scores a token, got {scores.shape[-1]}")
        expect(found.dtype == dtype, f"log_prob of a {dtype} head: expected {dtype}, got {found.dtype}")
        total = found.double().exp().sum(-1)
        close(total, torch.ones_like(total), tolerance, f"sum of probabilities in {dtype}")
        close(found, torch.log_softmax(scores, -1), 10 * tolerance, f"log_prob against log_softmax of scores, {dtype}")


@check("nll", after=("law",))
def nll(case: Case) -> None:
    """`nll(hidden, targets)` is `-log_prob(hidden)[target]` of each token."""
    for dtype, tolerance in ((torch.float32, 1e-5), (torch.float64, 1e-11)):
        head, hidden, targets = case.pair(dtype=dtype)
        close(head.nll(hidden, targets), definition(head, hidden, targets), tolerance, f"nll in {dtype}")
    if not hasattr(head, "definition_nll"):
        for target in (0, case.classes - 1):
            one = torch.full_like(targets, target)
            close(head.nll(hidden, one), definition(head, hidden, one), tolerance, f"nll of target {target}")


@check("tail")
def tail(case: Case) -> None:
    """The loss of a token that is nearly impossible has no floor: nothing is added inside the log."""
    case.plain()
    head, hidden, _ = case.pair()
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.mul_(6)
    wide = copy.deepcopy(head).double()
    for scale in (1, 10):
        # What float32 does to scores of this size is no fault of the loss, so it may lose 1e-4 of the largest.
        least = log_prob(wide, scale * hidden.double()).argmin(-1)
        want = definition(wide, scale * hidden.double(), least)
        close(
            head.nll(scale * hidden, least), want, 1e-4, f"nll of the least likely token, hidden states times {scale}"
        )


@check("shapes")
def shapes(case: Case) -> None:
    """Tokens of any shape in, the same shape out, and a sequence's values do not depend on the others beside it."""
    case.has("nll")
    head, tried = case.head(torch.float64), 0
    for shape in ((), (1,), (5,), (2, 3), (2, 1, 3), (0,), (2, 0)):
        try:
            hidden = case.hidden(shape, torch.float64)
        except NotApplicableError:
            continue
        tried += 1
        with during(f"tokens {shape}"):
            _shape(case, head, hidden, shape)
    expect(tried > 0, "no shape of tokens gives hidden states")


def _shape(case: Case, head: Any, hidden: torch.Tensor, shape: tuple[int, ...]) -> None:
    tokens, targets = case.tokens(head, hidden), case.targets(head, hidden)
    found, loss = log_prob(head, hidden), head.nll(hidden, targets)
    expect(tuple(found.shape) == (*tokens, case.classes), f"tokens {shape}: log_prob has shape {tuple(found.shape)}")
    close(loss, definition(head, hidden, targets), 1e-11, f"nll of tokens {shape}")
    if shape and shape[0] == hidden.shape[0] > 1:
        parts = torch.cat([log_prob(head, part) for part in hidden.split(1)])
        close(found, parts, 1e-11, f"log_prob of tokens {shape} against one sequence at a time")
    if 0 in shape:
        gradients(head, hidden, targets)


@check("strides")
def strides(case: Case) -> None:
    """Hidden states and targets that do not lie in a row in memory give the same values and gradients."""
    head, hidden, targets = case.pair(dtype=torch.float64)
    want, slopes = gradients(head, hidden, targets)
    spread = hidden.transpose(0, -1).contiguous().transpose(0, -1)
    twice = torch.stack([targets, targets], dim=-1)[..., 0]
    got = head.nll(spread, twice)
    close(got, want, 1e-11, "nll of strided inputs")
    got, found = gradients(head, hidden, twice, lambda head, hidden, targets: head.nll(_strided(hidden), targets))
    close_gradients(found, slopes, 1e-11, " through strided inputs")


def _strided(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(0, -1).contiguous().transpose(0, -1)


@check("rank_bound", after=("law", "shapes"))
def rank_bound(case: Case) -> None:
    """The rank of log-probabilities of many random hidden states is within `rank_bound`, which is at most V."""
    case.has("rank_bound")
    bound = case.given.rank_bound
    expect(1 <= bound <= case.classes, f"expected a bound in [1, {case.classes}], got {bound}")
    if case.classes > _MOST_CLASSES:
        raise NotApplicableError(f"more than {_MOST_CLASSES} classes: an SVD of that size is no quick check")
    with torch.no_grad():
        matrix = log_prob(case.head(torch.float64), case.hidden((case.classes + 20,), torch.float64)).flatten(0, -2)
    values = torch.linalg.svdvals(matrix[:, matrix.isfinite().all(0)])
    rank = int((values > _RANK_TOLERANCE * values[0]).sum())
    expect(
        rank <= bound, f"expected a rank of at most {bound}, got {rank} (singular values over {_RANK_TOLERANCE} s_1)"
    )


@check("cost", after=())
def cost(case: Case) -> None:
    """`cost(tokens)` is positive in every field, counts the parameters exactly, and more tokens do not cost less."""
    case.has("cost")
    few, many = case.given.cost(3), case.given.cost(300)
    true = sum(parameter.numel() for parameter in case.given.parameters())
    expect(few.parameters == true, f"expected {true} parameters, got {few.parameters}")
    for name in ("forward_flops", "backward_flops", "bytes_moved", "peak_bytes"):
        low, high = getattr(few, name), getattr(many, name)
        expect(low > 0, f"expected a positive `{name}`, got {low}")
        expect(high >= low, f"`{name}` falls from {low} at 3 tokens to {high} at 300")
