"""The object itself: shapes of the vocabulary, scores, devices, the block of audit.json."""

import pytest
import torch

from unembed import ops
from unembed.models import FinalNorm, Unembedding

ROWS, WIDTH = 12, 6


@pytest.fixture
def head(draw):
    norm = FinalNorm("rms", draw(WIDTH), None, 1e-6)
    return Unembedding(
        weight=draw(ROWS, WIDTH), bias=draw(ROWS), softcap=2.0, scale=0.5, norm=norm, vocab_tokens=9, holes=(1,)
    )


def test_scores_follow_the_definition(head, draw):
    hidden = draw(2, 3, WIDTH)
    plain = 0.5 * (hidden @ head.weight.T + head.bias)
    torch.testing.assert_close(head.scores(hidden, padding=True), 2 * torch.tanh(plain / 2))
    torch.testing.assert_close(head.scores(hidden), 2 * torch.tanh(plain / 2)[..., :9])
    expected = ops.linear_scores(hidden, head.weight[:9], bias=head.bias[:9], softcap=2.0, scale=0.5)
    assert torch.equal(head.scores(hidden), expected)


def test_a_row_centred_head_has_the_same_probabilities(draw):  # M11: TransformerLens#693
    weight, hidden = draw(ROWS, WIDTH), draw(5, WIDTH)
    plain, centred = Unembedding(weight=weight), Unembedding(weight=weight - weight.mean(0))
    assert not torch.allclose(plain.scores(hidden), centred.scores(hidden))
    torch.testing.assert_close(plain.scores(hidden).softmax(-1), centred.scores(hidden).softmax(-1))


@pytest.mark.parametrize(
    ("rows", "width", "bias", "softcap", "tokens", "bound"),
    [
        (12, 6, False, None, None, 7),
        (12, 6, True, None, None, 8),
        (12, 6, True, 30.0, None, None),
        (12, 6, False, None, 5, 5),
        (5, 6, True, None, 100, 5),
    ],
)
def test_the_rank_bound(*, rows, width, bias, softcap, tokens, bound, draw):
    head = Unembedding(
        weight=draw(rows, width), bias=draw(rows) if bias else None, softcap=softcap, vocab_tokens=tokens
    )
    assert head.rank_bound == bound
    if bound is not None:
        hidden = draw(60, width).double()
        log_probs = head.scores(hidden).log_softmax(-1)
        assert torch.linalg.matrix_rank(log_probs, rtol=1e-9) <= bound


def test_describe(head):
    assert head.describe() == {
        "kind": "linear",
        "in_features": 6,
        "vocab_rows": 12,
        "vocab_tokens": 9,
        "tied": False,
        "bias": True,
        "softcap": 2.0,
        "scale": 0.5,
        "dtype": "float32",
        "padding_rows": 3,
        "holes": 1,
        "norm": "rms",
        "rank_bound": None,
    }


def test_to_moves_every_tensor(head):
    moved = head.to("meta")
    assert {t.device.type for t in (moved.weight, moved.bias, moved.norm.weight)} == {"meta"}
    assert head.weight.device.type == "cpu"
    assert moved.describe() == head.describe()


def test_the_representation_is_short(head):
    assert len(repr(head)) < 400


def test_as_a_head_to_train_it_gives_the_same_scores_from_the_same_matrix(head, draw):
    made, hidden = head.to_head(), draw(2, WIDTH)
    torch.testing.assert_close(made(hidden).detach(), head.scores(hidden, padding=True))
    assert made.weight.data_ptr() == head.weight.data_ptr()
    assert made.weight.requires_grad
    assert (made.out_features, made.softcap, made.scale) == (ROWS, 2.0, 0.5)
