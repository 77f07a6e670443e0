"""Which tokens are predicted: the rule written out, worked by hand and on random documents."""

from __future__ import annotations

import itertools
import tracemalloc

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from unembed.integrations._windows import encode_prefix, leading_ids, plan_windows, window_length
from unembed.text import Document


class Letters:
    """A tokenizer of one id a letter that counts what it is given; `bos` letters come first, one `eos` last."""

    def __init__(self, bos=0, eos=False):
        self.bos, self.eos, self.read = bos, eos, 0

    def __call__(self, text, add_special_tokens=True, verbose=True):
        self.read += len(text)
        ids = [ord(letter) for letter in text]
        return {"input_ids": [1] * self.bos + ids + [2] * self.eos if add_special_tokens else ids}


class Stream:
    """Documents without a length, counting the passes over them."""

    def __init__(self, documents):
        self.documents, self.passes = documents, 0

    def __iter__(self):
        self.passes += 1
        return iter(self.documents)


def _documents(*texts):
    return [Document(str(i), text) for i, text in enumerate(texts)]


def _plan(tokenizer, documents, tokens, context, seed=0):
    found = plan_windows(tokenizer, documents, tokens=tokens, context=context, seed=seed)
    return [(w.document, _letters(w.inputs), _letters(w.targets), w.window) for w in found]


def _letters(ids):
    return "".join(chr(i) if i > 2 else "^$"[i - 1] for i in ids)


def test_windows_worked_by_hand_without_bos():
    found = _plan(Letters(), Stream(_documents("abcdefg", "x", "uvw")), tokens=7, context=3)
    assert found == [(0, "abc", "bcd", 0), (2, "uv", "vw", 1), (0, "de", "ef", 2)]


def test_windows_worked_by_hand_with_bos_and_eos():
    found = _plan(Letters(bos=1, eos=True), Stream(_documents("abcdefg", "x")), tokens=99, context=3)
    assert found == [
        (0, "^ab", "abc", 0),
        (1, "^x", "x$", 1),
        (0, "^cde", "def", 2),
        (0, "^fg", "g$", 3),
    ]


@given(
    texts=st.lists(st.text("abcdef", max_size=40), max_size=6),
    context=st.integers(1, 9),
    tokenizer=st.builds(Letters, st.integers(0, 2), st.booleans()),
    kind=st.sampled_from([list, Stream]),
    seed=st.integers(0, 3),
)
def test_every_token_that_has_a_context_is_predicted_once(texts, context, tokenizer, kind, seed):
    bos, documents = tokenizer.bos, kind(_documents(*texts))
    found = list(plan_windows(tokenizer, documents, tokens=10**6, context=context, seed=seed))
    predicted = {}
    for window in found:
        assert len(window.targets) <= context
        assert len(window.inputs) <= context + bos
        before = [1] * bos + predicted.get(window.document, [])[-1:]
        start = len(window.inputs) - len(window.targets) + 1
        assert window.inputs[:start].tolist()[-len(before) :] == before or not predicted.get(window.document)
        assert window.inputs[start:].tolist() == window.targets[:-1].tolist()
        predicted.setdefault(window.document, []).extend(window.targets.tolist())
    wholes = sorted(tokenizer(text)["input_ids"][max(bos, 1) :] for text in texts)
    assert sorted(predicted.values()) == [whole for whole in wholes if whole]
    assert [window.window for window in found] == list(range(len(found)))


@given(tokens=st.integers(1, 150), context=st.integers(1, 20))
def test_exactly_as_many_predictions_as_asked(tokens, context):
    found = _plan(Letters(), _documents("abcdefgh" * 5, "ab", "abc" * 30), tokens=tokens, context=context)
    assert sum(len(targets) for _, _, targets, _ in found) == min(tokens, 39 + 1 + 89)


def test_a_round_takes_one_window_of_every_document():
    found = _plan(Letters(), Stream(_documents(*["abcdefghijk"] * 5)), tokens=10**6, context=3)
    assert [document for document, *_ in found] == [0, 1, 2, 3, 4] * 4


def test_documents_in_memory_are_shuffled_by_the_seed_and_streams_are_not():
    documents = _documents(*(chr(97 + i) * 5 for i in range(20)))
    orders = [[inputs[0] for _, inputs, *_ in _plan(Letters(), documents, 80, 4, seed)] for seed in (0, 0, 1)]
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2]) == [chr(97 + i) for i in range(20)]
    streamed = [[inputs[0] for _, inputs, *_ in _plan(Letters(), Stream(documents), 80, 4, seed)] for seed in (0, 1)]
    assert streamed[0] == streamed[1] == [chr(97 + i) for i in range(20)]


@pytest.mark.parametrize(
    ("tokens", "context", "length"),
    [(100, 512, 64), (3200, 512, 100), (50_000, 512, 512), (50_000, 128, 128), (10, 8, 8)],
)
def test_the_window_grows_with_the_tokens(tokens, context, length):
    assert window_length(tokens, context) == length


def test_32_documents_are_used_when_there_are_that_many():
    documents = Stream(_documents(*["ab" * 5000] * 40))
    assert len({document for document, *_ in _plan(Letters(), documents, 10_000, 512)}) >= 32


def test_a_long_document_is_tokenised_as_far_as_needed_and_read_seldom():
    tokenizer, documents = Letters(), Stream(_documents("abcdefghij" * 1_000_000))
    found = _plan(tokenizer, documents, tokens=10_000, context=100)
    assert len(found) == 100
    assert documents.passes <= 8, "at rounds 0, 1, 2, 4, ..., 64"
    assert tokenizer.read < 400_000, "not 8 times ten million"


def test_only_the_ids_of_windows_to_come_are_held():
    """At the end of round 0 one id a document is left, and after a reading those until the next."""
    documents = _documents(*["abcdefghij" * 100] * 1000)
    plan = plan_windows(Letters(), documents, tokens=10**5, context=64, seed=0)
    tracemalloc.start()
    try:
        planned = [len(window.targets) for window in itertools.islice(plan, 999)]
        first = tracemalloc.get_traced_memory()[0]
        for _ in range(3):
            planned += [len(window.targets) for window in itertools.islice(plan, 1000)]
        later = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    array = 300  # bytes: what numpy and the dict need for one array, whatever is in it
    assert first < 1000 * array, "not 8 bytes for each of 1000 tokens"
    assert later < 1000 * array + 4 * sum(planned)


@settings(deadline=None)
@given(need=st.integers(1, 400), start=st.integers(0, 3000))
def test_a_beginning_is_tokenised_as_in_the_whole(bpe, need, start):
    text = bpe.text[start:]
    whole = bpe.tokenizer(text)["input_ids"]
    found = encode_prefix(bpe.tokenizer, text, need).tolist()
    assert len(found) >= min(need, len(whole))
    assert found == whole[: len(found)]


@pytest.fixture(scope="module")
def bpe():
    """A sentencepiece-like BPE without any word split, where a cut can change tokens far back."""
    import types

    from tokenizers import Tokenizer, models, normalizers, trainers
    from transformers import PreTrainedTokenizerFast

    from unembed.text import read_topics

    text = "".join(document.text for document in itertools.islice(read_topics(), 3))
    tokenizer = Tokenizer(models.BPE(unk_token="?"))
    tokenizer.normalizer = normalizers.Replace(" ", "▁")
    tokenizer.train_from_iterator(text.splitlines(), trainers.BpeTrainer(vocab_size=600, special_tokens=["?"]))
    return types.SimpleNamespace(text=text, tokenizer=PreTrainedTokenizerFast(tokenizer_object=tokenizer))


@pytest.mark.parametrize("bos", [False, True])
def test_leading_special_tokens_are_found(byte_tokenizer, bos):
    assert leading_ids(byte_tokenizer(bos=bos)) == ([0] if bos else [])
    assert leading_ids(Letters(bos=2, eos=True)) == [1, 1]


def test_lone_surrogates_do_not_stop_a_run(byte_tokenizer):
    tokenizer = byte_tokenizer()
    assert tokenizer.decode(encode_prefix(tokenizer, "a\ud800b\ud83d\ude00", 9)) == "a\ufffdb\U0001f600"
