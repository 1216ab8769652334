"""OpT-DeUS with whole heads: what differs only in the order of its heads is one and the same layer."""

import pytest
import torch

from tests.upscalers.checkpoints import read_tensors, save_base, write_tensors
from tests.upscalers.dense.layers import layer
from upscalers.runs.upscale import upscale

HEADS, GROUPS, HEAD_DIM = 8, 4, 4
GROUP_ORDER = [2, 0, 3, 1]
# Of the query heads, two a group: those of group 2 first, in turned order, and so on.
HEAD_ORDER = [5, 4, 0, 1, 7, 6, 2, 3]


def rows(order: list[int]) -> torch.Tensor:
    return torch.tensor([head * HEAD_DIM + row for head in order for row in range(HEAD_DIM)])


def reordered(block: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same layer with its heads in another order: it computes what it computed."""
    block = {name: tensor.clone() for name, tensor in block.items()}
    for letter, order in (("q", HEAD_ORDER), ("k", GROUP_ORDER), ("v", GROUP_ORDER)):
        for name in (
            f"self_attn.{letter}_proj.weight",
            f"self_attn.{letter}_proj.bias",
            f"self_attn.{letter}_norm.weight",
        ):
            if name in block and len(block[name]) != HEAD_DIM:  # a norm of single heads is the same for all
                block[name] = block[name][rows(order)]
    block["self_attn.o_proj.weight"] = block["self_attn.o_proj.weight"][:, rows(HEAD_ORDER)]
    return block


@pytest.fixture
def shuffled(native_family, tmp_path):
    """A base whose layer 2 is layer 1 with its heads in another order."""
    bias = {} if native_family in ("qwen2", "mistral") else {"attention_bias": True}
    base = save_base(
        tmp_path / "base",
        native_family,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=HEAD_DIM,
        **bias,
    )
    tensors = read_tensors(base)
    for name, tensor in reordered(layer(tensors, 1)).items():
        tensors[f"model.layers.2.{name}"] = tensor
    write_tensors(base, tensors)
    assert not torch.equal(layer(tensors, 1)["self_attn.q_proj.weight"], layer(tensors, 2)["self_attn.q_proj.weight"])
    return base


def block_of(base, output, **options) -> dict[str, torch.Tensor]:
    given = {"identity": "none", "solver": "hungarian", **options}
    upscale(base=base, method="opt-deus", output=output, placement="2", options=given, verify=False)
    return layer(read_tensors(output), 2)


def test_heads_in_another_order_are_recovered_exactly_with_all_that_belongs_to_them(shuffled, tmp_path):
    expected = layer(read_tensors(shuffled), 2)
    found = block_of(shuffled, tmp_path / "out", head_aware=True)
    assert found.keys() == expected.keys()
    for name in found:
        assert torch.equal(found[name], expected[name]), name


def test_a_raw_plan_of_whole_heads_shrinks_them_by_their_rows(shuffled, tmp_path):
    expected = layer(read_tensors(shuffled), 2)
    found = block_of(shuffled, tmp_path / "out", head_aware=True, plan_scale="raw")
    for letter, count in (("q", HEADS), ("k", GROUPS), ("v", GROUPS)):
        name = f"self_attn.{letter}_proj.weight"
        torch.testing.assert_close(found[name], expected[name] * (1 + 1 / (count * HEAD_DIM)) / 2)


def test_the_plans_of_whole_heads_are_measured_too(shuffled, tmp_path):
    options = {"head_aware": True, "solver": "hungarian"}
    report = upscale(
        base=shuffled, method="opt-deus", output=tmp_path / "out", placement="2", options=options, verify=False
    )
    rows = {row["tensor"]: row for row in report.measurements}
    for role in ("query", "key", "value"):
        assert rows[role]["norm_ratio"] == pytest.approx(1.0)
        assert (rows[role]["effective_sources"], rows[role]["residual"]) == (1.0, 0.0)
