"""Tokenizer files of every kind, and hostile strings in them."""

import json
import struct

import pytest

from unembed.models import Unembedding
from unembed.models._tokens import Tokens, read_tokens, tokens_of
from unembed.results import InputError
from unembed.text import visible

HOSTILE = ["<script>alert(1)</script>", "\x00\x1b[31m", "\u202eabc\u200f", "\ud800", "", "=cmd()", "a" * 500]


def test_hostile_strings_are_kept_as_they_are_and_shown_safely(write, tensors, config, tmp_path):  # M17
    folder = write(tensors, config)
    vocab = {token: i for i, token in enumerate(HOSTILE)}
    (folder / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocab}}))
    head = Unembedding.load(folder)
    assert head.tokens == HOSTILE
    assert (head.holes, head.vocab_tokens) == ((), len(HOSTILE))
    head.save(tmp_path / "saved")
    assert Unembedding.load(tmp_path / "saved").tokens == HOSTILE
    for token in head.tokens:
        visible(token).encode("utf-8")


def test_added_tokens_count_and_gaps_are_holes(tmp_path):
    content = {"model": {"type": "BPE", "vocab": {"a": 0, "b": 1}}, "added_tokens": [{"id": 5, "content": "<eos>"}]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    assert read_tokens(tmp_path) == Tokens(["a", "b", "", "", "", "<eos>"], (2, 3, 4))


def test_vocab_json_with_added_tokens(tmp_path):
    (tmp_path / "vocab.json").write_text(json.dumps({"b": 1, "a": 0}))
    assert read_tokens(tmp_path) == Tokens(["a", "b"], ())
    (tmp_path / "added_tokens.json").write_text(json.dumps({"c": 3}))
    assert read_tokens(tmp_path) == Tokens(["a", "b", "", "c"], (2,))
    assert tokens_of(tmp_path) == read_tokens(tmp_path)


def test_an_empty_folder_has_none(tmp_path):
    assert read_tokens(tmp_path) is None
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {}}}))
    assert read_tokens(tmp_path) is None


@pytest.mark.parametrize("i", [-1, 1 << 40, 1.5, "3", True, None])
def test_absurd_ids_are_refused(i, tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {"a": i}}}))
    with pytest.raises(InputError, match=r"tokenizer\.json: token ids must be integers"):
        read_tokens(tmp_path)


def _piece(text, kind):
    content = b"\x0a" + bytes([len(text)]) + text + b"\x15" + struct.pack("<f", -1.0)
    content += b"" if kind == 1 else b"\x18" + bytes([kind])
    return b"\x0a" + bytes([len(content)]) + content


def test_sentencepiece_is_read(tmp_path):
    path = tmp_path / "tokenizer.model"
    pieces = [(b"<unk>", 2), (b"\xe2\x96\x81a", 1), (b"x", 5), (b"b\xff", 1), (b"y", 5)]
    trainer = b"\x12\x05\x08\x01\x10\x90\x4e"  # another field of the message, to be passed over
    path.write_bytes(b"".join(_piece(*p) for p in pieces) + trainer)
    assert read_tokens(tmp_path) == Tokens(["<unk>", "▁a", "", "b\udcff"], (2,))
    path.write_bytes(path.read_bytes()[:-12])
    with pytest.raises(InputError, match=r"tokenizer\.model: not a whole sentencepiece model"):
        read_tokens(tmp_path)


@pytest.mark.filterwarnings("ignore")
def test_tokenizer_objects():
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 1}, unk_token="a"))
    tokenizer.add_special_tokens(["<end>"])
    expected = Tokens(["a", "b", "<end>"], ())
    assert tokens_of(tokenizer) == expected
    assert tokens_of(transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer)) == expected
