"""Token strings are hostile text: show them so that nothing hides and nothing runs."""

from __future__ import annotations

import unicodedata

_HIDDEN = {"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"}  # controls, bidi marks, surrogates, private use, unassigned
_SHORT = {"\n": "\\n", "\t": "\\t", "\r": "\\r", "\\": "\\\\", '"': '\\"'}


def visible(token: str, limit: int = 60) -> str:
    r"""`token` in double quotes, every character that a reader cannot see as an escape.

    The quotes make spaces and the empty string visible and keep a spreadsheet from taking `=...` for a formula.
    HTML escaping is the template's work and comes on top.

    Args:
        token: Any string, lone surrogates included.
        limit: Longest result between the quotes; what is cut shows as `…`.

    Returns:
        Printable text that encodes to UTF-8.
    """
    parts: list[str] = []
    length = 0
    for character in token:
        part = _SHORT.get(character, character)
        if part == character and _hidden(character):
            code = ord(character)
            part = f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
        length += len(part)
        if length > limit:
            parts.append("…")
            break
        parts.append(part)
    return '"' + "".join(parts) + '"'


def _hidden(character: str) -> bool:
    category = unicodedata.category(character)
    # Combining marks would pile up on the neighbours, unusual spaces look like the usual one.
    return category in _HIDDEN or category.startswith("M") or (category == "Zs" and character != " ")
