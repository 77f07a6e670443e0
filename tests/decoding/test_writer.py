"""Where sequences end, what is told of them meanwhile, and what is left of the model afterwards."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from unembed.decoding import generate, metrics


def _count_up(tokens):
    """After v comes v + 1, of 10."""
    return torch.eye(10)[(tokens[:, -1] + 1) % 10]


def test_d26_exactly_one_end_and_the_limit_of_each_row():
    found = generate(_count_up, [[1], [5], [9]], eos_ids=[8, 4], pad_id=0, max_new_tokens=[9, 2, 3], alternatives=1)
    assert found.tokens[:, 0].tolist() == [[2, 3, 4], [6, 7, 0], [0, 1, 2]]
    assert found.lengths.flatten().tolist() == [3, 2, 3]
    assert found.finish == [["eos"], ["length"], ["length"]]
    assert [int((row == 4).sum()) for row in found.tokens] == [1, 0, 0]
    assert found.alternative_ids[:, 0, :, 0].tolist() == [[2, 3, 4], [6, 7, 0], [0, 1, 2]]
    assert found.alternative_log_probs[1, 0, 2, 0] == -torch.inf


class _Model(nn.Module):
    """A model of transformers' conventions that counts up, and remembers how many rows it was asked for."""

    def __init__(self, **config):
        super().__init__()
        self.config = SimpleNamespace(**config)
        self.part, self.frozen = nn.Dropout(), nn.Dropout().eval()
        self.rows = []

    def forward(self, input_ids, attention_mask=None, cache=None, use_cache=True, **kwargs):
        self.rows.append(len(input_ids))
        assert not any(part.training for part in self.modules())
        return SimpleNamespace(logits=torch.eye(10)[(input_ids + 1) % 10], cache=_Cache())


class _Cache:
    """Nothing to remember."""

    def reorder_cache(self, rows):
        """The last token says all."""


def test_d13_padding_and_ends_are_those_of_the_model_even_when_0():
    found = generate(_Model(pad_token_id=0, eos_token_id=4), [[1], [5]], max_new_tokens=4)
    assert found.tokens[:, 0].tolist() == [[2, 3, 4, 0], [6, 7, 8, 9]]
    own = _Model(pad_token_id=3, eos_token_id=9)
    own.generation_config = SimpleNamespace(eos_token_id=[4, 7], pad_token_id=None)
    found = generate(own, [[1], [5], [7]], max_new_tokens=4)
    assert found.tokens[:, 0].tolist() == [[2, 3, 4, 3], [6, 7, 3, 3], [8, 9, 0, 1]]
    no_pad = generate(_Model(pad_token_id=None, eos_token_id=0), [[8], [5]], max_new_tokens=3)
    assert no_pad.tokens[:, 0].tolist() == [[9, 0, 0], [6, 7, 8]]
    assert generate(own, [[1]], max_new_tokens=6, eos_ids=()).tokens.flatten().tolist() == [2, 3, 4, 5, 6, 7]


def test_rows_that_have_ended_are_dropped_once_they_are_a_quarter():
    model = _Model()
    found = generate(model, [[0]] * 8, max_new_tokens=[1, 2, 3, 4, 5, 5, 7, 7], pad_id=0)
    assert found.lengths.flatten().tolist() == [1, 2, 3, 4, 5, 5, 7, 7]
    assert model.rows == [8, 8, 6, 6, 4, 2, 2]


def test_every_pair_of_rows_and_limits():
    for lengths in itertools.product(range(1, 4), repeat=3):
        found = generate(_count_up, [[1], [2], [3]], max_new_tokens=lengths, pad_id=0)
        assert found.tokens[:, 0].tolist() == [
            [start + 1 + place if place < own else 0 for place in range(max(lengths))]
            for start, own in zip((1, 2, 3), lengths, strict=True)
        ]


@pytest.mark.parametrize("options", [{}, {"seeds": [1, 2, 3]}])
def test_a_mask_sees_what_each_row_has_written_and_may_leave_nothing(toy, options):
    """Row r must write r, then anything that it has not written yet among the first 3, then end."""
    seen = []

    def mask(history):
        seen.append((history.rows.tolist(), history.lengths().tolist(), history.tokens.tolist()))
        allowed = torch.zeros(len(history.tokens), 5, dtype=torch.bool)
        for place, row in enumerate(history.rows.tolist()):
            written = history.tokens[place, 2:].tolist()
            allowed[place, :3] = torch.tensor([v not in written if written else v == row for v in range(3)])
        return allowed

    found = generate(toy(5, 0), [[4], [4, 4], [3]], mask=mask, max_new_tokens=[9, 2, 9], pad_id=4, **options)
    assert found.tokens[:, 0, 0].tolist() == [0, 1, 2]
    assert sorted(found.tokens[0, 0].tolist()) == sorted(found.tokens[2, 0].tolist()) == [0, 1, 2]
    assert found.finish == [["dead end"], ["length"], ["dead end"]]
    assert seen[0] == ([0, 1, 2], [0, 0, 0], [[-1, 4], [4, 4], [-1, 3]])
    assert [one[0] for one in seen[1:]] == [[0, 1, 2], [0, 2], [0, 2]]


class Letters:
    """Ids are letters; 9 is the first byte of two, 8 the second."""

    def decode(self, ids):
        return b"".join({9: b"\xc3", 8: b"\xa9"}.get(one, bytes([97 + one])) for one in ids).decode(errors="replace")


def _script(*rows):
    """Writes given tokens after a prompt of one token, its number."""

    def scores(tokens):
        written = [rows[int(row[0])][len(row) - 1] for row in tokens]
        return torch.eye(10)[written]

    return scores


def test_stop_strings_and_events_in_order():
    script = _script([1, 9, 8, 2, 3, 4], [0, 0, 1, 2, 7, 7], [5, 9, 9, 6, 6, 6])
    events = []
    found = generate(
        script,
        [[0], [1], [2]],
        tokenizer=Letters(),
        stop=["cd", "abc"],
        max_new_tokens=[6, 6, 3],
        pad_id=7,
        on_token=events.append,
    )
    assert found.tokens[:, 0].tolist() == [[1, 9, 8, 2, 3], [0, 0, 1, 2, 7], [5, 9, 9, 7, 7]]
    assert found.texts == [["bé"], ["a"], ["f\ufffd\ufffd"]]
    assert found.finish == [["stop"], ["stop"], ["length"]]
    assert [one.row for one in events] == [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 0]
    told = [[one.text for one in events if one.row == row] for row in range(3)]
    assert told == [["b", "", "é", "", ""], ["", "a", "", ""], ["f", "", "\ufffd\ufffd"]]
    assert [one.finish for one in events if one.finish] == ["length", "stop", "stop"]
    assert events[0].log_prob == pytest.approx(float(found.log_probs[0, 0, 0]))


def test_texts_leave_out_the_end_and_are_the_same_without_events():
    script = _script([0, 1, 4], [2, 4, 4])
    found = generate(script, [[0], [1]], tokenizer=Letters(), eos_ids=4, max_new_tokens=3)
    events = []
    told = generate(script, [[0], [1]], tokenizer=Letters(), eos_ids=4, max_new_tokens=3, on_token=events.append)
    assert found.texts == told.texts == [["ab"], ["c"]]
    assert found.tokens[:, 0].tolist() == [[0, 1, 4], [2, 4, 4]]
    assert generate(script, [[0], [1]], eos_ids=4, max_new_tokens=3).texts is None
    assert [one.text for one in events] == ["a", "c", "b", "", ""]


def test_a_dead_end_tells_what_was_held_back():
    events = []
    found = generate(
        _script([0, 1, 9, 0]),
        [[0]],
        mask=lambda history: (history.lengths()[:, None] < 3).expand(-1, 10),
        tokenizer=Letters(),
        stop="bx",
        on_token=events.append,
    )
    assert [(one.token, one.text, one.finish) for one in events] == [
        (0, "a", None), (1, "", None), (9, "", None), (None, "b\ufffd", "dead end"),
    ]  # fmt: skip
    assert found.texts == [["ab\ufffd"]]


def test_the_first_text_is_decoded_behind_the_prompt(byte_tokenizer):
    class Words:
        def decode(self, ids):
            return " ".join("abcdefghij"[one] for one in ids)

    assert generate(_count_up, [[3]], tokenizer=Words(), max_new_tokens=2).texts == [[" e f"]]


def test_an_exception_in_the_callback_leaves_each_part_in_its_mode():
    model = _Model()
    assert (model.training, model.part.training, model.frozen.training) == (True, True, False)

    def interrupt(event):
        assert not model.training
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(model, [[1]], on_token=interrupt)
    assert (model.training, model.part.training, model.frozen.training) == (True, True, False)


def test_sequences_come_without_padding(toy):
    out = generate(toy(5, 1), [[1], [2], [3]], max_new_tokens=[2, 6, 4], pad_id=0)
    assert [len(one) for one in out.sequences()] == [2, 6, 4] == [len(one) for one in out.sequence_log_probs()]
    assert out.sequences()[2] == out.tokens[2, 0, :4].tolist()
    none_for_the_second = generate(
        toy(5, 1), [[1], [2]], mask=lambda history: (history.rows != 1)[:, None].expand(-1, 5), max_new_tokens=2
    )
    assert [len(one) for one in none_for_the_second.sequences()] == [2, 0]
    whole = sum(map(sum, out.sequence_log_probs())) / 12
    assert math.isclose(metrics.perplexity(out.sequence_log_probs()), math.exp(-whole), rel_tol=1e-6)
