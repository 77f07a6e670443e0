"""The head as the measurements see it."""

from types import SimpleNamespace

import pytest
import torch

from unembed.diagnostics import LinearHead


def _unembedding(**changes):
    about = {
        "weight": torch.arange(15.0).reshape(5, 3).to(torch.bfloat16),
        "bias": torch.arange(5.0).to(torch.bfloat16),
        "softcap": 30.0,
        "scale": 0.5,
        "real_rows": 3,
        "noise_eps": None,
        "tokens": ["a", "b", "c"],
    }
    return SimpleNamespace(**{**about, **changes})


def test_padding_rows_and_their_bias_are_set_apart():
    head = LinearHead.of(_unembedding())
    assert (head.vocab, head.width) == (3, 3)
    assert head.weight.dtype == head.bias.dtype == torch.float32
    assert head.extra_rows.tolist() == [[9.0, 10.0, 11.0], [12.0, 13.0, 14.0]]
    assert head.extra_bias.tolist() == [3.0, 4.0]
    hidden = torch.tensor([[1.0, 0.0, 0.0]])
    expected = 30 * torch.tanh(0.5 * torch.tensor([[9.0 + 3, 12.0 + 4]]) / 30)
    torch.testing.assert_close(head.extra_scores(hidden), expected)
    torch.testing.assert_close(head.scores(hidden), 30 * torch.tanh(0.5 * torch.tensor([[0.0, 4.0, 8.0]]) / 30))


def test_without_padding_there_are_no_extra_rows():
    head = LinearHead.of(_unembedding(real_rows=5, bias=None))
    assert head.extra_rows is head.extra_bias is head.bias is None
    assert head.extra_scores(torch.zeros(1, 3)) is None


def test_the_rank_tolerance_is_that_of_the_stored_dtype():
    assert LinearHead.of(_unembedding()).noise_eps == 2**-7
    assert LinearHead.of(_unembedding(noise_eps=0.1)).noise_eps == 0.1  # a quantised file knows better
    again = LinearHead.of(_unembedding(), weight=torch.nn.Parameter(_unembedding().weight.float()))
    assert again.noise_eps == 2**-7
    assert not again.weight.requires_grad


def test_float64_stays_float64():
    head = LinearHead.of(_unembedding(weight=torch.eye(5, 3, dtype=torch.float64)))
    assert head.weight.dtype == head.bias.dtype == head.columns.centred.dtype == torch.float64


@pytest.mark.parametrize(
    ("rows", "bias", "softcap", "bound"),
    [(9, False, None, 4), (9, True, None, 5), (3, True, None, 3), (9, True, 3.0, None)],
)
def test_rank_bound(rows, bias, softcap, bound):
    head = LinearHead(torch.zeros(rows, 3), bias=torch.zeros(rows) if bias else None, softcap=softcap)
    assert head.rank_bound == bound
