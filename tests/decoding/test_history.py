"""Which tokens a scope and a window mean."""

from __future__ import annotations

import pytest
import torch

from unembed.decoding import History


def test_scopes_and_windows_worked_by_hand():
    history = History.of([[1, 2, 3], [4]], [[5], [6, 7]])
    assert history.tokens.tolist() == [[1, 2, 3, 5], [-1, 4, 6, 7]]
    assert history.part("all").tolist() == history.tokens.tolist()
    assert history.part("written").tolist() == [[-1, -1, -1, 5], [-1, -1, 6, 7]]
    assert history.part("prompt").tolist() == [[1, 2, 3, -1], [-1, 4, -1, -1]]
    assert history.part("all", 2).tolist() == [[3, 5], [6, 7]]
    assert history.part("written", 2).tolist() == [[-1, 5], [6, 7]]
    assert history.part("prompt", 3).tolist() == [[2, 3, -1], [4, -1, -1]]
    assert history.part("all", 9).tolist() == history.tokens.tolist()
    assert history.lengths().tolist() == [1, 2]


def test_without_a_prompt_all_is_written():
    history = History(torch.tensor([[-1, 3], [4, 5]]))
    assert history.part("written").tolist() == [[-1, 3], [4, 5]]
    assert history.part("prompt").tolist() == [[-1, -1], [-1, -1]]
    assert history.lengths().tolist() == [1, 2]


def test_no_rows_and_no_tokens():
    assert History.of([], []).tokens.shape == (0, 0)
    assert History.of([[]], [[]]).tokens.shape == (1, 0)
    with pytest.raises(ValueError, match="argument 2 is shorter"):
        History.of([[1], [2]], [[3]])


@pytest.mark.parametrize("name", ["written", "coin"])
def test_one_number_a_row_is_asked_for(name):
    with pytest.raises(ValueError, match=rf"`{name}` must have shape \[2\], got \(3,\)"):
        History(torch.zeros(2, 4, dtype=torch.int64), **{name: torch.zeros(3)})
