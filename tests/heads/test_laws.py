"""Every head of the package through `testing.check_head`: a head that is added is checked with nothing to edit here."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from unembed import heads
from unembed.testing import check_head

KINDS = list(dict.fromkeys(heads.HEADS.values()))


def _examples() -> list[Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return [
            pytest.param(head, id=f"{kind.__name__}-{place}")
            for kind in KINDS
            for place, head in enumerate(kind.examples(8, 13))
        ]


@pytest.mark.parametrize("head", _examples())
def test_every_head_obeys_the_laws(head: Any) -> None:
    check_head(head)


@pytest.mark.compile
@pytest.mark.parametrize("head", _examples())
def test_every_head_compiles_as_one_graph(head: Any) -> None:
    with warnings.catch_warnings():
        # Dynamo and Inductor warn about their own internals.
        warnings.simplefilter("ignore")
        check_head(head, only=["compile_cross_entropy"], compile="aot_eager")


def test_no_head_passes_for_want_of_checks() -> None:
    for kind in KINDS:
        head = kind.examples(8, 13)[0]
        outcomes = check_head(head, only=["law", "nll", "gradients", "topk", "sample"])
        assert [one.status for one in outcomes] == ["passed"] * 5, outcomes
