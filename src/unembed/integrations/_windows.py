"""Which tokens are predicted from which: documents cut into windows.

The rule. A document is tokenised with the tokenizer's special tokens. Its first token that is not a leading special
one can be predicted if there is a leading special token (bos); every later token can. Window `r` of a document is the
`r`-th run of `length` predicted tokens, so a token is predicted at most once. The input of window 0 is the document's
beginning; of a later window, the leading special tokens again (if the tokenizer adds any) and then the tokens from the
last one before its first target. Round `r` takes window `r` of every document in turn, and rounds follow each other
until exactly `tokens` predictions are planned (the last window is cut) or the text is exhausted.

`length = min(context, max(64, tokens // 32))`: at least 32 documents are used when there are that many.
"""

from __future__ import annotations

import random
from collections.abc import Container, Iterable, Iterator, Sized
from dataclasses import dataclass
from typing import Any

import numpy as np

from unembed.results import InputError
from unembed.text import Document, check_documents, require_document

_SETTLED = 64  # tokens dropped at the end of a cut text: the cut may have changed them


@dataclass(frozen=True)
class Window:
    """One run of predictions.

    Args:
        inputs: What the model reads, T ids.
        targets: What it should say after the last `len(targets)` of the inputs.
        document: Running number of the document in the order it was first met.
        window: Running number of the window over the whole run.
    """

    inputs: np.ndarray
    targets: np.ndarray
    document: int
    window: int


def window_length(tokens: int, context: int) -> int:
    """Predictions in a full window; `context` is the most a window may hold."""
    return min(context, max(64, tokens // 32))


def plan_windows(
    tokenizer: Any, documents: Iterable[Document], *, tokens: int, context: int, seed: int
) -> Iterator[Window]:
    """The windows in the order they are planned (see the rule above).

    Documents held in memory (with a length) come in an order shuffled by `seed`, streams in their own. A text is
    tokenised from its start as far as the rounds so far need, in steps that double, so a long document is never
    tokenised whole for a few windows of it and a source is read again only at rounds 1, 2, 4, 8, ...

    Between the readings, 4 bytes are held for each token of the windows to come until the next one, and for one more
    a document: at round `r` no more than have been planned so far, so `4 * tokens` bytes at most.

    Args:
        tokenizer: A transformers tokenizer.
        documents: Gives the same documents each time it is iterated.
        tokens: Predictions in all.
        context: Most predictions in one window.
        seed: Of the shuffle.

    Raises:
        InputError: If `documents` can be read only once, or an item is not a `Document`.
    """
    check_documents(documents)
    length = window_length(tokens, context)
    leading = np.asarray(leading_ids(tokenizer), dtype=np.int64)
    first = max(len(leading), 1)  # place of a document's first target
    order = _Order(documents, seed)
    live: dict[int, np.ndarray] = {}  # documents that may have a next window -> ids from the one before its targets
    left, count, rounds, known = tokens, 0, 0, 0
    while left > 0 and (rounds == 0 or live):
        source: Iterable[tuple[int, np.ndarray]] = ((number, live[number]) for number in list(live))
        if rounds >= known:
            known = max(1, 2 * rounds)
            start = first + rounds * length - 1 if rounds else 0
            source = order.read(tokenizer, None if rounds == 0 else live, slice(start, first + known * length))
        for document, held in source:
            # The beginning of a document has its leading tokens in it, a later window gets them again.
            ids = np.concatenate([leading, held]) if rounds else held
            start = len(leading) + 1 if rounds else first
            targets = ids[start : start + length]
            if len(targets) == 0:
                live.pop(document, None)
                continue
            inputs = ids[: start + len(targets) - 1]
            surplus = max(0, len(targets) - left)
            end = len(targets) - surplus
            yield Window(inputs[: len(inputs) - surplus], targets[:end], document, count)
            count += 1
            left -= end
            if left == 0:
                return
            if len(targets) == length:
                live[document] = ids[start + length - 1 :].astype(np.int32)
            else:
                live.pop(document, None)
        rounds += 1


class _Order:
    """The documents with their ids, in a fixed order, tokenised as far as asked."""

    def __init__(self, documents: Iterable[Document], seed: int) -> None:
        self.documents = documents
        if isinstance(documents, Sized):
            self.documents = list(documents)
            random.Random(seed).shuffle(self.documents)

    def read(self, tokenizer: Any, numbers: Container[int] | None, part: slice) -> Iterator[tuple[int, np.ndarray]]:
        """Those of the documents called `numbers`, or all; of each the ids in `part` that it has."""
        for number, document in enumerate(self.documents):
            if numbers is None or number in numbers:
                yield number, encode_prefix(tokenizer, require_document(document).text, part.stop)[part]


def leading_ids(tokenizer: Any) -> list[int]:
    """The special tokens that the tokenizer puts before a text, usually none or the bos token."""
    text = "a"
    bare = list(tokenizer(text, add_special_tokens=False)["input_ids"])
    full = list(tokenizer(text)["input_ids"])
    for start in range(len(full) - len(bare) + 1):
        if full[start : start + len(bare)] == bare:
            return full[:start]
    return []


def encode_prefix(tokenizer: Any, text: str, need: int) -> np.ndarray:
    """The first ids of `text`, special tokens included: all of them, or at least `need`.

    Only a beginning of the text that is long enough is tokenised, and the last 64 tokens before the cut are dropped,
    because the cut may have changed them.
    """
    characters = 8 * need + 1024
    while True:
        whole = characters >= len(text)
        ids = np.asarray(tokenizer(_sound(text[:characters]), verbose=False)["input_ids"], dtype=np.int64)
        if whole:
            return ids
        if len(ids) - _SETTLED >= need:
            return ids[: len(ids) - _SETTLED]
        characters *= 4


def _sound(text: str) -> str:
    """`text` with lone surrogates, which JSON allows and tokenizers refuse, as U+FFFD."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def check_ids(ids: np.ndarray, rows: int, what: str) -> None:
    """Refuse an id that the model has no row for.

    Raises:
        InputError: If there is one.
    """
    if len(ids) and int(ids.max()) >= rows:
        raise InputError(
            f"The tokenizer gives id {int(ids.max())}, but the model's {what} has {rows} rows; "
            f"tokenizer and model do not belong together."
        )
