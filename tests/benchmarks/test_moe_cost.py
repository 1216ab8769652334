"""What the comparison with a mixture of experts counts: parameters, and the bytes that a batch reads."""

import csv

import pytest
import torch

from benchmarks import moe_cost
from benchmarks.moe_cost import CHOSEN, EXPERTS, SHAPES, WAYS, MoeLayer, Shape, UltraMemLayer, ways_of

SMALL = Shape(
    hidden=16, layers=2, heads=2, inner=24, expert=4,
    memory={"n": 8, "k": 4, "key_width": 4, "value_width": 6, "pre_value_width": 2},
)  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_both_layers_have_nearly_as_many_parameters_in_all_and_for_a_token(name):
    with torch.device("meta"):
        moe, ultramem = MoeLayer(SHAPES[name]), UltraMemLayer(SHAPES[name])
    in_all = [sum(parameter.numel() for parameter in layer.parameters()) for layer in (moe, ultramem)]
    experts = sum(parameter.numel() for parameter in moe.block.experts.parameters())
    memory = SHAPES[name].memory
    tables = sum(value.numel() for key, value in ultramem.named_parameters() if key.endswith("value_table"))
    read = memory["k"] * (memory["value_width"] + memory["pre_value_width"])
    for_a_token = [in_all[0] - experts * (EXPERTS - CHOSEN) // EXPERTS, in_all[1] - tables + read]
    assert in_all[0] == pytest.approx(in_all[1], rel=1e-3 if name == "227m-1.2b" else 0.09)
    assert for_a_token[0] == pytest.approx(for_a_token[1], rel=0.03)


def test_one_token_reads_its_experts_and_its_rows():
    hidden_states = torch.randn(1, 1, SMALL.hidden, generator=torch.Generator().manual_seed(0))
    moe, ultramem = MoeLayer(SMALL), UltraMemLayer(SMALL)
    expert = 3 * SMALL.hidden * SMALL.expert
    assert moe.bytes_read(hidden_states) == 4 * (EXPERTS * SMALL.hidden + CHOSEN * expert)
    others = sum(value.numel() for name, value in ultramem.named_parameters() if not name.endswith("value_table"))
    assert ultramem.bytes_read(hidden_states) == 4 * (others + 4 * (6 + 2))


def test_what_two_tokens_read_both_counts_once():
    hidden_states = torch.randn(1, 1, SMALL.hidden, generator=torch.Generator().manual_seed(0))
    for layer in (MoeLayer(SMALL), UltraMemLayer(SMALL)):
        assert layer.bytes_read(hidden_states.expand(3, 1, -1)) == layer.bytes_read(hidden_states)


def test_every_way_to_compute_experts_gives_the_same():
    layer, hidden_states = MoeLayer(SMALL), torch.randn(5, 1, SMALL.hidden)
    with torch.no_grad():
        outputs = [layer.computed_by(way, hidden_states) for way in WAYS]
    for output in outputs[1:]:
        torch.testing.assert_close(output, outputs[0], rtol=1e-4, atol=1e-7)


def test_ways_that_copy_experts_for_each_token_are_left_out_where_there_is_no_room(monkeypatch):
    layer = MoeLayer(SMALL)
    monkeypatch.setattr(moe_cost, "_MOST_COPIED", 3 * 4 * CHOSEN * 3 * SMALL.hidden * SMALL.expert)
    assert ways_of(layer, 3, "forward") == WAYS
    assert ways_of(layer, 4, "forward") == ("eager", "grouped_mm")
    assert ways_of(layer, 3, "both") == ("grouped_mm", "batched_mm")


def test_every_row_is_written_and_printed(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(moe_cost, "MOE_RESULTS", tmp_path / "rows.csv")
    monkeypatch.setattr(moe_cost, "SHAPES", {"small": SMALL, "other": SMALL})
    monkeypatch.setattr("sys.argv", ["moe_cost", "--shapes", "small,other", "--batches", "1,5", "--seconds", "0"])
    moe_cost.main()
    rows = list(csv.DictReader((tmp_path / "rows.csv").open()))
    expected = [(shape, passes, batch) for shape in ("small", "other") for passes in moe_cost.PASSES for batch in "15"]
    assert [(row["shape"], row["passes"], row["batch"]) for row in rows] == expected
    assert all(float(row[name]) > 0 for row in rows for name in ("moe_ms", "ultramem_ms", "moe_mb", "ultramem_mb"))
    printed = capsys.readouterr().out
    assert printed.count("| forward |") == printed.count("| both |") == 4
