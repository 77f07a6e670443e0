"""Filters for vLLM: one request, and batches whose requests come, go and move. vLLM's own names are stood in for."""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum, auto
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from unembed.decoding import XTC, FrequencyPenalty, History, PresencePenalty, RepetitionPenalty, TopK
from unembed.integrations._vllm import request_processor, vllm_processor
from unembed.results import InputError

INF = torch.inf


class Direction(Enum):
    UNIDIRECTIONAL = auto()
    SWAP = auto()


@dataclass(frozen=True)
class Update:
    """As `vllm.v1.sample.logits_processor.BatchUpdate`."""

    batch_size: int = 0
    removed: list[int] = field(default_factory=list)
    added: list[tuple[int, Any, list[int] | None, list[int]]] = field(default_factory=list)
    moved: list[tuple[int, int, Direction]] = field(default_factory=list)


class TheirProcessor(ABC):
    """As `vllm.v1.sample.logits_processor.LogitsProcessor`: what a processor must define there."""

    @classmethod
    def validate_params(cls, sampling_params):
        return None

    @abstractmethod
    def __init__(self, vllm_config, device, is_pin_memory): ...

    @abstractmethod
    def apply(self, logits): ...

    @abstractmethod
    def is_argmax_invariant(self): ...

    @abstractmethod
    def update_state(self, batch_update): ...


@pytest.fixture
def vllm(monkeypatch):
    for name in ("vllm", "vllm.v1", "vllm.v1.sample", "vllm.v1.sample.logits_processor"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    sys.modules["vllm.v1.sample.logits_processor"].LogitsProcessor = TheirProcessor


def params(seed: int | None = None, **extra: Any) -> SimpleNamespace:
    return SimpleNamespace(seed=seed, extra_args=extra or None)


def test_one_request_is_the_filter_of_its_tokens():
    torch.manual_seed(0)
    filters = [RepetitionPenalty(1.3), PresencePenalty(0.5), TopK(4)]
    logits = torch.randn(12)
    given = logits.clone()
    found = request_processor(filters)([1, 2, 3], [3, 5], logits)
    chain = filters[0] | filters[1] | filters[2]
    assert torch.equal(found, chain(logits[None], History.of([[1, 2, 3]], [[3, 5]]))[0])
    assert torch.equal(logits, given)
    assert found.shape == (12,)


def test_a_coin_of_one_request_follows_its_seed_and_place():
    function, flat = request_processor(XTC(0.1, 0.5), seed=3), torch.zeros(4)
    tossed = [bool((function([1], [0] * count, flat) == -INF).any()) for count in range(40)]
    assert tossed == [bool((function([1], [0] * count, flat) == -INF).any()) for count in range(40)]
    assert 5 < sum(tossed) < 35


def test_a_batch_gives_each_row_what_its_request_alone_would_get(vllm):
    kind = vllm_processor(lambda given: (given.extra_args or {}).get("filters"))
    batch = kind(SimpleNamespace(), torch.device("cpu"), False)
    assert isinstance(batch, TheirProcessor)
    assert not batch.is_argmax_invariant()
    first, second, third = TopK(2), FrequencyPenalty(0.5), RepetitionPenalty(1.5)
    outputs = {"a": [4], "b": [5, 5], "d": [2]}
    torch.manual_seed(0)
    logits = torch.randn(5, 9)

    def expect(rows):
        """Each row: a filter, the prompt, the output; None where nothing is asked."""
        found = batch.apply(logits.clone())
        for row in range(len(logits)):
            wanted = logits[row]
            if row in rows:
                filters, prompt, output = rows[row]
                wanted = request_processor(filters)(prompt, output, wanted)
            assert torch.equal(found[row], wanted), row

    batch.update_state(None)
    expect({})
    added = [
        (0, params(filters=first), [1], outputs["a"]),
        (1, params(filters=second), [1], outputs["b"]),
        (2, params(), [1], []),
    ]
    batch.update_state(Update(3, added=added))
    rows = {0: (first, [1], outputs["a"]), 1: (second, [1], outputs["b"])}
    expect(rows)
    outputs["b"].append(7)  # vLLM goes on writing to the list
    expect(rows)
    batch.update_state(Update(3, moved=[(0, 1, Direction.SWAP)]))
    expect({1: rows[0], 0: rows[1]})
    batch.update_state(
        Update(
            3,
            removed=[1],
            added=[(4, params(filters=third), [2], outputs["d"])],
            moved=[(4, 1, Direction.UNIDIRECTIONAL)],
        )
    )
    expect({0: rows[1], 1: (third, [2], outputs["d"])})
    batch.update_state(Update(3, moved=[(1, 0, Direction.UNIDIRECTIONAL)]))
    expect({0: (third, [2], outputs["d"])})
    batch.update_state(Update(3, added=[(0, params(), [2], [])]))  # takes a place without having been removed
    expect({})


def test_one_filter_for_all_runs_once_a_step_and_seeds_keep_rows_apart(vllm):
    calls = []

    class Counted(XTC):
        def apply(self, scores, history):
            calls.append(len(scores))
            return super().apply(scores, history)

    batch = vllm_processor(Counted(0.1, 0.5))()
    outputs = [[], [0, 0, 0], [], [0]]
    batch.update_state(Update(4, added=[(row, params(seed=row // 2), [1], outputs[row]) for row in range(4)]))
    flat = torch.zeros(4, 6)
    found = batch.apply(flat.clone())
    assert calls == [4]
    for row in range(4):
        alone = request_processor(XTC(0.1, 0.5), seed=row // 2)([1], outputs[row], flat[row])
        assert torch.equal(found[row], alone)


def test_a_request_whose_filter_cannot_be_made_is_refused_at_the_door(vllm):
    kind = vllm_processor(lambda given: TopK(given.extra_args["k"]))
    kind.validate_params(params(k=3))
    with pytest.raises(ValueError, match=r"^`k` must be at least 1, got 0\.$"):
        kind.validate_params(params(k=0))


def test_a_prompt_of_embeddings_and_a_token_not_yet_known_count_as_none(vllm):
    batch = vllm_processor([PresencePenalty(1.0, scope="all"), TopK(9)])()
    batch.update_state(Update(1, added=[(0, params(), None, [3, -1])]))
    assert batch.apply(torch.zeros(1, 5)).tolist() == [[0, 0, 0, -1, 0]]


def test_half_precision_logits_stay_where_they_are(vllm):
    batch = vllm_processor(TopK(2))()
    batch.update_state(Update(1, added=[(0, params(), [1], [])]))
    logits = torch.arange(4.0).half()[None]
    found = batch.apply(logits)
    assert found is logits
    assert found.tolist() == [[-INF, -INF, 2.0, 3.0]]


def test_without_vllm_the_error_names_it():
    with pytest.raises(InputError, match=r"^Filters inside vLLM need vLLM: pip install vllm$"):
        vllm_processor(TopK(2))
