"""Banks and ids that do not fit a model are refused, and it is said why."""

import dataclasses

import pytest
import torch
from banks.small_bank import layout_of, made

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.hierarchical.bank import MemoryBank
from midus_hf.memories.hierarchical.options import HierFFNOptions, HierKVOptions


def refused(folder, layout=None):
    with pytest.raises(ValueError) as raised:
        MemoryBank(folder, layout or layout_of())
    return str(raised.value)


def test_an_absent_bank_is_missed(tmp_path):
    assert refused(tmp_path / "none") == (
        f"there is no memory bank in {tmp_path / 'none'} (No such file or directory: bank.json); expected one beside the model."
    )


WIDER = ModelSizes(hidden_size=16, num_heads=2, intermediate_size=12, num_layers=3)


@pytest.mark.parametrize(
    ("layout", "difference"),
    [
        (layout_of(HierKVOptions(sizes=[3, 0, 2], branching=4)), "its type is 'hier-ffn'; expected 'hier-kv'"),
        (layout_of(HierFFNOptions(sizes=[3, 0, 2], branching=5)), "its branching is 4; expected 5"),
        (layout_of(HierFFNOptions(sizes=[3, 0, 3], branching=4)), "its levels is "),
        (layout_of(HierFFNOptions(sizes=[3, 0, 2, 0], branching=4)), "its levels is "),
        (layout_of(sizes=WIDER), "its levels is "),
        (layout_of(layers=(0, 1, 2)), "its layers is [0, 2]; expected [0, 1, 2]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bank_of_another_model_is_refused(layout, difference, folder):
    message = refused(folder, layout)
    assert message.startswith(f"the memory bank in {folder} belongs to another model: {difference}")
    assert message.endswith(". Put the model's own there.")


def test_a_bank_of_another_base_is_refused_and_one_whose_base_nobody_knows_is_not(tmp_path):
    known = [dataclasses.replace(layout_of(), base=digit * 64) for digit in "ab"]
    made(tmp_path / "bank", known[0])
    message = refused(tmp_path / "bank", known[1])
    assert (
        "belongs to another model: its base, the weights that its model was upscaled from, has the digest aaaaaaaaaaaaaaaa...; "
        "expected bbbbbbbbbbbbbbbb.... Put the model's own there."
    ) in message
    for layout in (known[0], layout_of()):
        opened = MemoryBank(tmp_path / "bank", layout)
        opened.save(tmp_path / f"copy-{layout.base}")
        assert "expected bbbb" in refused(tmp_path / f"copy-{layout.base}", known[1]), "copies keep the digest"


ANOTHER_FORMAT = "bank.json is not of format 4; expected a bank that this version reads."


@pytest.mark.parametrize(
    ("description", "message"),
    [
        *((text, ANOTHER_FORMAT) for text in ("{", "[]", "null", '"x"', "{}", '{"format": 3}')),
        ('{"format": 4}', "belongs to another model: its layout is None. Put the model's own there."),
    ],
)
def test_a_description_that_is_none_is_refused(description, message, folder):
    (folder / "bank.json").write_text(description)
    assert refused(folder).endswith(message)


NO_IDS = "expected integers [batch, 3], for each row a node of each level of the tree."
OF_TREE = " Take paths of the tree that the model is for."
OR_GENERIC = "or a row of -1 for the generic memory."


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), f"is (3,), torch.int64; {NO_IDS}"),
        (torch.zeros(2, 4, dtype=torch.int64), f"is (2, 4), torch.int64; {NO_IDS}"),
        (torch.zeros(2, 3), f"is (2, 3), torch.float32; {NO_IDS}"),
        (torch.tensor([[0, 0, 0], [0, 0, 64]]), f"has 64 for level 3 in row 1; expected 0 to 63, {OR_GENERIC}"),
        # Of a level without blocks.
        (torch.tensor([[0, 16, 0]]), f"has 16 for level 2 in row 0; expected 0 to 15, {OR_GENERIC}"),
        (
            torch.tensor([[0, 1, 5], [0, 15, 5]]),
            f"has 15 for level 2 in row 1, which is no child of node 0; expected 0 to 3.{OF_TREE}",
        ),
        (
            torch.tensor([[0, 1, 8]]),
            f"has 8 for level 3 in row 0, which is no child of node 1; expected 4 to 7.{OF_TREE}",
        ),
        (torch.tensor([[-1, -1, 3]]), f"has -1 for level 1 in row 0; expected 0 to 3, {OR_GENERIC}"),
        (torch.tensor([[-2, -2, -2]]), f"has -2 for level 1 in row 0; expected 0 to 3, {OR_GENERIC}"),
    ],
)
def test_ids_that_name_no_blocks_are_refused(ids, message, bank):
    with pytest.raises(ValueError) as raised:
        bank.fetch(ids)
    assert str(raised.value) == f"memory_ids {message}"
