"""Text of a sequence while it is written: told as far as it can no longer change, cut in front of a stop string."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Sequence
from typing import Any

_HALF = "\ufffd"  # what decoders show for bytes that are no character, or not yet


class TextStream:
    """Decodes tokens as they come.

    Held back is what may still change: half a character at the end, and an end that a stop string may begin with. All
    that was told, and `close` at the end, join to `text`. Only the last tokens are decoded again, together with those
    before them: decoders join tokens, and treat the first one in their own way. A decoder must only append: one that
    cleans up spaces is told not to where it can be.

    Args:
        tokenizer: With `decode`, from a list of ids to a string.
        stop: Strings that end the text; it is cut in front of the first one.
        context: Tokens in front, whose text is not told.
    """

    def __init__(self, tokenizer: Any, *, stop: Sequence[str] = (), context: Sequence[int] = ()) -> None:
        self._decode, self._stop = _plain_decode(tokenizer), tuple(stop)
        before = self._decode(list(context)) if context else ""
        if before.endswith(_HALF):  # the first tokens may end that character, which then is no text of theirs
            context, before = (), ""
        self._ids, self._read = list(context), len(context)  # what is decoded again, and how much of it is done
        self._shown, self._seen = before, len(before)  # its text, and how much of it was taken
        self._held = ""
        self.text = ""
        self.stopped = False

    def push(self, *tokens: int) -> str:
        """Read tokens; the text that can be told now."""
        self._ids.extend(tokens)
        self._shown = self._decode(self._ids)
        whole = self._shown.rstrip(_HALF)
        new = whole[self._seen :]
        self._seen = max(self._seen, len(whole))
        if new and whole == self._shown:
            self._ids = self._ids[self._read :]
            self._read, self._shown = len(self._ids), self._decode(self._ids)
            self._seen = len(self._shown)
        return self._told(new)

    def copy(self) -> TextStream:
        """The same, to go on from in another way."""
        found = copy.copy(self)
        found._ids = list(self._ids)
        return found

    def close(self) -> str:
        """What is still held back: the sequence has ended."""
        told = "" if self.stopped else self._held + self._shown[self._seen :]
        self._held, self._seen = "", len(self._shown)
        self.text += told
        return told

    def _told(self, new: str) -> str:
        """New text, cut in front of a stop string, without an end that one may begin with."""
        self._held += new
        found = [place for one in self._stop if (place := self._held.find(one)) >= 0]
        self.stopped = self.stopped or bool(found)
        told = self._held[: min(found) if found else len(self._held) - self._begun()]
        self._held = "" if found else self._held[len(told) :]
        self.text += told
        return told

    def _begun(self) -> int:
        """Length of the longest end of the text that some stop string begins with."""
        longest = max((len(one) - 1 for one in self._stop), default=0)
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(one.startswith(self._held[-size:]) for one in self._stop):
                return size
        return 0


def _plain_decode(tokenizer: Any) -> Callable[[list[int]], str]:
    """Its `decode`, without the cleaning of spaces in front of marks that transformers does."""
    decode = tokenizer.decode
    try:
        taken = inspect.signature(decode).parameters
    except (TypeError, ValueError):  # compiled ones may have none
        return decode
    name = "clean_up_tokenization_spaces"
    return functools.partial(decode, **{name: False}) if name in taken else decode
