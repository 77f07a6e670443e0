"""Token strings are shown so that nothing hides, and come back to the last character."""

import ast
import itertools
import unicodedata

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from unembed.text import visible

# Inkless letters, marks and symbols: most of Default_Ignorable_Code_Point outside Cf and Cn, and Braille's blank.
INKLESS = (
    "\u034f\u115f\u1160\u17b4\u17b5\u180b\u180c\u180d\u180f\u2800\u3164\ufe00\ufe0e\ufe0f\uffa0\U000e0100\U000e01ef"
)


def _hides(character):
    category = unicodedata.category(character)
    spaces = category == "Zs" and character != " "
    return category[0] == "C" or category in ("Zl", "Zp") or spaces or character in INKLESS


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("", '""'),
        (" the", '" the"'),
        ("<script>alert(1)</script>", '"<script>alert(1)</script>"'),  # the template escapes; here it is only visible
        ("a\x00b\x1b[31m\x7f", '"a\\x00b\\x1b[31m\\x7f"'),
        ("\n\t\r", '"\\n\\t\\r"'),
        ("\u202egnp.exe\u2066", '"\\u202egnp.exe\\u2066"'),
        ("\u200b\u200d\ufeff\u00ad", '"\\u200b\\u200d\\ufeff\\xad"'),
        ("\ud800x\udfff", '"\\ud800x\\udfff"'),
        ("\ud83d\ude00", '"\\ud83d\\ude00"'),  # two lone surrogates, not the smiley
        ("😀", '"😀"'),
        ("\U000e0041", '"\\U000e0041"'),  # tag character
        ("\ue000\u0378", '"\\ue000\\u0378"'),  # private use, unassigned
        ("\u00a0\u3000\u2003", '"\\xa0\\u3000\\u2003"'),
        ("\u2028\u2029\x85", '"\\u2028\\u2029\\x85"'),
        ('say "hi"\\n', '"say \\"hi\\"\\\\n"'),
        ("=1+1", '"=1+1"'),
        ("▁Ġ", '"▁Ġ"'),
        ("\u3164\u2800a\ufe0f\u034f", '"\\u3164\\u2800a\\ufe0f\\u034f"'),  # letters and marks without ink
    ],
)
def test_by_example(token, shown):
    assert visible(token) == shown


@pytest.mark.parametrize("word", ["नमस्ते", "किं", "हिन्दी", "ที่", "ภาษาไทย", "தமிழ்", "বাংলা", "é", "ệ", "שָׁ", "العَرَبِيَّة"])
def test_scripts_that_need_marks_stay_readable(word):
    assert visible(word) == f'"{word}"'


@pytest.mark.parametrize(
    ("token", "shown"),
    [
        ("\u0301", '"\\u0301"'),  # alone: it would sit on the quote
        (" \u0301", '" \\u0301"'),
        ("1\u20e3", '"1\\u20e3"'),
        ("e\u0301\u0302", '"e\u0301\u0302"'),
        ("e\u0301\u0302\u0303\u0304", '"e\u0301\u0302\\u0303\\u0304"'),  # a pile
        ("e\u0301\u200b\u0301", '"e\u0301\\u200b\\u0301"'),  # not on an escape
        ("\u3164\u0301", '"\\u3164\\u0301"'),  # not on a letter that cannot be seen
        ("e\ufe0f\u0301", '"e\\ufe0f\\u0301"'),
    ],
)
def test_marks_stay_on_a_letter_and_two_at_most(token, shown):
    assert visible(token) == shown


@given(st.text(st.characters(codec=None)))
@example("\\u202e")
@example("\u202e")
@example("\\")
def test_the_token_comes_back_from_what_is_shown(token):
    assert ast.literal_eval(visible(token, limit=10**9)) == token  # so two tokens never look the same


@given(st.text(st.one_of(st.characters(codec=None), st.sampled_from("ae \u0301\u0302" + INKLESS))), st.integers(0, 80))
def test_no_hidden_character_survives_and_all_of_it_is_utf8(token, limit):
    shown = visible(token, limit=limit)
    assert not [character for character in shown if _hides(character)]
    shown.encode("utf-8")
    assert shown[0] == shown[-1] == '"'
    marks = 0
    for before, character in itertools.pairwise(shown):
        marks = marks + 1 if unicodedata.category(character)[0] == "M" else 0
        assert marks <= 2
        assert marks != 1 or unicodedata.category(before)[0] == "L"


@given(st.text(st.characters(codec=None)), st.integers(0, 20))
def test_what_is_too_long_is_cut_between_escapes_and_says_so(token, limit):
    whole, shown = visible(token, limit=10**9)[1:-1], visible(token, limit=limit)[1:-1]
    if len(whole) <= limit:
        assert shown == whole
    else:
        assert shown[-1] == "…"
        assert whole.startswith(shown[:-1])
        assert len(shown) <= limit + 1
        assert ast.literal_eval(f'"{shown[:-1]}"') == token[: len(ast.literal_eval(f'"{shown[:-1]}"'))]


def test_a_megabyte_is_cut_at_once():
    assert visible("a" * 10**6) == '"' + "a" * 60 + '…"'
