"""`check_filter` on a filter that is right, and on filters that are each wrong in one way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from unembed.decoding import Filter
from unembed.testing import FILTER_CHECKS, FilterError, check_filter

INF = torch.inf


@dataclass(frozen=True)
class Nearest(Filter):
    """A third party's filter, and right: keeps what is near the best, and takes 1 from the last token."""

    distance: float = 2.0

    def apply(self, scores: Tensor, history: Any) -> Tensor:
        near = scores >= scores.amax(-1, keepdim=True) - self.distance
        return self.changed(scores, history).masked_fill(~near, -INF)

    def changed(self, scores: Tensor, history: Any) -> Tensor:
        if history is None or not history.tokens.shape[1]:
            return scores
        last = history.tokens[:, -1:]
        return scores.scatter(-1, last.clamp(min=0), scores.gather(-1, last.clamp(min=0)) - (last >= 0).to(scores))


class Flat(Nearest):
    def __call__(self, scores, history=None):
        return (
            super().__call__(scores, history).flatten(0, -2) if scores.ndim > 2 else super().__call__(scores, history)
        )


class Narrow(Nearest):
    def __call__(self, scores, history=None):
        return super().__call__(scores, history).to(scores.dtype)


class InPlace(Nearest):
    def apply(self, scores, history):
        scores.masked_fill_(scores < scores.amax(-1, keepdim=True) - self.distance, -INF)
        return scores


class Random(Nearest):
    def apply(self, scores, history):
        return super().apply(scores + torch.rand(()), history)


class Revives(Nearest):
    def apply(self, scores, history):
        return super().apply(scores, history).clamp(min=-1e9)


class NaNs(Nearest):
    def apply(self, scores, history):
        return super().apply(scores, history) - scores.amax(-1, keepdim=True)  # -inf less -inf


class Strict(Nearest):
    def apply(self, scores, history):
        return scores.masked_fill(
            scores <= scores.mean(-1, keepdim=True), -INF
        )  # of equal scores none is above the mean


class Neighbours(Nearest):
    def apply(self, scores, history):
        return super().apply(scores, history) + torch.linspace(0, 1, max(1, len(scores)))[: len(scores), None].to(
            scores
        )


class Neighbour(Nearest):
    def apply(self, scores, history):
        return super().apply(scores, history) - scores[scores > -INF].sum() / 100


class NotEmpty(Nearest):
    def apply(self, scores, history):
        assert scores.amax() > -INF
        return super().apply(scores, history)


class Strides(Nearest):
    def __call__(self, scores, history=None):
        return super().__call__(scores if scores.is_contiguous() else scores * 0.5, history)


class Absolute(Nearest):
    def apply(self, scores, history):
        return super().apply(scores * torch.where(scores > 0, 0.5, 2.0).to(scores), history)


class BadGradient(Nearest):
    def apply(self, scores, history):
        return super().apply(scores, history) + 0 * (scores - scores).abs().sqrt()


class CountsPadding(Nearest):
    def changed(self, scores, history):
        return scores - (history.tokens < 0).sum(1, keepdim=True) * torch.arange(scores.shape[-1])


def test_a_right_one_passes_every_law():
    assert {one.status for one in check_filter(Nearest())} == {"passed"}
    assert [one.name for one in check_filter(Nearest())] == list(FILTER_CHECKS)


@pytest.mark.parametrize(
    ("wrong", "law"),
    [
        (Flat, "shape"),
        (Narrow, "dtype"),
        (InPlace, "pure"),
        (Random, "pure"),
        (Revives, "excluded"),
        (NaNs, "excluded"),
        (Strict, "one_kept"),
        (Neighbours, "rows"),
        (Neighbour, "rows"),
        (NotEmpty, "empty"),
        (Strides, "strided"),
        (Absolute, "offset"),
        (BadGradient, "gradient"),
        (CountsPadding, "padding"),
    ],
)
def test_a_wrong_one_fails_its_law_and_says_so(wrong, law):
    outcomes = check_filter(wrong(), raises=False)
    assert law in [one.name for one in outcomes if one.status == "failed"], [str(one) for one in outcomes]
    with pytest.raises(FilterError, match=rf"^{wrong.__name__} failed \d+ of {len(FILTER_CHECKS)} checks\.\n") as told:
        check_filter(wrong())
    assert f"  {law}: " in str(told.value)
    assert [(one.name, one.status) for one in told.value.outcomes] == [(one.name, one.status) for one in outcomes]


def test_every_law_rejects_some_filter():
    rejected = {
        "shape",
        "dtype",
        "pure",
        "excluded",
        "one_kept",
        "rows",
        "empty",
        "strided",
        "offset",
        "gradient",
        "padding",
    }
    assert rejected == set(FILTER_CHECKS)


def test_what_a_filter_does_not_promise_is_skipped_with_its_reason():
    outcomes = check_filter(Absolute(), skip={"offset": "scales positive scores"})
    assert [(one.name, one.message) for one in outcomes if one.status == "not applicable"] == [
        ("offset", "scales positive scores")
    ]
    assert check_filter(Absolute(), skip=["offset"])[8].message == "skipped by the caller"
    with pytest.raises(ValueError, match=r"^`classes` must be at least 8, got 3\.$"):
        check_filter(Nearest(), classes=3)
    for unknown in (["offsets"], "offset"):
        with pytest.raises(ValueError, match="`skip` must be a collection of shape, dtype, pure, excluded"):
            check_filter(Nearest(), skip=unknown)


def test_generators_are_left_as_they_were():
    torch.manual_seed(3)
    wanted = torch.rand(3)
    torch.manual_seed(3)
    check_filter(Nearest())
    assert torch.equal(torch.rand(3), wanted)
