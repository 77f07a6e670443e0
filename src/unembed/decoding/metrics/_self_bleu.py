"""How alike the texts of a set are: BLEU of each against all the others, scored by sacrebleu."""

from __future__ import annotations

import importlib
import math
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from unembed.decoding.metrics._sequences import Sequences, grams, need_size, sequences_of

ORDER = 4
_FLOOR = 0.1  # counts for no match at all: method 1 of Chen and Cherry (2014), which Zhu et al. take from NLTK


def _reference(rows: Sequence[Sequence[Hashable]], order: int) -> float:
    """What it means, from Papineni et al. (2002): clipped matches, the nearest length, a geometric mean."""
    scores = []
    for place, row in enumerate(rows):
        others = [other for which, other in enumerate(rows) if which != place]
        logs, matched = [], False
        for n in range(1, min(order, len(row)) + 1):
            own = Counter(grams(row, n))
            clipped = sum(min(own[gram], max(Counter(grams(other, n))[gram] for other in others)) for gram in own)
            logs.append(math.log((clipped or _FLOOR) / (len(row) - n + 1)))
            matched |= clipped > 0
        nearest = min((abs(len(other) - len(row)), len(other)) for other in others)[1]
        brevity = min(1.0, math.exp(1 - nearest / len(row))) if row else 0.0
        scores.append(brevity * math.exp(sum(logs) / len(logs)) if matched else 0.0)
    return sum(scores) / len(scores)


def self_bleu(sequences: Sequences, *, order: int = ORDER) -> float:
    """Mean BLEU, from 0 to 1, of each sequence against all the others (Zhu et al., 2018, arXiv:1802.01886).

    On tokens as they are. n-grams without a match count a tenth; orders that a sequence is too short for are left out.
    High is alike. It rises with the number of sequences: compare sets of like size only.

    Args:
        sequences: Two sequences or more of token ids or words.
        order: Longest n-grams.

    Raises:
        ImportError: If sacrebleu is not installed.
        ValueError: If there are fewer than two sequences.
    """
    need_size("order", order)
    rows = sequences_of(sequences)
    if len(rows) < 2:
        raise ValueError(f"Self-BLEU needs two sequences, got {len(rows)}.")
    return _Matches(rows, order).mean()


def without_each(rows: Sequence[Sequence[Hashable]], order: int = ORDER) -> Float[np.ndarray, " s"]:
    """The same of the other sequences, without each one in turn; NaN where fewer than two are left."""
    matches = _Matches(rows, order)
    return np.array([matches.mean(without) if len(rows) > 2 else math.nan for without in range(len(rows))])


class _Matches:
    """Clipped matches of each sequence, and what each of them would be without another.

    A reference matters only where it is the one that holds an n-gram most often, so the score without each sequence
    needs no second count.
    """

    def __init__(self, rows: Sequence[Sequence[Hashable]], order: int) -> None:
        self._score = _library().compute_bleu
        self._order = order
        self._lengths = [len(row) for row in rows]
        self._totals = [[max(0, len(row) - n) for n in range(order)] for row in rows]
        found = [_clipped([Counter(grams(row, n)) for row in rows]) for n in range(1, order + 1)]
        self._matches = np.stack([matches for matches, _ in found], -1)
        self._lost = np.stack([lost for _, lost in found], -1)
        self._nearest = [self._others(place)[:2] for place in range(len(rows))]

    def mean(self, without: int | None = None) -> float:
        """Mean score of the sequences, or of all but one."""
        places = [place for place in range(len(self._lengths)) if place != without]
        return sum(self._one(place, without) for place in places) / len(places)

    def _one(self, place: int, without: int | None) -> float:
        matches = self._matches[place] - (0 if without is None else self._lost[without, place])
        nearest = next(other for other in self._nearest[place] if other != without)
        found = self._score(
            matches.tolist(),
            list(self._totals[place]),
            self._lengths[place],
            self._lengths[nearest],
            smooth_method="floor",
            smooth_value=_FLOOR,
            effective_order=True,
            max_ngram_order=self._order,
        )
        return found.score / 100

    def _others(self, place: int) -> list[int]:
        """The others, the nearest in length first, the shorter of two."""
        own = self._lengths[place]
        others = (other for other in range(len(self._lengths)) if other != place)
        return sorted(others, key=lambda other: (abs(self._lengths[other] - own), self._lengths[other]))


def _clipped(counts: list[Counter]) -> tuple[Int[np.ndarray, " s"], Int[np.ndarray, "s s"]]:
    """Matches of each sequence with the others; and, at [i, j], how many of those of j are lost without i."""
    matches = np.zeros(len(counts), dtype=np.int64)
    lost = np.zeros((len(counts), len(counts)), dtype=np.int64)
    holders: dict[Hashable, list[tuple[int, int]]] = {}
    for who, own in enumerate(counts):
        for gram, count in own.items():
            holders.setdefault(gram, []).append((count, who))
    for held in holders.values():
        if len(held) < 2:
            continue
        most = sorted(held, reverse=True)[:3]  # with one left out and another removed, one of these is the largest
        for count, who in held:
            (best, owner), (second, _) = [*(one for one in most if one[1] != who), (0, -1)][:2]
            matches[who] += min(count, best)
            lost[owner, who] += min(count, best) - min(count, second)
    return matches, lost


def check_installed() -> None:
    """Say before any work whether self-BLEU can be scored.

    Raises:
        ImportError: If sacrebleu is not installed; names the extra.
    """
    _library()


def _library() -> Any:
    """Sacrebleu's BLEU.

    Raises:
        ImportError: If sacrebleu is not installed; names the extra.
    """
    try:
        return importlib.import_module("sacrebleu.metrics.bleu").BLEU
    except ImportError as error:
        raise ImportError('Self-BLEU needs sacrebleu: pip install "unembed[metrics]"', name="sacrebleu") from error
