"""Text metrics: hand-worked values, definitions, and intervals that cover."""

import math
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from unembed.decoding import metrics
from unembed.decoding.metrics import _distinct, _longest_repeat, _repetition, _self_bleu, _zipf

SEQUENCE = st.lists(st.integers(0, 4), max_size=24)
SEQUENCES = st.lists(SEQUENCE, min_size=1, max_size=6)
TEXTS = ["the cat sat on the mat", "the cat sat", "a dog"]


def test_perplexity_of_a_fair_coin_is_two_and_bits_are_per_byte():
    assert metrics.perplexity([math.log(0.5)] * 7) == pytest.approx(2, rel=1e-15)
    # 1, 2 and 3 bits: 2^2 on the mean over tokens, not over sequences
    assert metrics.perplexity([[-math.log(2)], [-2 * math.log(2), -3 * math.log(2)]]) == pytest.approx(4)
    assert metrics.bits_per_byte([-6 * math.log(2)], "abc") == pytest.approx(2)
    assert metrics.bits_per_byte([[-3 * math.log(2)], [-5 * math.log(2)]], ["é", "€…"]) == pytest.approx(
        1
    )  # 2 + 6 bytes


def test_bits_per_byte_do_not_depend_on_how_the_text_is_cut():
    whole = metrics.bits_per_byte([math.log(0.1) + math.log(0.2)], "abcd")
    assert metrics.bits_per_byte([math.log(0.1), math.log(0.2)], "abcd") == pytest.approx(whole, rel=1e-14)


def test_a_token_that_cannot_be_has_infinite_perplexity_not_an_error():
    assert metrics.perplexity([-1.0, -math.inf]) == math.inf
    assert metrics.perplexity([-1e6]) == math.inf


@pytest.mark.parametrize("wrong", [[0.5], [math.nan], [[-1.0], [0.2]]])
def test_probabilities_are_no_log_probabilities(wrong):
    with pytest.raises(ValueError, match="`log_probs` must be log-probabilities"):
        metrics.perplexity(wrong)
    assert metrics.perplexity([1e-7]) == pytest.approx(1)  # rounding is no mistake


def test_repetition_by_hand():
    # a b a b a: bigrams ab ba ab ba, two of four distinct; 3-grams aba bab aba, two of three
    assert metrics.seq_rep_n([0, 1, 0, 1, 0], 2) == 0.5
    assert metrics.seq_rep_n(list("ababa"), 3) == pytest.approx(1 / 3)
    assert (
        metrics.seq_rep_n([[0, 1, 0, 1, 0], [0, 1, 2, 3], [7]], 2) == 0.25
    )  # the mean of 1/2 and 0; [7] has no bigram
    # a b c a c: with one token back nothing, with two the last c, with three the second a too
    assert [metrics.rep_n(list("abcac"), n) for n in (1, 2, 3)] == [0, 0.2, 0.4]
    # what the model would have said: at place 1 the a before it
    assert metrics.rep_n(list("abc"), 2, predictions=list("xab")) == pytest.approx(2 / 3)


def test_distinct_and_longest_repeat_by_hand():
    assert metrics.distinct_n([1, 2, 1, 2], 2) == pytest.approx(2 / 3)
    assert metrics.distinct_n([1, 2, 1, 2], 2, per="tokens") == 0.5  # as Li et al. divide
    assert metrics.distinct_n([[1, 2], [1, 2], [2, 1]], 2) == pytest.approx(2 / 3)  # no bigram over an end
    assert metrics.longest_repeat(list("aaaa")) == 3  # the two spans overlap
    assert metrics.longest_repeat(list("banana")) == 3
    assert metrics.longest_repeat([1, 2, 3]) == 0
    assert metrics.longest_repeat([]) == 0


def test_zipf_of_frequencies_that_follow_it_is_its_exponent():
    counts = [round(5040 * 12 / rank) for rank in range(1, 11)]  # exactly proportional to 1 / rank
    text = [token for token, count in enumerate(counts) for _ in range(count)]
    assert metrics.zipf_coefficient(text) == pytest.approx(1, rel=1e-12)
    assert metrics.zipf_coefficient([0, 1, 2, 0, 1, 2]) == pytest.approx(0, abs=1e-12)
    # ranks 1 and 2 only: frequencies 4 and 1
    assert metrics.zipf_coefficient([0] * 4 + [1, 2, 3], ranks=2) == pytest.approx(2)


@given(SEQUENCE, st.integers(1, 30), st.data())
def test_tokens_near_each_other_are_the_definition(sequence, n, data):
    said = data.draw(st.lists(st.integers(0, 4), min_size=len(sequence), max_size=len(sequence)))
    assert _repetition.near(sequence, n, said) == _repetition._near_reference(sequence, n, said)


@given(SEQUENCE)
def test_the_longest_repeat_is_the_definition(sequence):
    assert metrics.longest_repeat(sequence) == _longest_repeat._reference(sequence)


@pytest.mark.parametrize("length", [1, 2, 3, 7, 8, 9, 63, 64, 65, 1000])
def test_the_longest_repeat_of_a_period_is_what_is_left_of_it(length):
    assert metrics.longest_repeat([5] * length) == length - 1
    assert metrics.longest_repeat([*range(100), *range(100)][: 100 + length]) == min(length, 100)


def test_the_longest_repeat_of_many_tokens_is_exact():
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, 50_000, 30_000)
    tokens[20_000:20_777] = tokens[1_000:1_777]
    tokens[1_777], tokens[20_777], tokens[999], tokens[19_999] = 1, 2, 3, 4  # neither end goes on
    assert metrics.longest_repeat(tokens) == 777


@given(SEQUENCES)
def test_zipf_is_the_definition(rows):
    if len({token for row in rows for token in row}) < 2:
        with pytest.raises(ValueError, match="two different tokens"):
            metrics.zipf_coefficient(rows)
        return
    for ranks in (2, 3, 5000):
        assert metrics.zipf_coefficient(rows, ranks=ranks) == pytest.approx(_zipf._reference(rows, ranks), abs=1e-12)


@given(SEQUENCES, st.integers(1, 4))
def test_shares_of_ngrams_are_counts_by_comparison_of_all(rows, n):
    """Each n-gram against all others, as no set does."""
    grams = [[row[i : i + n] for i in range(len(row) - n + 1)] for row in rows]
    flat = [gram for own in grams for gram in own]
    if not flat:
        with pytest.raises(ValueError, match=f"at least {n} tokens"):
            metrics.seq_rep_n(rows, n)
        return
    fresh = [sum(gram not in own[:i] for i, gram in enumerate(own)) for own in grams]
    shares = [1 - new / len(own) for new, own in zip(fresh, grams, strict=True) if own]
    assert metrics.seq_rep_n(rows, n) == pytest.approx(sum(shares) / len(shares), abs=1e-12)
    distinct = sum(gram not in flat[:i] for i, gram in enumerate(flat))
    assert metrics.distinct_n(rows, n) == pytest.approx(distinct / len(flat))
    assert metrics.distinct_n(rows, n, per="tokens") == pytest.approx(distinct / sum(map(len, rows)))


@given(st.lists(SEQUENCE, min_size=2, max_size=6), st.integers(1, 5))
def test_self_bleu_is_the_definition_and_sacrebleus_own_sentence_score(rows, order):
    pytest.importorskip("sacrebleu")
    from sacrebleu.metrics import BLEU

    found = metrics.self_bleu(rows, order=order)
    assert found == pytest.approx(_self_bleu._reference(rows, order), abs=1e-12)
    bleu = BLEU(tokenize="none", smooth_method="floor", effective_order=True, max_ngram_order=order)
    texts = [" ".join(map(str, row)) for row in rows]
    scores = [
        bleu.sentence_score(text, [other for which, other in enumerate(texts) if which != place]).score
        for place, text in enumerate(texts)
    ]
    assert found == pytest.approx(sum(scores) / len(scores) / 100, abs=1e-12)


def test_self_bleu_of_equal_texts_is_one_and_of_texts_without_a_common_token_zero():
    pytest.importorskip("sacrebleu")
    assert metrics.self_bleu([[1, 2, 3, 4, 5]] * 3) == pytest.approx(1)
    assert metrics.self_bleu([[1, 2, 3, 4], [5, 6, 7, 8]]) == 0


@given(st.lists(SEQUENCE, min_size=3, max_size=6), st.integers(1, 4))
def test_a_metric_without_each_sequence_is_the_metric_of_the_others(rows, n):
    pytest.importorskip("sacrebleu")
    others = [rows[:i] + rows[i + 1 :] for i in range(len(rows))]
    for place, rest in enumerate(others):
        if any(len(row) >= n for row in rest):
            assert _distinct.without_each(rows, n)[place] == pytest.approx(metrics.distinct_n(rest, n))
        else:
            assert math.isnan(_distinct.without_each(rows, n)[place])
        if len({token for row in rest for token in row}) > 1:
            assert _zipf.without_each(rows)[place] == pytest.approx(metrics.zipf_coefficient(rest), abs=1e-12)
        else:
            assert math.isnan(_zipf.without_each(rows)[place])
        assert _self_bleu.without_each(rows, n)[place] == pytest.approx(metrics.self_bleu(rest, order=n), abs=1e-12)


def test_ids_words_tensors_and_arrays_are_one():
    rows = [[3, 1, 3, 1], [1, 3, 3, 3]]
    for given_as in (
        rows,
        torch.tensor(rows),
        np.array(rows),
        [torch.tensor(row) for row in rows],
        tuple(map(tuple, rows)),
    ):
        assert metrics.seq_rep_n(given_as, 2) == metrics.seq_rep_n(rows, 2)
        assert metrics.zipf_coefficient(given_as) == metrics.zipf_coefficient(rows)
    words = [text.split() for text in TEXTS]
    assert metrics.distinct_n(words, 1) == pytest.approx(7 / 11)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: metrics.seq_rep_n("a text", 2),
            "`sequences` must be token ids or words, or lists of them, got a",
        ),
        (lambda: metrics.seq_rep_n([0.5, 1.5], 2), "`sequences` must hold token ids or words, got 0.5 of float"),
        (lambda: metrics.rep_n([1, 2], 0), "`n` must be a whole number of at least 1, got 0"),
        (lambda: metrics.rep_n([]), "`sequences` must hold at least one token"),
        (lambda: metrics.rep_n([1, 2], 1, predictions=[1]), "`predictions` must hold one token for each"),
        (lambda: metrics.distinct_n([1, 2], 1, per="words"), "`per` must be 'ngrams' or 'tokens', got 'words'"),
        (lambda: metrics.longest_repeat([[1], [2]]), "`sequence` must be one sequence, got 2"),
        (lambda: metrics.self_bleu([[1, 2]]), "needs two sequences, got 1"),
        (
            lambda: metrics.bits_per_byte([-1.0], ["a", "b"]),
            "`texts` must hold one text for each of 1 sequences",
        ),
        (lambda: metrics.bits_per_byte([-1.0], ""), "at least one byte"),
        (lambda: metrics.perplexity([]), "at least one token"),
        (lambda: metrics.text_metrics([[1]], texts=["a"]), "give `log_probs` too"),
        (lambda: metrics.text_metrics([[1, 2]], log_probs=[[-1.0]]), "one number for each token"),
    ],
)
def test_errors_are_one_line_that_names_the_argument(call, said):
    with pytest.raises(ValueError, match=r"^[^\n]+$") as error:
        call()
    assert said in str(error.value)


def test_without_sacrebleu_the_error_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu.metrics.bleu", None)
    with pytest.raises(ImportError, match=r'pip install "unembed\[metrics\]"'):
        metrics.self_bleu([[1, 2], [1, 3]])
    assert "self_bleu_4" not in metrics.text_metrics([[1, 2], [1, 3]], bleu_order=None)


def test_all_metrics_at_once_are_each_alone():
    pytest.importorskip("sacrebleu")
    rng = np.random.default_rng(3)
    rows = [rng.integers(0, 9, size=size).tolist() for size in (12, 6, 30, 5, 25, 14, 9, 7, 22)]
    nats = [(-rng.exponential(size=len(row))).tolist() for row in rows]
    texts = ["é" * len(row) for row in rows]
    rows[0][:] = [1, 2, 3, 4, 5] * 3
    nats[0] = [-0.5] * 15
    found = metrics.text_metrics(rows, log_probs=nats, texts=texts, window=4, orders=(1, 4))
    alone = {
        "perplexity": metrics.perplexity(nats),
        "bits_per_byte": metrics.bits_per_byte(nats, texts),
        "rep_4": metrics.rep_n(rows, 4),
        "seq_rep_1": metrics.seq_rep_n(rows, 1),
        "seq_rep_4": metrics.seq_rep_n(rows, 4),
        "distinct_1": metrics.distinct_n(rows, 1),
        "distinct_4": metrics.distinct_n(rows, 4),
        "longest_repeat": sum(metrics.longest_repeat(row) for row in rows) / 9,
        "zipf_coefficient": metrics.zipf_coefficient(rows),
        "self_bleu_4": metrics.self_bleu(rows),
    }
    assert found.keys() == alone.keys()
    for name, value in alone.items():
        assert found[name].value == pytest.approx(value, rel=1e-12), name
        low, high = found[name].ci95
        assert low <= value <= high, name
        assert low < high, name
    assert found == metrics.text_metrics(rows, log_probs=nats, texts=texts, window=4, orders=(1, 4))


def test_too_few_sequences_have_values_and_no_interval_and_say_why():
    pytest.importorskip("sacrebleu")
    found = metrics.text_metrics([[1, 2, 1]] * 7, log_probs=[[-1.0] * 3] * 7)
    assert found["perplexity"].value == pytest.approx(math.e)
    assert found["distinct_4"] == metrics.Measured(None, reason="too few tokens or sequences")
    assert found["seq_rep_4"] == metrics.Measured(None, reason="no sequence is long enough")
    for name in ("perplexity", "rep_32", "distinct_1", "zipf_coefficient", "self_bleu_4"):
        assert found[name].ci95 is None
        assert found[name].reason == "no interval: 7 sequences, at least 8 are needed"


def test_equal_texts_have_no_interval_that_pretends():
    found = metrics.text_metrics([[1, 2, 3, 4]] * 9, log_probs=[[-1.0] * 4] * 9, bleu_order=None)
    for name in ("seq_rep_4", "perplexity", "zipf_coefficient", "longest_repeat"):
        assert found[name].value is not None
        assert found[name].ci95 is None
        assert found[name].reason.startswith("no interval: resampling changes nothing")


def test_a_token_that_cannot_be_leaves_no_interval_that_pretends():
    rows = [[1, 2]] * 9
    found = metrics.text_metrics(rows, log_probs=[[-1.0, -math.inf], *([[-1.0, -1.0]] * 8)], bleu_order=None)
    assert found["perplexity"] == metrics.Measured(math.inf, reason="a resample has no finite value")


def _drawn(rng, count):
    """Texts that differ from each other in what they are about, and repeat themselves."""
    law = 1 / np.arange(1, 61)
    rows = []
    for _ in range(count):
        own = rng.permutation(60) if rng.random() < 0.5 else np.arange(60)
        rows.append(own[rng.choice(60, size=rng.integers(20, 40), p=law / law.sum())].tolist())
    return rows


def test_intervals_cover_what_such_sets_have_on_average():
    """Of 300 sets of 10 and of 24 texts 88 to 97 % were covered, by metric; a plain bootstrap fails, as shown below."""
    pytest.importorskip("sacrebleu")
    rng, count, cases = np.random.default_rng(5), 16, 80
    truth: dict[str, list[float]] = {}
    for _ in range(150):
        rows = _drawn(rng, count)
        for name, value in (
            ("rep_32", metrics.rep_n(rows)),
            ("seq_rep_2", metrics.seq_rep_n(rows, 2)),
            ("distinct_1", metrics.distinct_n(rows, 1)),
            ("distinct_2", metrics.distinct_n(rows, 2)),
            ("longest_repeat", float(np.mean([metrics.longest_repeat(row) for row in rows]))),
            ("zipf_coefficient", metrics.zipf_coefficient(rows)),
            ("self_bleu_2", metrics.self_bleu(rows, order=2)),
        ):
            truth.setdefault(name, []).append(value)
    covered = dict.fromkeys(truth, 0)
    for _ in range(cases):
        found = metrics.text_metrics(_drawn(rng, count), orders=(1, 2), bleu_order=2)
        for name, values in truth.items():
            low, high = found[name].ci95
            covered[name] += low <= np.mean(values) <= high
    for name, times in covered.items():  # 0.95 has a standard deviation of 0.024 here
        assert times / cases >= 0.85, (name, covered)


def test_a_bootstrap_that_draws_texts_again_would_miss_even_the_value_itself():
    rng = np.random.default_rng(5)
    rows = _drawn(rng, 16)
    again = [metrics.distinct_n([rows[place] for place in rng.integers(0, 16, 16)], 2) for _ in range(200)]
    value = metrics.text_metrics(rows, bleu_order=None)["distinct_2"]
    assert np.quantile(again, 0.975) < value.ci95[0] < value.value
