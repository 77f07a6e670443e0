"""Every accumulator: two halves merge to one pass, and what has seen nothing changes nothing."""

import copy
import math

import numpy as np
import pytest
import torch

from unembed.diagnostics import Coefficients, Gradient, LinearHead, LogprobRank, Saturation, Spectrum, chunks

KINDS = {
    "spectrum": Spectrum,
    "gradient": Gradient,
    "coefficients": lambda head: Coefficients(head, every=3),
    "logprob_rank": lambda head: LogprobRank(head, every=2),
    "saturation": Saturation,
}
N, V, D = 60, 37, 4


def _randn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def _head(softcap):
    return LinearHead(
        _randn(V, D), bias=_randn(V, seed=1), softcap=softcap, extra_rows=_randn(3, D, seed=2), extra_bias=_randn(3)
    )


def _text():
    """Predictions of eight documents; number 100 is ignored."""
    targets = (torch.arange(N) * 7) % V
    targets[10] = -100
    return {
        "hidden": 2 * _randn(N, D, seed=3),
        "targets": targets,
        "documents": torch.arange(N) // 8,
        "index": torch.arange(N),
    }


def _update(accumulator, text, part):
    accumulator.update(
        text["hidden"][part], text["targets"][part], documents=text["documents"][part], index=text["index"][part]
    )


def _assert_same(one, other, place=""):
    if isinstance(one, dict):
        assert list(one) == list(other), place
        for key in one:
            _assert_same(one[key], other[key], f"{place}.{key}")
    elif isinstance(one, list | tuple):
        assert len(one) == len(other), place
        for i, (a, b) in enumerate(zip(one, other, strict=True)):
            _assert_same(a, b, f"{place}[{i}]")
    elif isinstance(one, float):
        assert other == pytest.approx(one, rel=1e-9, abs=1e-12, nan_ok=True), place
    else:
        assert one == other, place


def _assert_same_result(one, other):
    assert (one.values is None) == (other.values is None)
    _assert_same(one.values, other.values, one.name)
    assert [table.name for table in one.tables] == [table.name for table in other.tables]
    for a, b in zip(one.tables, other.tables, strict=True):
        assert list(a.columns) == list(b.columns)
        for name, column in a.columns.items():
            if column.dtype.kind == "f":
                size = float(np.nanmax(np.abs(column), initial=0))
                np.testing.assert_allclose(b.columns[name], column, rtol=1e-9, atol=1e-12 * size, err_msg=name)
            else:
                assert b.columns[name].tolist() == column.tolist(), (a.name, name)
    assert one.findings == other.findings


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cuts", [[30], [1], [59], [20], [3, 4, 29], [0], [60], [0, 17, 17]], ids=str)
def test_the_parts_of_a_text_merge_to_one_pass(name, softcap, cuts):
    # Most cuts go through a document; [0], [60] and [0, 17, 17] leave parts without a prediction.
    head, text = _head(softcap), _text()
    whole = KINDS[name](head)
    _update(whole, text, slice(None))
    bounds = [0, *cuts, N]
    parts = [KINDS[name](head) for _ in bounds[1:]]
    for part, start, end in zip(parts, bounds[:-1], bounds[1:], strict=True):
        _update(part, text, slice(start, end))
    others = copy.deepcopy([part.result().values for part in parts[1:]])
    for part in parts[1:]:
        parts[0].merge(part)
    _assert_same_result(whole.result(), parts[0].result())
    _assert_same(others, [part.result().values for part in parts[1:]])  # what was merged is left as it was


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", KINDS)
def test_block_and_chunk_sizes_change_no_number(name, softcap):
    head, text = _head(softcap), _text()
    whole, blocks, small = (KINDS[name](head) for _ in range(3))
    _update(whole, text, slice(None))
    for start in range(0, N, 7):
        _update(blocks, text, slice(start, start + 7))
    for chunk in chunks(head, rows=4, **text):
        small.add(chunk)
    _assert_same_result(whole.result(), blocks.result())
    _assert_same_result(whole.result(), small.result())


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("cut", [0, 20, N])
def test_a_measurement_goes_on_from_its_state_as_if_never_interrupted(name, softcap, cut):
    head, text = _head(softcap), _text()
    whole, first = KINDS[name](head), KINDS[name](head)
    _update(whole, text, slice(None))
    _update(first, text, slice(0, cut))
    state = first.state()
    kept = {key: tensor.clone() for key, tensor in state.items()}
    _update(first, text, slice(cut, None))  # what is in the file stays as it was
    resumed, again = KINDS[name](head), KINDS[name](head)
    for accumulator in (resumed, again):
        _update(accumulator, text, slice(5, 9))  # replaced, not added to
        accumulator.load_state(state)
        _update(accumulator, text, slice(cut, None))
        _assert_same_result(whole.result(), accumulator.result())
    assert list(state) == list(kept)
    for key, tensor in kept.items():
        assert torch.equal(state[key], tensor), key


@pytest.mark.parametrize("name", KINDS)
def test_a_result_can_be_asked_at_any_time_and_again(name):
    head, text = _head(None), _text()
    whole, asked = KINDS[name](head), KINDS[name](head)
    _update(whole, text, slice(None))
    asked.result()
    _update(asked, text, slice(0, 25))
    asked.result()
    _update(asked, text, slice(25, None))
    _assert_same_result(asked.result(), asked.result())
    _assert_same_result(whole.result(), asked.result())


@pytest.mark.parametrize("name", [name for name in KINDS if name != "spectrum"])
def test_nothing_seen_gives_a_reason_and_no_numbers(name):
    accumulator = KINDS[name](_head(None))
    assert accumulator.needs_text
    for block in (slice(0, 0), slice(10, 11)):  # no prediction, and one that is ignored
        _update(accumulator, _text(), block)
        assert accumulator.result().values is None
        assert accumulator.result().reason
        assert accumulator.result().tables == ()


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize(
    "head",
    [
        LinearHead(_randn(1, D)),
        LinearHead(_randn(2, 1)),
        LinearHead(_randn(3, D)),
        LinearHead(torch.zeros(5, D, dtype=torch.float64)),
        LinearHead(torch.ones(5, D, dtype=torch.float64), bias=torch.arange(5.0).double()),
        LinearHead(_randn(5, D), softcap=1e-3),
        LinearHead(_randn(5, D), bias=torch.tensor([0.0, 0, 0, -math.inf, 0])),
        LinearHead(1e4 * _randn(5, D)),
    ],
    ids=[
        "one row",
        "one column",
        "more columns than rows",
        "zeros",
        "equal rows",
        "tight cap",
        "masked",
        "huge scores",
    ],
)
@pytest.mark.parametrize("n", [1, 2, 9])
def test_unusual_heads_give_numbers_or_a_reason(head, name, n):
    accumulator = KINDS[name](head)
    accumulator.update(_randn(n, head.width, seed=5), torch.arange(n) % min(head.vocab, 3), documents=torch.arange(n))
    result = accumulator.result()
    assert (result.values is None) == bool(result.reason)
    for finding in result.findings:
        assert "None" not in finding.title + finding.evidence + finding.means
        assert "nan" not in finding.title + finding.evidence + finding.means
    for table in result.tables:
        for column, values in table.columns.items():
            if values.dtype.kind == "f" and column != "ratio":  # no ratio where the null is 0
                assert np.isfinite(values).all(), (table.name, column)


def test_a_half_precision_head_with_half_precision_hidden_states_is_measured():  # mergekit#304
    head = LinearHead(_randn(V, D).to(torch.bfloat16))
    for kind in KINDS.values():
        accumulator = kind(head)
        accumulator.update(_randn(9, D, seed=3).to(torch.bfloat16), torch.arange(9))
        assert accumulator.result().values is not None


def test_float64_hidden_states_on_a_float32_head_are_measured():
    for softcap in (None, 2.0):
        head = LinearHead(_randn(V, D).float(), softcap=softcap)
        for name, kind in KINDS.items():
            wide, narrow = kind(head), kind(head)
            wide.update(_randn(9, D, seed=3).float().double(), torch.arange(9))
            narrow.update(_randn(9, D, seed=3).float(), torch.arange(9))
            if name in ("gradient", "saturation"):
                key = ("raw", "kept") if name == "gradient" else ("loss", "mean")
                one, other = (result.result().values[key[0]][key[1]] for result in (wide, narrow))
                assert one == pytest.approx(other, rel=1e-5)
            assert wide.result().values is not None


def test_parameters_and_recorded_graphs_are_not_kept():
    head = LinearHead(torch.nn.Parameter(_randn(V, D)))
    for kind in KINDS.values():
        accumulator = kind(head)
        accumulator.update(_randn(9, D, seed=3).requires_grad_(), torch.arange(9))
        assert accumulator.result().values is not None
        held = [value for value in vars(accumulator).values() if isinstance(value, torch.Tensor)]
        assert not any(tensor.requires_grad for tensor in held)


def test_only_like_merges_with_like():
    head, other = LinearHead(torch.randn(9, 3)), LinearHead(torch.randn(9, 3))
    with pytest.raises(ValueError, match="must be a Gradient, got Saturation"):
        Gradient(head).merge(Saturation(head))
    with pytest.raises(ValueError, match="its weight differs"):
        Gradient(head).merge(Gradient(other))
    with pytest.raises(ValueError, match="same `every`: expected 2, got 3"):
        Coefficients(head, every=2).merge(Coefficients(head, every=3))
    Gradient(head).merge(Gradient(LinearHead(head.weight.clone())))
