"""Records for the report: one from the real measurements, one with hostile text everywhere."""

from __future__ import annotations

import dataclasses
import json
from html.parser import HTMLParser
from typing import Any

import numpy as np
import pytest
import torch

from unembed import diagnostics
from unembed.results import Check, Finding, Record, Result, Table

MEASUREMENTS = (
    diagnostics.Spectrum,
    diagnostics.LogprobRank,
    diagnostics.Gradient,
    diagnostics.Coefficients,
    diagnostics.Saturation,
)
HOSTILE = (
    "<script>alert(1)</script>",
    "</script><script>alert(2)</script><!-- <script>",
    '"><img src=x onerror=alert(3)>',
    "' onmouseover='alert(4)",
    "javascript:alert(5)",
    "{{ 7 * 7 }}{% raw %}",
    "line\u2028and\u2029paragraph\r\nand\ttab",
    "right\u202eto left\u200b",
    "lone \udc80 surrogate \ud800",
    "nul \x00 bell \x07 escape \x1b[31m",
    "%{customdata[0]}<b>bold</b><a href='javascript:alert(6)'>link</a>",
    "",
)


VOID = {"meta", "link", "img", "br", "input", "hr"}


class Page(HTMLParser):
    """What a browser would make of a page: elements, attributes, visible text; fails on tags that do not match."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.scripts: list[tuple[dict[str, str], str]] = []
        self.styles: list[str] = []
        self.text: list[str] = []
        self.declared = ""
        self._open: list[tuple[str, dict[str, str]]] = []
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"

    def handle_decl(self, decl: str) -> None:
        self.declared = decl

    def handle_comment(self, data: str) -> None:
        raise AssertionError(f"a comment in the page: {data[:80]}")

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self._open.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open, f"</{tag}> without a start"
        assert self._open[-1][0] == tag, f"</{tag}> inside <{self._open[-1][0]}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        tag, attributes = self._open[-1] if self._open else ("", {})
        if tag == "script":
            self.scripts.append((attributes, data))
        elif tag == "style":
            self.styles.append(data)
        else:
            self.text.append(data)

    def words(self) -> str:
        return " ".join(" ".join(self.text).split())

    def table(self, number: int) -> str:
        return next(json.loads(data) for about, data in self.scripts if about.get("id") == f"table-{number}")


def measure(*, softcap: float | None = None, padding: int = 0, documents: int = 12, **head: Any) -> Record:
    """A record of every measurement on a small random head."""
    vocab, width, tokens = 300, 16, 240
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(vocab + padding, width, generator=generator) + 0.3
    linear = diagnostics.LinearHead(
        weight[:vocab],
        softcap=softcap,
        tokens=[f"token {i}" for i in range(vocab)],
        extra_rows=weight[vocab:] if padding else None,
    )
    hidden = torch.randn(tokens, width, generator=generator)
    targets = torch.randint(0, vocab, (tokens,), generator=generator)
    results = {}
    for kind in MEASUREMENTS:
        accumulator = kind(linear)
        accumulator.update(hidden, targets, documents=torch.arange(tokens) % documents)
        results[kind.name] = accumulator.result()
    return Record(
        model={"source": "someone/small-model", "kind": "safetensors", "architecture": "llama", "hash": "ab" * 32},
        head={
            "kind": "linear",
            "in_features": width,
            "vocab_rows": vocab + padding,
            "vocab_tokens": vocab,
            "tied": True,
            "bias": False,
            "softcap": softcap,
            "scale": 1.0,
            "dtype": "float32",
            "padding_rows": padding,
            "rank_bound": linear.rank_bound,
            **head,
        },
        integrity=[
            Check("UNE001", "ok", "1 safetensors file, whole."),
            Check("UNE006", "note", "The tokenizer's count is used."),
            Check("UNE005", "warning", "3 rows are zero."),
        ],
        results=results,
        provenance={
            "tokens": tokens,
            "seed": 12345,
            "device": "cpu",
            "text": {"kind": "files", "number": 2, "files": [{"name": "a.txt", "bytes": 10}, {"name": "b.txt"}]},
            "versions": {"torch": "2.13.0"},
            "checks": list(results),
            "command": "unembed audit someone/small-model --seed 12345",
        },
        timing={"started": "2026-01-01T12:00:00+00:00", "seconds": {"total": 1.5}},
    )


@pytest.fixture(scope="session")
def parse() -> type[Page]:
    return Page


@pytest.fixture(scope="session")
def record() -> Record:
    return measure()


@pytest.fixture(scope="session")
def capped() -> Record:
    return measure(softcap=5.0)


@pytest.fixture(scope="session")
def padded() -> Record:
    """With padding rows, and too few documents for an interval."""
    return measure(padding=4, documents=3)


@pytest.fixture(scope="session")
def unknown() -> Result:
    """A measurement that this version of the report has never heard of."""
    table = Table("flux_values", "Flux by height", {"height": np.arange(3), "flux": np.array([0.5, np.nan, 1e-9])})
    finding = Finding("UNE777", "error", "Flux runs backwards", "flux −1.21, null 0", "Turn it around.", "Not a fire.")
    values = {"flux_total": 1.21, "by_side": {"left": 1, "right": 2}, "names": ["a", "b"], "nothing": None}
    return Result("flux", "UNE777", "Flux of the head", values, (table,), (finding,))


@pytest.fixture(scope="session")
def hostile(record: Record) -> Record:
    """The record with hostile text wherever text can stand."""
    everything = " | ".join(HOSTILE)
    tokens = np.array([*HOSTILE, everything], dtype=str)
    table = Table(
        everything,
        everything,
        {"token": tokens, everything: np.arange(len(tokens))},
        {"token": everything, everything: everything},
    )
    spectrum = record.results["spectrum"]
    extremes = dataclasses.replace(
        spectrum.table("spectrum_extremes"),
        columns={
            name: column[: len(tokens) - 1] for name, column in spectrum.table("spectrum_extremes").columns.items()
        }
        | {"token": tokens[:-1]},
    )
    tables = tuple(extremes if table.name == "spectrum_extremes" else table for table in spectrum.tables)
    values = {everything: everything, "list": list(HOSTILE), "group": {everything: everything}}
    finding = Finding(everything, "warning", everything, everything, everything, everything)
    results = dict(record.results) | {
        "spectrum": dataclasses.replace(spectrum, title=everything, tables=tables),
        "coefficients": Result("coefficients", "UNE104", everything, None, reason=everything),
        everything: Result(everything, everything, everything, values, (table,), (finding,)),
        "../../etc/passwd": Result("../../etc/passwd", "UNE9", "x", {"a": 1}),
        "summary": Result("summary", "UNE9", "the name of another section", {"a": 1}),
    }
    facts = {everything: everything, "nested": {everything: list(HOSTILE)}}
    return dataclasses.replace(
        record,
        model={"source": everything, "architecture": everything} | facts,
        head=record.head | facts,
        integrity=[Check(everything, "warning", everything), Check(everything, "ok", everything)],
        results=results,
        provenance=record.provenance | facts | {"command": everything, "text": {"name": everything}},
        timing=facts,
    )
