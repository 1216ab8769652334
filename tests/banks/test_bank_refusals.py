"""Banks, files and ids that do not fit a model are refused with the value and the remedy."""

import dataclasses
import re

import pytest
import torch
from banks.small_bank import layout_of, made

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.hierarchical.bank import MappedLevel, MemoryBank, write_level
from midus_hf.memories.hierarchical.options import HierFFNOptions, HierKVOptions

OTHER = r"^the memory bank in .* belongs to another model: "
REMEDY = r".*\. Put the model's own there\.$"
FORMAT = r"bank\.json is not of format 4; expected a bank that this version reads\.$"
WIDER = ModelSizes(hidden_size=16, num_heads=2, intermediate_size=12, num_layers=3)


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (layout_of(HierKVOptions(sizes=[3, 0, 2], branching=4)), "its type is 'hier-ffn'; expected 'hier-kv'"),
        (layout_of(HierFFNOptions(sizes=[3, 0, 2], branching=5)), "its branching is 4; expected 5"),
        (layout_of(HierFFNOptions(sizes=[3, 0, 3], branching=4)), "its levels is "),
        (layout_of(HierFFNOptions(sizes=[3, 0, 2, 0], branching=4)), "its levels is "),
        (layout_of(sizes=WIDER), "its levels is "),
        (layout_of(layers=(0, 1, 2)), r"its layers is \[0, 2\]; expected \[0, 1, 2\]"),
        *((text, FORMAT) for text in ("{", "[]", '{"format": 3}')),
        ('{"format": 4}', "its layout is None"),
        (None, r"there is no memory bank in .* \(No such file or directory: bank\.json\); expected one next to the model"),
    ],
)  # fmt: skip
def test_bank_of_another_model_is_refused(layout, message, folder):
    if isinstance(layout, str):
        (folder / "bank.json").write_text(layout)
    elif layout is None:
        (folder / "bank.json").unlink()
    with pytest.raises(ValueError, match=OTHER + message + REMEDY if message.startswith("its ") else message):
        MemoryBank(folder, layout_of() if isinstance(layout, str | None) else layout)


def test_bank_of_another_base_is_refused_if_both_are_known(tmp_path):
    known = [dataclasses.replace(layout_of(), base=digit * 64) for digit in "ab"]
    made(tmp_path / "bank", known[0])
    message = f"its base, .*, has the digest {'a' * 16}...; expected {'b' * 16}..."
    with pytest.raises(ValueError, match=OTHER + message + REMEDY):
        MemoryBank(tmp_path / "bank", known[1])
    for layout in (known[0], layout_of()):
        opened = MemoryBank(tmp_path / "bank", layout)
        opened.save(tmp_path / f"copy-{layout.base}")
        with pytest.raises(ValueError, match="expected bbbb"):  # copies keep the digest
            MemoryBank(tmp_path / f"copy-{layout.base}", known[1])


NO_IDS = r"; expected integers \[batch, 3\], for each row a node of each level of the tree"
GENERIC = "or a row of -1 for the generic memory"


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), rf"is \(3,\), torch.int64{NO_IDS}"),
        (torch.zeros(2, 3), rf"is \(2, 3\), torch.float32{NO_IDS}"),
        (torch.tensor([[0, 0, 0], [0, 0, 64]]), f"has 64 for level 3 in row 1; expected 0 to 63, {GENERIC}"),
        (torch.tensor([[0, 16, 0]]), f"has 16 for level 2 in row 0; expected 0 to 15, {GENERIC}"),  # without blocks
        (torch.tensor([[0, 1, 5], [0, 15, 5]]), "has 15 for level 2 in row 1, which is no child of node 0; expected 0 to 3"),
        (torch.tensor([[0, 1, 8]]), r"has 8 for level 3 in row 0, .* of node 1; expected 4 to 7\. Take paths of the tree"),
        (torch.tensor([[-1, -1, 3]]), f"has -1 for level 1 in row 0; expected 0 to 3, {GENERIC}"),
    ],
)  # fmt: skip
def test_ids_without_blocks_are_refused(ids, message, bank):
    with pytest.raises(ValueError, match=f"^memory_ids {message}"):
        bank.fetch(ids)


ROWS, NUMEL = 7, 5
UNREADABLE = "cannot be read .*; expected a whole file of a bank. Copy the bank again"
DAMAGES = {
    "cut": (lambda content: content[:-1], UNREADABLE),
    "header": (lambda content: content[:8] + b"?" + content[9:], UNREADABLE),
    "empty": (lambda content: b"", UNREADABLE),
    "other tensors": (lambda content: content.replace(b'"marks"', b'"other"'), UNREADABLE),
    "dtype": (lambda content: content.replace(b'"F32"', b'"I32"'), UNREADABLE),
    "gone": (lambda content: None, "cannot be read .No such file"),
    "rows": (lambda content: content, "has blocks of shape .* belongs to another model"),
    "numel": (lambda content: content, "has blocks of shape"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_level_file_is_refused(damage, tmp_path):
    path, (change, message) = tmp_path / "level-1.safetensors", DAMAGES[damage]
    write_level(path, ROWS, NUMEL, torch.float32, {2: lambda: torch.ones(NUMEL)})
    content = change(path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=f"bank file {re.escape(str(path))} {message}"):
        MappedLevel(path, ROWS + (damage == "rows"), NUMEL + (damage == "numel"))
