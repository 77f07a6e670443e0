"""Parameters of rows and of requests: which are sliced with their rows, which are whole, and which are refused."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor

from unembed.decoding import AllowedIds, Beam, Filter, Joint, MinLength, Number, Sample, TopK, TopP, generate
from unembed.decoding._drawing import at_rows, check_rows
from unembed.decoding.filters._parameters import column

V = 5


@dataclass(frozen=True)
class Lifted(Filter):
    """A filter of somebody else, which takes one number a row."""

    lift: Number

    def apply(self, scores, history):
        up = column("lift", self.lift, scores)
        return torch.cat([scores[:, :1] + up.to(scores.dtype), scores[:, 1:]], 1)


@dataclass(frozen=True)
class Untold(Filter):
    """One that does not say what its tensor is."""

    b: Tensor

    def apply(self, scores, history):
        return scores + self.b.to(scores.dtype)[:, None]


@pytest.mark.parametrize("strategy", [Sample(), Beam(2)])
def test_a_minimum_length_of_each_row_follows_its_row(strategy):
    def ending(tokens):
        return torch.tensor([4.0, 0, 0, 0, 0]).expand(len(tokens), -1)

    options = {"strategy": strategy, "max_new_tokens": 6, "eos_ids": [0], "temperature": 0.1}
    rule = MinLength(torch.tensor([0, 3]), [0])
    found = generate(ending, [[1], [2]], filters=rule, seeds=[1, 2], **options)
    assert found.lengths[:, 0].tolist() == [1, 4]


@pytest.mark.parametrize("strategy", [Sample(), Beam(2)])
def test_a_filter_of_ones_own_with_numbers_follows_its_rows(strategy, toy):
    each = torch.tensor([9.0, -9.0, 3.0])
    options = {"strategy": strategy, "max_new_tokens": 4, "eos_ids": [2]}
    together = generate(toy(V, 3), [[1], [2], [3]], filters=Lifted(each), seeds=[1, 2, 3], **options)
    for row in range(3):
        alone = generate(toy(V, 3), [[row + 1]], filters=Lifted(float(each[row])), seeds=[row + 1], **options)
        length = int(alone.lengths[0, 0])
        assert torch.equal(together.tokens[row, 0, :length], alone.tokens[0, 0, :length])


def test_a_tensor_of_which_nobody_says_what_it_is_is_refused(toy):
    for rule in (Untold(torch.ones(1)), TopK(2) | Untold(torch.ones(1))):
        with pytest.raises(ValueError, match=r"`Untold\.b` must be annotated as `Number`") as told:
            generate(toy(V, 0), [[1]], filters=rule)
        assert "\n" not in str(told.value)
    check_rows(AllowedIds(torch.tensor([1, 2, 3])), 2)


def test_an_annotation_counts_as_a_string_and_as_a_type():
    rule = dataclass(frozen=True)(type("Plain", (Filter,), {"__annotations__": {"x": Number | None}}))
    given = rule(torch.tensor([1.0, 2.0, 3.0]))
    assert at_rows(given, torch.tensor([2, 0])).x.tolist() == [3.0, 1.0]
    joint = at_rows(Joint((TopK(torch.tensor([1, 2])), TopP(0.5))), torch.tensor([1]))
    assert joint.filters[0].k.tolist() == [2]


def test_whole_numbers_of_numpy_are_whole_numbers_and_booleans_are_none(toy):
    def told(count):
        return generate(toy(V, 1), [[1]], max_new_tokens=3, alternatives=count, top_k=np.int64(3), seeds=[np.int64(5)])

    wanted = generate(toy(V, 1), [[1]], max_new_tokens=3, alternatives=2, top_k=3, seeds=[5])
    assert torch.equal(told(np.int64(2)).tokens, wanted.tokens)
    assert torch.equal(told(np.int64(2)).alternative_ids, wanted.alternative_ids)
    for options, message in (
        ({"alternatives": True}, "`alternatives` must be a whole number of at least 0, got True"),
        ({"top_k": True}, "`top_k` must be whole, got True"),
        ({"seeds": [True]}, "`seeds` must be whole numbers of 64 bits"),
    ):
        with pytest.raises(ValueError, match=message):
            generate(toy(V, 1), [[1]], **options)
    with pytest.raises(ValueError, match="`joint` must be True or False, got 3"):
        Sample(joint=3)
