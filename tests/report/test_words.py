import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from unembed.report._words import number, percent, printable, span

THIN = "\N{NARROW NO-BREAK SPACE}"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (1.0, "1.000"),
        (0.19216086, "0.1922"),
        (0.000111583, "0.0001116"),
        (2.8785648e-07, f"2.879{THIN}×{THIN}10⁻⁷"),
        (9.99996, "10.00"),
        (60577.377, "60,577"),
        (999_999.6, f"1.000{THIN}×{THIN}10⁶"),
        (-0.9724684, "−0.9725"),
        (1_234_567, "1,234,567"),
        (-3, "−3"),
        (np.int64(4096), "4,096"),
        (np.float32(0.5), "0.5000"),
        (True, "yes"),
        (np.bool_(False), "no"),
        (None, "none"),
        (float("nan"), "none"),
        (float("-inf"), "none"),
        ("gram", "gram"),
    ],
)
def test_number(value: object, text: str) -> None:
    assert number(value) == text


@given(st.floats(min_value=-1e300, max_value=1e300))
def test_number_reads_back_within_its_four_digits(value: float) -> None:
    text = number(value).replace(",", "").replace("−", "-").replace(THIN, "")
    digits = text.translate(str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")).replace("×10", "e")
    assert "e+" not in text
    assert float(digits) == pytest.approx(value, rel=5.1e-4, abs=0)


@given(st.text(alphabet=st.characters(codec=None), max_size=30))
def test_printable_always_encodes_and_hides_nothing(text: str) -> None:
    shown = printable(text)
    shown.encode("utf-8")
    assert not any(c in shown for c in "\u202e\u2028\x00\x1b\r\n\t\u200b\ufeff")


def test_printable_leaves_readable_text_alone() -> None:
    assert printable(r"C:\models\größe “東京” 1 – 2") == r"C:\models\größe “東京” 1 – 2"


def test_percent_and_span() -> None:
    assert percent(0.98136) == f"98.14{THIN}%"
    assert percent(None) == "none"
    assert span([1.07241, 1.08166]) == "1.072 to 1.082"
    assert span(None) == ""
