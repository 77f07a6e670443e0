"""The measured table of heads: what is in a row, files, resuming, and heads that fail."""

import csv
import json
import math

import pytest
import torch

from unembed import heads, losses
from unembed.experiments import HeadCosts, _head_costs, _head_table, bench_heads, head_table
from unembed.experiments._head_costs import check_specs, default_specs, entropy, measure, measure_here
from unembed.results import InputError

SMALL = HeadCosts(tokens=64, dim=16, vocab=97, rounds=2)


def test_every_registered_head_has_a_row_of_numbers():
    specs = default_specs()
    kinds = {heads.build(spec, 16, 97, device="meta").__class__ for spec in specs}
    assert kinds == set(heads.HEADS.values())
    assert specs[0] == "linear"
    for spec in specs:
        row = measure_here(spec, SMALL)
        head = heads.build(spec, 16, 97)
        assert row["head"] == spec
        assert row["parameters"] == sum(parameter.numel() for parameter in head.parameters())
        assert (row["forward_flops"], row["backward_flops"]) == (64 * head.flops(), 128 * head.flops())
        assert row["rank_bound"] == head.rank_bound
        assert math.isfinite(row["loss_at_init"])
        low, high = row["over_linear_range"]
        assert 0 < low <= row["over_linear"] <= high


def test_the_first_loss_is_that_of_the_head_on_targets_of_zipfs_law():
    row = measure_here("sigsoftmax", SMALL)
    torch.manual_seed(0)
    head = heads.build("sigsoftmax", 16, 97)
    torch.manual_seed(1)
    hidden = head.example_hidden((1, 64)).float()
    law = (1 / torch.arange(1, 98, dtype=torch.float64)).cumsum(0)
    uniform = torch.rand(1, 64, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    targets = torch.searchsorted(law / law[-1], uniform)
    with torch.no_grad():
        expected = float(losses.cross_entropy(head, hidden, targets))
    assert row["loss_at_init"] == pytest.approx(expected, rel=1e-6)


def test_the_entropy_of_the_law_is_below_that_of_a_uniform_guess():
    assert entropy(2) == pytest.approx(-(2 / 3 * math.log(2 / 3) + 1 / 3 * math.log(1 / 3)))
    assert entropy(97) < math.log(97)


def test_memory_counts_the_gradients_of_a_fresh_process():
    """Parameters of 16 MB: their gradients are as large, and nothing near tokens times V is there beside them."""
    costs = HeadCosts(tokens=2048, dim=64, vocab=65536, rounds=1)
    row = measure("linear", costs)
    if row["added_bytes"] is None:
        pytest.skip("nobody counts memory here")
    assert 65536 * 64 * 4 <= row["added_bytes"] < 2048 * 65536 * 4 / 2
    assert row["over_linear"] == pytest.approx(1, abs=0.9)


def _pretended(spec, costs):
    row = {"head": spec, "kind": "X", "parameters": 3, "forward_flops": 4_000_000_000, "backward_flops": 8_000_000_000}
    more = {"rank_bound": None, "loss_at_init": 4.0, "seconds": 0.25, "over_linear": 2.0, "over_linear_range": [1, 3]}
    return {**row, **more, "added_bytes": 5 * 2**20}


def test_the_files_hold_the_table(monkeypatch, tmp_path):
    monkeypatch.setattr(_head_table, "measure", _pretended)
    said = []
    table = bench_heads(SMALL, ["linear", "mos:k=2"], folder=tmp_path / "a", progress=lambda *told: said.append(told))
    assert said == [("linear", 0, 2), ("mos:k=2", 1, 2), ("", 2, 2)]
    assert json.loads((tmp_path / "a" / "heads.json").read_text()) == table
    with (tmp_path / "a" / "heads.csv").open() as file:
        assert [row["head"] for row in csv.DictReader(file)] == ["linear", "mos:k=2"]
    last = (tmp_path / "a" / "heads.md").read_text().splitlines()[-1]
    assert last == "| mos:k=2 | 250 ms | 2.00 (1.00 to 3.00) | 5 MB | 3 | 12 | none | 4.000 |"
    assert sorted(path.name for path in (tmp_path / "a").iterdir()) == ["heads.csv", "heads.json", "heads.md"]


def test_an_interrupted_table_goes_on_and_failed_rows_are_measured_again(monkeypatch, tmp_path):
    asked = []

    def interrupted(spec, costs):
        asked.append(spec)
        if spec == "low_rank":
            raise KeyboardInterrupt
        return {"head": spec, "failed": "no memory"} if spec == "adaptive" else _pretended(spec, costs)

    monkeypatch.setattr(_head_table, "measure", interrupted)
    specs = ["linear", "adaptive", "low_rank", "mos"]
    with pytest.raises(KeyboardInterrupt):
        bench_heads(SMALL, specs, folder=tmp_path)
    assert [row["head"] for row in json.loads((tmp_path / "heads.json").read_text())["rows"]] == specs[:2]
    monkeypatch.setattr(_head_table, "measure", lambda spec, costs: asked.append(spec) or _pretended(spec, costs))
    asked.clear()
    table = bench_heads(SMALL, specs, folder=tmp_path, resume=True)
    assert asked == ["adaptive", "low_rank", "mos"]
    assert [row["head"] for row in table["rows"]] == specs
    with pytest.raises(InputError, match="measured with dim 16, now it is 8"):
        bench_heads(HeadCosts(tokens=64, dim=8, vocab=97, rounds=2), specs, folder=tmp_path, resume=True)
    table = bench_heads(SMALL, ["mos"], folder=tmp_path, resume=True)
    assert [row["head"] for row in table["rows"]] == ["mos", "linear", "adaptive", "low_rank"]  # the others stay
    table["rows"][0] = {"head": "mos"}
    (tmp_path / "heads.json").write_text(json.dumps(table))
    with pytest.raises(InputError, match="not a table of heads"):
        bench_heads(SMALL, specs, folder=tmp_path, resume=True)
    (tmp_path / "heads.json").write_text("[]")
    with pytest.raises(InputError, match="not a table of heads"):
        bench_heads(SMALL, specs, folder=tmp_path, resume=True)


def test_a_head_that_fails_or_dies_has_a_row_that_says_so():
    row = measure("adaptive:cutoffs=[97]", SMALL)
    assert row["failed"].startswith("ValueError: `cutoffs`")
    assert head_table.words(row)[1].startswith("failed: ValueError: `cutoffs`")
    dead = _head_costs.measure("linear", HeadCosts(device="nowhere"))
    assert "failed" in dead


def test_what_cannot_be_built_is_refused_before_anything_is_measured(monkeypatch):
    monkeypatch.setattr(_head_table, "measure", lambda spec, costs: pytest.fail("measured"))
    with pytest.raises(InputError, match="mos"):
        bench_heads(SMALL, ["linear", "moss"])
    with pytest.raises(InputError, match="mos:k=1000000000000000000000"):
        bench_heads(SMALL, ["mos:k=1000000000000000000000"])
    with pytest.raises(InputError, match="nowhere_to_be_found cannot be imported"):
        bench_heads(HeadCosts(imports=("nowhere_to_be_found",)))
    with pytest.raises(InputError, match="given twice"):
        check_specs(["linear", "linear"], SMALL)
