"""Sums per document and the interval over documents."""

import math

import numpy as np
import pytest
import torch

from unembed.diagnostics._bootstrap import DocumentSums, interval


def _sums(table):
    """One row of (count, columns) a document; counts become that many predictions."""
    table = np.asarray(table, dtype=float)
    sums = DocumentSums(table.shape[1] - 1)
    for document, row in enumerate(table):
        count = int(row[0])
        values = torch.tensor(row[1:] / count).expand(count, -1)
        sums.add(torch.full((count,), document), values)
    return sums


def _mean(sums):
    return sums[:, 1] / sums[:, 0]


def test_sums_are_by_document_whatever_the_order_and_the_cutting():
    documents = torch.tensor([7, 3, 7, 7, 3, 1 << 40])
    values = torch.arange(12.0).reshape(6, 2)
    whole = DocumentSums(2)
    whole.add(documents, values)
    assert whole.table().tolist() == [[2, 10, 12], [3, 10, 13], [1, 10, 11]]  # documents 3, 7, 2^40
    pieces = DocumentSums(2)
    for i in (5, 2, 0, 4, 1, 3):
        pieces.add(documents[i : i + 1], values[i : i + 1])
    assert pieces.table().tolist() == whole.table().tolist()
    assert whole.total().tolist() == [6, 30, 36]
    assert len(whole) == 3


def test_a_sum_adds_documents_that_both_saw_and_keeps_the_other_untouched():
    one, other = DocumentSums(1), DocumentSums(1)
    one.add(torch.tensor([0, 1]), torch.tensor([[1.0], [2.0]]))
    other.add(torch.tensor([1, 2]), torch.tensor([[4.0], [8.0]]))
    one = one + other
    one.add(torch.tensor([2]), torch.tensor([[16.0]]))
    assert one.table().tolist() == [[1, 1], [2, 6], [2, 24]]
    assert other.table().tolist() == [[1, 4], [1, 8]]


def test_sums_do_not_lose_small_terms_beside_large_ones():
    sums = DocumentSums(1)
    sums.add(torch.zeros(1, dtype=torch.int64), torch.tensor([[1e8]]))
    for _ in range(100):
        sums.add(torch.zeros(1, dtype=torch.int64), torch.tensor([[0.5]]))
    assert sums.total()[1] == 1e8 + 50  # float32 would stay at 1e8


def test_nothing_seen_is_an_empty_table():
    sums = DocumentSums(3)
    assert sums.table().shape == (0, 4)
    assert sums.total().tolist() == [0, 0, 0, 0]
    assert interval(sums, _mean) is None


def test_seven_documents_give_no_interval_and_eight_do():
    assert interval(_sums([[1, x] for x in range(7)]), _mean) is None
    low, high = interval(_sums([[1, x] for x in range(8)]), _mean)
    assert 0 <= low < 3.5 < high <= 7


@pytest.mark.parametrize("count", [8, 12, 20, 40])
def test_the_interval_of_few_documents_is_as_wide_as_students(count):
    from scipy.stats import t

    values = np.random.default_rng(count).normal(size=count)
    low, high = interval(_sums(np.stack([np.ones(count), values], axis=1)), _mean)
    width = 2 * t.ppf(0.975, count - 1) * values.std(ddof=1) / math.sqrt(count)
    assert high - low == pytest.approx(width, rel=0.12)  # 2,000 resamples, and the tails of a bootstrap are short


def test_equal_documents_give_an_interval_of_no_width():
    low, high = interval(_sums([[3, 6.0]] * 8), _mean)
    assert low == pytest.approx(2, rel=1e-12)
    assert high == pytest.approx(2, rel=1e-12)


def test_the_interval_repeats_with_its_seed_only():
    sums = _sums([[1, x * x] for x in range(9)])
    assert interval(sums, _mean, seed=1) == interval(sums, _mean, seed=1)
    assert interval(sums, _mean, seed=1) != interval(sums, _mean, seed=2)


def test_the_interval_of_a_mean_is_the_normal_one_for_many_documents():
    rng = np.random.default_rng(0)
    values = rng.normal(5, 2, size=400)
    low, high = interval(_sums(np.stack([np.ones(400), values], axis=1)), _mean)
    half = 1.96 * values.std() / math.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=0.12 * half)
    assert high == pytest.approx(values.mean() + half, abs=0.12 * half)


def test_an_infinite_document_leaves_no_interval_that_pretends():
    # A masked target has infinite loss; dropping the resamples that hold it would print the interval of another text.
    table = [[1, x] for x in (1.0, 2.0, 3.0, 2.0, 1.0, 2.0, 3.0, 1.0)]
    assert interval(_sums(table), _mean) is not None
    assert interval(_sums([*table, [1, math.inf]]), _mean) is None


@pytest.mark.parametrize("documents", [8, 40])
def test_the_interval_covers_the_truth_in_about_nineteen_of_twenty_simulated_texts(documents):
    rng = np.random.default_rng(20261)
    cases = 200
    truth = math.sqrt(0.3)  # kept energy is 0.3 of the full one in expectation, in documents of unequal length
    covered = 0
    for _ in range(cases):
        count = rng.integers(5, 60, size=documents)
        own = rng.beta(3, 7, size=documents)  # mean 0.3; what the tokens of one document share
        full = count * rng.gamma(4, 0.25, size=documents)
        low, high = interval(_sums(np.stack([count, full, own * full], axis=1)), lambda s: np.sqrt(s[:, 2] / s[:, 1]))
        covered += low <= truth <= high
    assert 0.88 <= covered / cases <= 0.985
