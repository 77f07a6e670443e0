"""Token strings are hostile text: show them so that nothing hides and nothing runs."""

from __future__ import annotations

import re
import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # controls, bidi marks, surrogates, private use, unassigned
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", '"': '\\"'}
_MARKS = 2  # combining marks shown on a letter: Hindi, Thai and Vietnamese need two, piles have more
# Letters, marks and symbols without ink: fillers, joiners, variation selectors (Default_Ignorable_Code_Point), blanks.
_INKLESS = re.compile(
    r"[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2800\u3164\ufe00-\ufe0f\uffa0"
    r"\U00013441\U00013442\U0001d159\U000e0100-\U000e01ef]"
)


def visible(token: str, limit: int = 60) -> str:
    r"""`token` in double quotes, every character that a reader cannot see as an escape.

    The quotes make spaces and the empty string visible and keep a spreadsheet from taking `=...` for a formula. What is
    not cut is a Python literal: `ast.literal_eval` gives the token back. Combining marks stay where a script needs
    them, at most two on a letter. HTML escaping is the template's work and comes on top.

    Args:
        token: Any string, lone surrogates included.
        limit: Longest result between the quotes; what is cut shows as `…` after it.

    Returns:
        Printable text that encodes to UTF-8.
    """
    parts: list[str] = []
    length = 0
    room = 0  # marks that may still follow
    for character in token:
        category = unicodedata.category(character)
        part = _SHORT.get(character, character)
        if category[0] == "M" and room and not _INKLESS.match(character):
            room -= 1
        else:
            room = _MARKS if category[0] == "L" and not _INKLESS.match(character) else 0
            if part == character and _hidden(character, category):
                part = _escape(ord(character))
        length += len(part)
        if length > limit:
            parts.append("…")
            break
        parts.append(part)
    return '"' + "".join(parts) + '"'


def _hidden(character: str, category: str) -> bool:
    # A mark on its own would sit on its neighbour, an unusual space looks like the usual one.
    unseen = category in _HIDDEN or category[0] == "M" or (category == "Zs" and character != " ")
    return unseen or _INKLESS.match(character) is not None


def _escape(code: int) -> str:
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
