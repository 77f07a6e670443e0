"""Text while it is written: against the definition, which decodes everything again after each token."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from unembed.decoding import Beam, generate
from unembed.decoding._text import TextStream

HALF = "\ufffd"


class Pieces:
    """A tokenizer whose ids are the numbers of byte strings."""

    def __init__(self, pieces):
        self.pieces = pieces

    def decode(self, ids):
        return b"".join(self.pieces[one] for one in ids).decode(errors="replace")


def _reference(tokenizer, ids, stop):
    """Tokens that were read, and their text: cut in front of a stop string in what is certain, else all of it."""
    for count in range(1, len(ids) + 1):
        certain = tokenizer.decode(ids[:count]).rstrip(HALF)
        found = [certain.find(one) for one in stop if one in certain]
        if found:
            return count, certain[: min(found)]
    return len(ids), tokenizer.decode(ids)


def _streamed(stream, ids):
    told, count = [], 0
    for one in ids:
        told.append(stream.push(one))
        count += 1
        if stream.stopped:
            break
    return count, [*told, stream.close()]


def _cut(text, sizes):
    """The bytes of a text in pieces of some sizes, over and over."""
    data, pieces, place = text.encode(), [], 0
    while data:
        size = sizes[place % len(sizes)]
        pieces.append(data[:size])
        data, place = data[size:], place + 1
    return pieces


def _check(pieces, stop):
    tokenizer, ids = Pieces(pieces), list(range(len(pieces)))
    stream = TextStream(tokenizer, stop=stop)
    count, told = _streamed(stream, ids)
    assert (count, stream.text) == _reference(tokenizer, ids, stop)
    assert "".join(told) == stream.text


@given(st.text("aé漢🙂\ufffd ", max_size=20), st.lists(st.integers(1, 5), min_size=1, max_size=4))
def test_characters_split_between_tokens_are_told_whole(text, sizes):
    _check(_cut(text, sizes), ())


@given(st.lists(st.binary(max_size=4), max_size=12))
@example([b"\xe6\xbc", b"", b"\xa2"])
@example([b"\xff", b"a", b"\xff"])
def test_bytes_that_are_no_text_are_told_as_the_decoder_shows_them(pieces):
    _check(pieces, ())


@given(
    st.text("ab", max_size=20),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.text("ab", min_size=1, max_size=5), max_size=3),
)
@example("aab", [1], ["aab", "b"])
@example("aaab", [1], ["aab"])
def test_stop_strings_are_found_across_tokens_and_nothing_behind_their_begin_is_told(text, sizes, stop):
    _check(_cut(text, sizes), stop)


@given(
    st.text("é漢\n", max_size=12),
    st.lists(st.integers(1, 4), min_size=1, max_size=4),
    st.lists(st.text("é漢\n", min_size=1, max_size=3), max_size=2),
)
@example("\n漢", [2], ["\n"])
def test_a_stop_string_is_found_in_front_of_half_a_character(text, sizes, stop):
    _check(_cut(text, sizes), stop)


def test_what_a_stop_string_may_begin_with_is_held_back_only_as_long_as_it_may():
    stream = TextStream(Pieces([b"one E", b"N", b"D", b"x", b" EN", b"DE"]), stop=["ENDE"])
    told = [stream.push(one) for one in range(6)]
    assert told == ["one ", "", "", "ENDx", " ", ""]
    assert stream.stopped
    assert (stream.close(), stream.text) == ("", "one ENDx ")


def test_the_end_tells_what_was_held_back():
    stream = TextStream(Pieces([b"a\xe6", b" EN"]), stop=["END"])
    assert [stream.push(0), stream.push(1), stream.close()] == ["a", f"{HALF} ", "EN"]
    half = TextStream(Pieces([b"a\xe6"]))
    assert [half.push(0), half.close()] == ["a", HALF]


def test_several_tokens_at_once_give_the_same_text():
    pieces = _cut("naïve 漢字 text", [2, 1, 3])
    stream = TextStream(Pieces(pieces))
    assert stream.push(*range(len(pieces))) + stream.close() == "naïve 漢字 text"


def _llama_tokenizer():
    """The decoder of Llama 2: a space in front of words, none at the very beginning, bytes where there is no token."""
    tokenizers = pytest.importorskip("tokenizers")
    words = ["▁Paris", "▁is", "▁", "▁▁", "a", "s", ".", "<s>"]
    vocabulary = {token: number for number, token in enumerate([*words, *(f"<0x{byte:02X}>" for byte in range(256))])}
    found = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=[], byte_fallback=True))
    found.decoder = tokenizers.decoders.Sequence(
        [
            tokenizers.decoders.Replace("▁", " "),
            tokenizers.decoders.ByteFallback(),
            tokenizers.decoders.Fuse(),
            tokenizers.decoders.Strip(" ", 1, 0),
        ]
    )
    return found, len(words)


@given(st.data())
def test_a_decoder_that_strips_the_first_space_gives_the_text_behind_its_context(data):
    tokenizer, words = _llama_tokenizer()
    number = st.integers(0, words - 1)
    context = data.draw(st.lists(number, max_size=4))
    ids: list[int] = []
    for part in data.draw(st.lists(number | st.sampled_from(list("é漢🙂")), max_size=10)):
        ids += [part] if isinstance(part, int) else [words + byte for byte in part.encode()]
    stream = TextStream(tokenizer, context=context)
    told = [*[stream.push(one) for one in ids], stream.close()]
    assert "".join(told) == stream.text == tokenizer.decode(context + ids)[len(tokenizer.decode(context)) :]


def test_a_context_that_ends_in_half_a_character_is_left_out():
    tokenizer = Pieces([b"x\xe6\xbc", b"\xa2y"])
    stream = TextStream(tokenizer, context=[0])
    assert stream.push(1) + stream.close() == f"{HALF}y"


class Cleaning:
    """Takes spaces in front of marks out, as WordPiece does; as that of transformers it may be told not to."""

    def __init__(self, words):
        self.words = words

    def decode(self, ids, clean_up_tokenization_spaces=True):
        text = " ".join(self.words[one] for one in ids)
        return text.replace(" ' ", "'").replace(" .", ".") if clean_up_tokenization_spaces else text


WORDS = ["Hello", "'", "s", "."]


def _said(tokenizer, **options):
    def script(tokens):
        return torch.eye(4)[[len(row) - 1 for row in tokens]]

    return generate(script, [[0]], max_new_tokens=4, tokenizer=tokenizer, **options).texts


def test_spaces_are_not_cleaned_up_whether_somebody_watches_or_not():
    told, tokenizer = [], Cleaning(WORDS)
    # The prompt is one word, so each word comes with the space in front of it.
    assert _said(tokenizer) == [[" Hello ' s ."]]
    assert _said(tokenizer, on_token=lambda event: told.append(event.text)) == [[" Hello ' s ."]]
    assert "".join(told) == " Hello ' s ."
    assert _said(tokenizer, stop=["' s"]) == [[" Hello "]]


@pytest.mark.parametrize("strategy", [None, Beam(2)])
def test_a_decoder_that_changes_text_is_warned_of(strategy):
    class Always(Cleaning):
        def decode(self, ids):
            return super().decode(ids)

    assert _said(Always(WORDS), strategy=strategy) == [[" Hello's."]]
    with pytest.warns(UserWarning, match="The `decode` of Always changes the text of earlier tokens") as caught:
        _said(Always(WORDS), strategy=strategy, stop=["'s"])
    assert len(caught) == 1


def test_a_copy_goes_on_by_itself():
    stream = TextStream(Pieces([b"a", b"b", b"\xc3", b"\xa9"]), stop=["ab"])
    stream.push(0)
    one, other = stream.copy(), stream.copy()
    one.push(1)
    other.push(2)
    other.push(3)
    assert (one.stopped, other.stopped, stream.stopped) == (True, False, False)
    assert (one.text, other.text) == ("", "aé")
