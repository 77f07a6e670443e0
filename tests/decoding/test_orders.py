"""Presets of engines, on examples worked by hand in which their orders keep different tokens."""

from __future__ import annotations

import math

import pytest
import torch

from unembed.decoding import (
    DRY,
    XTC,
    AllowedIds,
    Epsilon,
    Eta,
    FrequencyPenalty,
    History,
    Joint,
    MinP,
    NoRepeatNgram,
    PresencePenalty,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopNSigma,
    TopP,
    Typical,
)
from unembed.decoding._orders import ordered

INF = math.inf
ENGINES = ("unembed", "transformers", "vllm", "llama.cpp", "sglang")


def log(*probabilities: float) -> torch.Tensor:
    return torch.tensor(probabilities, dtype=torch.float64).log()


def kept(found: torch.Tensor) -> list[int]:
    return (found > -INF).nonzero().squeeze(-1).tolist()


def by_engine(scores: torch.Tensor, **options) -> dict[str, list[int]]:
    return {order: kept(ordered(order=order, **options)(scores)) for order in ENGINES}


def test_top_k_with_top_p_one_after_the_other_or_joint():
    # One after the other: .4 / (.4 + .3) = .571 has the mass of .5. Joint: .4 has not, .4 + .3 has.
    found = by_engine(log(0.4, 0.3, 0.2, 0.1), top_k=2, top_p=0.5)
    assert found == {"unembed": [0], "transformers": [0], "vllm": [0], "llama.cpp": [0], "sglang": [0, 1]}


def test_sglang_is_joint_only_without_min_p():
    # With min-p, top-k and top-p renormalise there too; a min-p of 0 is none.
    assert kept(ordered(order="sglang", top_k=2, top_p=0.5, min_p=0.01)(log(0.4, 0.3, 0.2, 0.1))) == [0]
    assert kept(ordered(order="sglang", top_k=2, top_p=0.5, min_p=0.0)(log(0.4, 0.3, 0.2, 0.1))) == [0, 1]


def test_min_p_before_top_p_or_after():
    # vLLM: min-p drops what is below .3 * .5 = .15; .5, .2, .2 become .556, .222, .222; .556 + .222 = .778 has the mass
    # of .75. Top-p first: .5 + .2 = .7 has not, .9 has; then min-p drops nothing of the three.
    found = by_engine(log(0.5, 0.2, 0.2, 0.05, 0.05), top_p=0.75, min_p=0.3)
    assert found == {
        "unembed": [0, 1, 2],
        "transformers": [0, 1, 2],
        "vllm": [0, 1],
        "llama.cpp": [0, 1, 2],
        "sglang": [0, 1, 2],
    }


def test_temperature_first_or_last():
    # T = 2 makes .6, .3, .1 proportional to .775, .548, .316: .473, .334, .193. Before it .6 has the mass of .55; after
    # it .473 has not.
    scores = log(0.6, 0.3, 0.1)
    found = by_engine(scores, temperature=2.0, top_p=0.55)
    assert found == {"unembed": [0, 1], "transformers": [0, 1], "vllm": [0, 1], "llama.cpp": [0], "sglang": [0, 1]}
    # Min-p .2 before T = 2: .1 < .2 * .6; after it .193 > .2 * .473.
    assert kept(ordered(order="llama.cpp", temperature=2.0, min_p=0.2)(scores)) == [0, 1]
    assert kept(ordered(order="transformers", temperature=2.0, min_p=0.2)(scores)) == [0, 1, 2]


def test_typical_before_top_p_or_after():
    # .5, .25, .125, .125: by distance to the entropy ids 1, 0, 2, 3 (test_filters_selecting.py). llama.cpp, typical .7
    # first: 1 and 0, as .25 + .5 = .75; of these top-p .6 keeps id 0, which has .667. The others take top-p first: .5
    # + .25 have .6; of .667 and .333 with H = .637 id 0 is nearer (.231 against .462), but .667 has not .7: both stay.
    found = {
        order: kept(ordered(order=order, top_p=0.6, typical_p=0.7)(log(0.5, 0.25, 0.125, 0.125)))
        for order in ("unembed", "transformers", "llama.cpp")
    }
    assert found == {"unembed": [0, 1], "transformers": [0, 1], "llama.cpp": [0]}


def test_what_penalties_count_and_in_which_order_they_apply():
    # Id 0 is in the prompt, id 1 was written twice; scores 4 and 3, all penalties at once.
    scores, history = torch.tensor([[4.0, 3.0, 1.0]]), History.of([[0]], [[1, 1]])
    options = {"repetition_penalty": 2.0, "presence_penalty": 0.5, "frequency_penalty": 0.25}
    found = {
        order: ordered(order=order, **options)(scores, history)[0].tolist()
        for order in ENGINES
        if order != "transformers"
    }
    assert found == {
        "unembed": [2.0, 0.5, 1.0],  # 4 / 2; 3 / 2 - .5 - 2 * .25
        "vllm": [2.0, 0.5, 1.0],
        "llama.cpp": [1.25, 0.5, 1.0],  # the prompt counts: 4 / 2 - .5 - .25
        "sglang": [4.0, 1.0, 1.0],  # the prompt does not count at all; (3 - .5 - 2 * .25) / 2
    }
    assert ordered(order="transformers", repetition_penalty=2.0)(scores, history).tolist() == [[2.0, 1.5, 1.0]]


def test_llama_cpp_looks_back_on_64_tokens():
    scores = torch.ones(1, 3)
    history = History.of([[0] + [1] * 63], [[1]])
    assert ordered(order="llama.cpp", presence_penalty=0.5)(scores, history).tolist() == [[1.0, 0.5, 1.0]]
    assert ordered(order="llama.cpp", presence_penalty=0.5, penalty_window=65)(scores, history).tolist() == [
        [0.5, 0.5, 1.0]
    ]
    assert ordered(presence_penalty=0.5, penalty_window=1)(scores, history).tolist() == [[1.0, 0.5, 1.0]]


def test_what_engines_make_of_a_low_temperature():
    scores = torch.tensor([[0.0, 0.005]])
    ratio = {order: ordered(order=order, temperature=2e-3)(scores).diff().item() for order in ENGINES}
    assert ratio["vllm"] == pytest.approx(0.5)  # .005 / .01
    assert all(ratio[order] == pytest.approx(2.5) for order in ENGINES if order != "vllm")
    each = torch.tensor([5e-6, 5e-7, 2e-3, 0.5], dtype=torch.float64)
    wanted = {"vllm": [0, 0, 1e-2, 0.5], "sglang": [5e-6, 0, 2e-3, 0.5], "llama.cpp": each.tolist()}
    for order, values in wanted.items():
        (found,) = ordered(order=order, temperature=each)
        assert found.temperature.tolist() == pytest.approx(values, abs=0), order
        for one, value in zip(each.tolist(), values, strict=True):
            assert list(ordered(order=order, temperature=one)) == [Temperature(value)]


def test_the_whole_order_of_each():
    every = {
        "temperature": 0.8,
        "top_k": 40,
        "top_p": 0.95,
        "min_p": 0.05,
        "typical_p": 0.9,
        "epsilon": 1e-3,
        "eta": 2e-3,
        "top_n_sigma": 2.0,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "no_repeat_ngram": 3,
        "dry": DRY(0.8),
        "xtc": XTC(0.1, 0.5),
    }
    one = {
        Temperature: Temperature(0.8),
        TopK: TopK(40),
        TopP: TopP(0.95),
        MinP: MinP(0.05),
        Typical: Typical(0.9),
        Epsilon: Epsilon(1e-3),
        Eta: Eta(2e-3),
        TopNSigma: TopNSigma(2.0),
        NoRepeatNgram: NoRepeatNgram(3),
        DRY: DRY(0.8),
        XTC: XTC(0.1, 0.5),
    }
    repeats = [RepetitionPenalty(1.1), FrequencyPenalty(0.3), PresencePenalty(0.2)]
    wanted = {
        "unembed": [*repeats, NoRepeatNgram, DRY, Temperature, TopNSigma, TopK, TopP, MinP, Typical, Epsilon, Eta, XTC],
        "transformers": [RepetitionPenalty(1.1), NoRepeatNgram, Temperature, TopK, TopP, MinP, Typical, Epsilon, Eta],
        "vllm": [*repeats, Temperature, MinP, TopK, TopP],
        "llama.cpp": [
            RepetitionPenalty(1.1, window=64),
            FrequencyPenalty(0.3, scope="all", window=64),
            PresencePenalty(0.2, scope="all", window=64),
            DRY,
            TopNSigma,
            TopK,
            Typical,
            TopP,
            MinP,
            XTC,
            Temperature,
        ],
        "sglang": [
            FrequencyPenalty(0.3),
            PresencePenalty(0.2),
            RepetitionPenalty(1.1, scope="written"),
            Temperature,
            TopK,
            TopP,
            MinP,
        ],
    }
    lacking = {
        "unembed": set(),
        "transformers": {"presence_penalty", "frequency_penalty", "top_n_sigma", "dry", "xtc"},
        "vllm": {"no_repeat_ngram", "dry", "top_n_sigma", "typical_p", "epsilon", "eta", "xtc"},
        "llama.cpp": {"no_repeat_ngram", "epsilon", "eta"},
        "sglang": {"no_repeat_ngram", "dry", "top_n_sigma", "typical_p", "epsilon", "eta", "xtc"},
    }
    for order in ENGINES:
        options = {name: value for name, value in every.items() if name not in lacking[order]}
        assert list(ordered(order=order, **options)) == [one.get(each, each) for each in wanted[order]], order
        for name in lacking[order]:
            with pytest.raises(ValueError) as told:  # noqa: PT011
                ordered(order=order, **{name: every[name]})
            assert str(told.value) == f"order={order!r} has no `{name}`."
    joint = {name: every[name] for name in ("top_k", "top_p")}
    assert list(ordered(order="sglang", **joint)) == [Joint((TopK(40), TopP(0.95)))]


def test_what_changes_nothing_adds_nothing():
    assert len(ordered()) == 0
    neutral = {
        "temperature": 1,
        "top_p": 1.0,
        "min_p": 0.0,
        "repetition_penalty": 1.0,
        "presence_penalty": 0,
        "frequency_penalty": 0.0,
    }
    for order in ("unembed", "vllm", "llama.cpp", "sglang"):
        assert len(ordered(order=order, **neutral)) == 0
    assert len(ordered(order="unembed", typical_p=1.0, epsilon=0.0, eta=0)) == 0
    assert list(ordered(temperature=0, top_p=0.0)) == [Temperature(0), TopP(0.0)]
    assert len(ordered(temperature=torch.ones(2), top_p=torch.ones(2))) == 2  # tensors are not looked into


def test_constraints_go_in_front():
    scores = log(0.5, 0.3, 0.2)
    assert kept((AllowedIds([1, 2]) | ordered(order="vllm", top_p=0.6))(scores)) == [1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"order": "llamacpp"},
            "`order` must be one of unembed, transformers, vllm, llama.cpp, sglang, got 'llamacpp'.",
        ),
        ({"order": "vllm", "penalty_window": 9}, "order='vllm' has no `penalty_window`."),
        ({"top_k": 0}, "`k` must be at least 1, got 0."),
        ({"order": "vllm", "temperature": -1.0}, "`temperature` must be at least 0, got -1.0."),
        ({"order": "vllm", "temperature": math.nan}, "`temperature` must be at least 0, got nan."),
    ],
)
def test_what_is_wrong_is_said_in_one_line(options, message):
    with pytest.raises(ValueError) as told:  # noqa: PT011
        ordered(**options)
    assert str(told.value) == message
