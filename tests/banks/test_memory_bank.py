"""Banks beside a checkpoint: blocks that were never written, reading what texts fetch, and writing."""

import copy
import math
import pickle
import time

import pytest
import torch
from banks.small_bank import LAYERS, LLAMA_1B, layout_of, made, on_disk, opened, record_of

from midus_hf.memories.hierarchical.bank import create_bank, initial_block
from midus_hf.memories.hierarchical.options import HierFFNOptions, HierKVOptions, HierLoraVOOptions


def test_new_bank_of_14_billion_takes_no_disk_and_opens_fast(tmp_path):
    """Llama-3.2-1B with (768, 256, 16, 0): table 2 of the paper."""
    layout = layout_of(HierFFNOptions(sizes=[768, 256, 16, 0]), LLAMA_1B, tuple(range(16)))
    assert (layout.fetched, layout.bank) == (102_236_160, 14_092_861_440)
    started = time.perf_counter()
    create_bank(tmp_path / "bank", layout, torch.bfloat16, 0)
    bank = opened(tmp_path / "bank", layout)
    assert time.perf_counter() - started < 1
    files = {path.name: path for path in (tmp_path / "bank").iterdir()}
    assert files.keys() == {"bank.json", "level-1.safetensors", "level-2.safetensors", "level-3.safetensors"}
    assert sum(path.stat().st_size for path in files.values()) > 2 * layout.bank
    assert on_disk(tmp_path / "bank") < 2**17
    assert [bank.written(level) for level in (1, 2, 3)] == [[], [], []]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [HierFFNOptions, HierLoraVOOptions, HierKVOptions])
def test_blocks_start_as_in_appendix_i(kind, dtype, tmp_path):
    """One factor of each product is zero, the other random: truncated normal, or Kaiming's uniform for low-rank factors."""
    layout = layout_of(kind(sizes=[40, 20], branching=3))
    bank = opened(made(tmp_path / "bank", layout, dtype), layout)
    assert bank.dtype == dtype
    for level, index in ((1, 0), (1, -1), (2, 8)):  # -1 is the generic memory's
        record = bank.block(level, index)
        assert (record.dtype, record.shape) == (dtype, (layout.record_numel(level),))
        for position in layout.records[level]:
            part = record[position.start : position.start + math.prod(position.tensor.shape)].float()
            if position.name.endswith(("_up", "values")) or position.name == "down":
                assert not part.any(), position
            elif position.name.endswith("_down"):
                bound = position.tensor.shape[1] ** -0.5  # sqrt(6 / ((1 + 5) * fan_in))
                assert 0.9 * bound < part.abs().max() <= 1.005 * bound
                assert part.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
            else:
                assert 0.03 < part.abs().max() <= 0.0401
                assert part.std().item() == pytest.approx(0.02 * 0.8796, rel=0.15)  # cut off at two deviations
                assert abs(part.mean().item()) < 0.003


def test_unwritten_blocks_are_equal_in_any_order(folder, tmp_path):
    layout = layout_of()
    keys = [(level, index) for level in layout.levels for index in range(-1, layout.blocks.nodes(level))]
    first, second = opened(folder), opened(folder)
    torch.manual_seed(1)
    blocks = {key: first.block(*key).clone() for key in keys}
    torch.manual_seed(2)
    for key in reversed(keys):
        assert torch.equal(second.block(*key), blocks[key])
    gates = [blocks[key][:6].numpy().tobytes() for key in keys]
    assert len(set(gates)) == len(keys)  # each block has numbers of its own
    other = opened(made(tmp_path / "other", seed=6), layout)
    assert not torch.equal(other.block(1, 0), blocks[1, 0])


def test_written_blocks_are_read_by_later_readers(bank, folder):
    reader = opened(folder)
    for level, index in ((1, 1), (3, 5), (3, -1)):
        assert torch.equal(reader.block(level, index), record_of(bank.layout, level, index))
    assert (reader.written(1), reader.written(3)) == ([1], [-1, 5])
    bank.write(1, 1, record_of(bank.layout, 1, 9))
    assert torch.equal(bank.block(1, 1), record_of(bank.layout, 1, 9))
    assert torch.equal(opened(folder).block(1, 1), record_of(bank.layout, 1, 9))
    assert torch.equal(reader.block(1, 1), record_of(bank.layout, 1, 1)), "what was opened before stays what it was"


def test_fetch_gives_each_row_its_blocks(bank):
    """Split into tensors layer by layer, as the layout declares; level 2 has none."""
    ids = torch.tensor([[1, 5, 21], [-1, -1, -1], [0, 1, 5], [1, 5, 20]])
    fetched = bank.fetch(ids, dtype=torch.float64)
    for layer in LAYERS:
        levels = fetched.blocks_for(layer)
        for level, size, actual in zip((1, 3), (3, 2), levels, strict=True):
            shapes = {name: tensor.shape[1:] for name, tensor in actual.tensors.items()}
            assert shapes == {"gate": (size, 8), "up": (size, 8), "down": (8, size)}
            start = 3 * size * 8 * LAYERS.index(layer)
            for block, path in zip(actual.blocks, ids.tolist(), strict=True):
                parts = torch.cat([tensor[block].flatten() for tensor in actual.tensors.values()])
                expected = bank.block(level, path[level - 1]).double()
                assert torch.equal(parts, expected[start : start + 3 * size * 8])
    assert all(len(actual) == len(set(ids[:, level - 1].tolist())) for level, actual in fetched.records.items())
    for path in map(bank.layout.blocks.path, range(64)):
        assert [node // 4 for node in path] == [0, *path[:-1]]


def test_latest_fetch_serves_until_a_block_changes(bank):
    ids = torch.tensor([[1, 5, 21]])
    first = bank.fetch(ids)
    assert bank.fetch(ids.clone()) is first  # generation asks at every token
    for other in (bank.fetch(ids, dtype=torch.float64), bank.fetch(torch.tensor([[1, 5, 20]])), bank.fetch(ids)):
        assert other is not first
    assert torch.equal(bank.fetch(ids).records[1], first.records[1])
    assert copy.deepcopy(bank) is bank
    sent = pickle.loads(pickle.dumps(bank))  # to another process
    assert all(torch.equal(sent.fetch(ids).records[level], first.records[level]) for level in (1, 3))
    bank.write(1, 1, torch.ones(bank.layout.record_numel(1)))
    assert bank.fetch(ids).records[1].eq(1).all()


def test_fetch_of_inference_mode_serves_gradients(bank):
    ids = torch.tensor([[1, 5, 21], [0, 0, 0]])
    with torch.inference_mode():
        bank.fetch(ids)
    fetched = bank.fetch(ids)
    weight = torch.ones(3, requires_grad=True)
    for level in fetched.blocks_for(0):
        assert not any(tensor.is_inference() for tensor in level.tensors.values())
        (level.tensors["gate"][:, :, :3] * weight).sum().backward()
    assert weight.grad.any()
    assert not bank.block(1, 1).is_inference()


def test_blocks_of_a_grown_tree_start_differently(folder):
    bank = opened(folder)
    layout = bank.layout.with_roots(6)
    first = initial_block(layout, 1, -1, 5, torch.float32)
    assert torch.equal(first, bank.block(1, -1)), "the generic block is the same in a tree of any size"
    drawn = [initial_block(layout, 1, index, 5, torch.float32) for index in range(-1, 6)]
    assert len({block.numpy().tobytes() for block in drawn}) == 7
    assert all(torch.equal(drawn[index + 1], bank.block(1, index)) for index in range(4))
