"""The row of key numbers, each with its null, bound, tolerance or interval."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from unembed.report._gradient import no_interval
from unembed.report._words import count, number, percent, span
from unembed.results import Record


@dataclass(frozen=True)
class Key:
    """One key number: what it is, the number, its unit, and what to hold it against."""

    name: str
    value: str
    unit: str
    against: str
    link: str


def keys(record: Record) -> list[Key]:
    """The key numbers of the measurements that were made."""
    makers = {
        "gradient": _gradient,
        "logprob_rank": _rank,
        "saturation": _predictions,
        "spectrum": _spectrum,
    }
    found: list[Key] = []
    for name, maker in makers.items():
        result = record.results.get(name)
        if result is not None and result.values:
            found += maker(result.values, record.head)
    return [*found, *_padding(record)]


def _gradient(values: dict[str, Any], head: dict[str, Any]) -> list[Key]:
    name = "raw" if values["centred"] is None else "centred"
    numbers = values[name]
    kept, null, ends = numbers["kept"], numbers["kept_null"], numbers["ratio_ci95"]
    interval = f"95 % interval {span(ends)}" if ends else no_interval(values)
    convention = "raw" if name == "raw" else "row-centred"
    random_head = math.sqrt(max(0.0, 1 - null**2))
    return [
        Key(
            "Gradient kept over its null",
            number(numbers["ratio"]),
            "×",
            f"1{_give(numbers)} is a random subspace. {interval}. Kept {number(kept)} of the norm, "
            f"null {number(null)}, {convention} rank {number(numbers['rank'])}",
            "gradient",
        ),
        Key(
            "Gradient norm destroyed",
            percent(numbers["destroyed"]),
            "",
            f"A random head of the same rank: {percent(random_head)}. Compression measured",
            "gradient",
        ),
    ]


def _give(numbers: dict[str, Any]) -> str:
    sd = numbers.get("ratio_null_sd")
    return f" ± {number(1.96 * sd)} (95 %)" if sd is not None else ""


def _rank(values: dict[str, Any], head: dict[str, Any]) -> list[Key]:
    bound = values["bound"]
    limit = f"{number(bound)} is the bound" if bound is not None else "No bound under a soft-cap; this is a lower bound"
    contexts = count(values["tokens"], "context")
    if values.get("distinct_contexts") is not None:
        contexts += f", {number(values['distinct_contexts'])} distinct"
    return [
        Key(
            "Rank of log P",
            number(values["rank"]),
            f"of {number(bound)}" if bound is not None else "",
            f"{limit}. {contexts}, tolerance {number(values['tolerance'])}",
            "logprob_rank",
        )
    ]


def _predictions(values: dict[str, Any], head: dict[str, Any]) -> list[Key]:
    loss, entropy, bits = values["loss"], values["entropy"], values["bits_per_byte"]
    uniform = number(values["entropy_uniform"])
    more = f". {number(bits)} bits a byte" if bits is not None else ""
    return [
        Key("Loss", number(loss["mean"]), "nats", f"{_interval(loss)}. Uniform guess {uniform}{more}", "saturation"),
        Key("Entropy", number(entropy["mean"]), "nats", f"{_interval(entropy)}. Uniform {uniform}", "saturation"),
    ]


def _interval(numbers: dict[str, Any]) -> str:
    ends = numbers["ci95"]
    return f"95 % interval {span(ends)}" if ends else "No interval"


def _spectrum(values: dict[str, Any], head: dict[str, Any]) -> list[Key]:
    width = head.get("in_features")
    centred = values["centred"]["rank"]
    return [
        Key(
            "Rank of W",
            number(values["rank"]),
            f"of {number(width)}" if width is not None else "",
            f"Row-centred {number(centred)}. Tolerance {number(values['tolerance'])}",
            "spectrum",
        )
    ]


def _padding(record: Record) -> list[Key]:
    padding = record.head.get("padding_rows")
    if padding is None:
        return []
    rows, tokens = record.head.get("vocab_rows"), record.head.get("vocab_tokens")
    saturation = record.results.get("saturation")
    probability = ((saturation.values if saturation else None) or {}).get("padding_probability")
    drawn = f". They draw {number(probability)} of the probability" if probability is not None else ""
    sizes = f"{number(rows)} rows, {number(tokens)} ids" if tokens is not None else f"{number(rows)} rows, no tokenizer"
    return [Key("Padding rows", number(padding), "", f"{sizes}{drawn}", "integrity")]
