"""What the comparison with a mixture of experts counts: parameters, and the bytes that a batch reads."""

import pytest
import torch

from benchmarks.moe_cost import CHOSEN, EXPERTS, SHAPES, WAYS, MoeLayer, Shape, UltraMemLayer

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
