"""Banks beside a checkpoint: never-written blocks, reading what texts fetch, writing, copies, and whatever is wrong said."""

import copy
import errno
import json
import math
import os
import pickle
import shutil
import time
from pathlib import Path

import pytest
import torch
from models.fresh_process import run_python

from midus_config.fetched_blocks import BankLayout
from midus_config.memories.hierarchical import HierFFNOptions, HierKVOptions, HierLoraVOOptions
from midus_config.model_sizes import ModelSizes
from midus_hf.banks import MemoryBank
from midus_hf.banks.level_file import BankError, LevelFile
from midus_hf.banks.memory_bank import create_bank

SIZES = ModelSizes(hidden_size=8, num_heads=2, num_key_value_heads=1, intermediate_size=12, num_layers=3)
LLAMA_1B = ModelSizes(hidden_size=2048, num_heads=32, num_key_value_heads=8, intermediate_size=8192, num_layers=16)
LAYERS = (0, 2)


def layout_of(options=None, sizes=SIZES, layers=LAYERS):
    options = options or HierFFNOptions(sizes=[3, 0, 2], branching=4)
    return BankLayout(options.type, layers, options.fetched(sizes))


def made(folder, layout=None, dtype=torch.float32, seed=5):
    create_bank(folder, layout or layout_of(), dtype, seed)
    return folder


def record_of(layout, level, number, dtype=torch.float32):
    return torch.randn(layout.record_numel(level), generator=torch.Generator().manual_seed(number)).to(dtype)


def on_disk(folder):
    return sum(path.stat().st_blocks * 512 for path in Path(folder).iterdir())


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path / "bank")


@pytest.fixture
def bank(folder):
    """Writable; blocks 1 of level 1 and 5, 64 (the generic one) of level 3 were written."""
    opened = MemoryBank(folder, layout_of(), writable=True)
    for level, index in ((1, 1), (3, 5), (3, 64)):
        opened.write(level, index, record_of(opened.layout, level, index))
    yield opened
    opened.close()


def test_a_bank_of_fourteen_billion_parameters_takes_nothing_and_opens_at_once(tmp_path):
    """Llama-3.2-1B with (768, 256, 16, 0): table 2 of the paper."""
    layout = layout_of(HierFFNOptions(sizes=[768, 256, 16, 0]), LLAMA_1B, tuple(range(16)))
    assert layout.fetched == 102_236_160 and layout.bank == 14_092_861_440
    started = time.perf_counter()
    create_bank(tmp_path / "bank", layout, torch.bfloat16, 0)
    bank = MemoryBank(tmp_path / "bank", layout)
    assert time.perf_counter() - started < 1
    files = {path.name: path for path in (tmp_path / "bank").iterdir()}
    assert files.keys() == {"bank.json", "level-1.safetensors", "level-2.safetensors", "level-3.safetensors"}
    assert sum(path.stat().st_size for path in files.values()) > 2 * layout.bank
    assert on_disk(tmp_path / "bank") < 2**17
    assert [bank.written(level) for level in (1, 2, 3)] == [[], [], []]
    bank.close()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "options",
    [
        HierFFNOptions(sizes=[40, 20], branching=3),
        HierLoraVOOptions(sizes=[40, 20], branching=3),
        HierKVOptions(sizes=[40, 20], branching=3),
    ],
    ids=lambda options: options.type,
)
def test_blocks_start_as_appendix_i_says(options, dtype, tmp_path):
    """One factor of each product is zero, the other random: truncated normal, or Kaiming's uniform for low-rank factors."""
    layout = layout_of(options)
    bank = MemoryBank(made(tmp_path / "bank", layout, dtype), layout)
    assert bank.dtype == dtype
    for level, index in ((1, 0), (1, 3), (2, 8)):  # 3 is the generic memory's
        record = bank.block(level, index)
        assert record.dtype == dtype and record.shape == (layout.record_numel(level),)
        for place in layout.records[level]:
            part = record[place.start : place.start + math.prod(place.tensor.shape)].float()
            if place.name.endswith(("_up", "values")) or place.name == "down":
                assert not part.any(), place
            elif place.name.endswith("_down"):
                bound = place.tensor.shape[1] ** -0.5  # sqrt(6 / ((1 + 5) * fan_in))
                assert 0.9 * bound < part.abs().max() <= 1.005 * bound
                assert part.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.15)
            else:
                assert part.abs().max() <= 0.0401 and 0.03 < part.abs().max()
                assert part.std().item() == pytest.approx(0.02 * 0.8796, rel=0.15)  # cut off at two deviations
                assert abs(part.mean().item()) < 0.003
    bank.close()


def test_blocks_that_were_never_written_are_the_same_in_any_order_and_process(folder, tmp_path):
    layout = layout_of()
    keys = [(level, index) for level in layout.levels for index in range(layout.num_records(level))]
    first, second = MemoryBank(folder, layout), MemoryBank(folder, layout, cache_bytes=0)
    torch.manual_seed(1)
    blocks = {key: first.block(*key).clone() for key in keys}
    torch.manual_seed(2)
    for key in reversed(keys):
        assert torch.equal(second.block(*key), blocks[key])
    gates = [blocks[key][:6].numpy().tobytes() for key in keys]
    assert len(set(gates)) == len(keys)  # each block has numbers of its own
    run_python(
        """
from midus_config.fetched_blocks import BankLayout
from midus_config.memories.hierarchical import HierFFNOptions
from midus_config.model_sizes import ModelSizes
from midus_hf.banks import MemoryBank
sizes = ModelSizes(hidden_size=8, num_heads=2, num_key_value_heads=1, intermediate_size=12, num_layers=3)
layout = BankLayout("hier-ffn", (0, 2), HierFFNOptions(sizes=[3, 0, 2], branching=4).fetched(sizes))
bank = MemoryBank("bank", layout)
torch.save({key: bank.block(*key).clone() for key in [(3, 64), (1, 0), (3, 7)]}, "blocks.pt")
""",
        tmp_path,
        package_present=True,
    )
    for key, block in torch.load(tmp_path / "blocks.pt").items():
        assert torch.equal(block, blocks[key])
    other = MemoryBank(made(tmp_path / "other", seed=6), layout)
    assert not torch.equal(other.block(1, 0), blocks[1, 0])
    for opened in (first, second, other):
        opened.close()


def test_what_was_written_is_read_by_whoever_opens_it(bank, folder):
    reader = MemoryBank(folder, bank.layout)
    for level, index in ((1, 1), (3, 5), (3, 64)):
        assert torch.equal(reader.block(level, index), record_of(bank.layout, level, index))
    assert reader.written(1) == [1] and reader.written(3) == [5, 64]
    bank.write(1, 1, record_of(bank.layout, 1, 9))
    assert torch.equal(bank.block(1, 1), record_of(bank.layout, 1, 9))
    fresh = MemoryBank(folder, bank.layout)
    start = fresh.block(1, 0).clone()
    assert torch.equal(fresh.block(1, 1), record_of(bank.layout, 1, 9))
    bank.write(1, 0, torch.ones(bank.layout.record_numel(1)))
    bank.forget(1, 0)
    assert torch.equal(bank.block(1, 0), start) and bank.written(1) == [1]
    for opened in (reader, fresh):
        opened.close()


def test_each_row_gets_the_block_of_its_node_of_each_level(bank):
    """Split into tensors layer by layer, as the layout declares; level 2 has none."""
    ids = torch.tensor([[1, 5, 21], [-1, -1, -1], [0, 1, 5], [1, 5, 20]])
    fetched = bank.fetch(ids)
    for layer in LAYERS:
        levels = fetched.of(layer).levels
        assert len(levels) == 2
        for level, found in zip((1, 3), levels, strict=True):
            size = {1: 3, 3: 2}[level]
            assert {name: tensor.shape[1:] for name, tensor in found.tensors.items()} == {
                "gate": (size, 8),
                "up": (size, 8),
                "down": (8, size),
            }
            nodes = [4**level if row[0] == -1 else row[level - 1] for row in ids.tolist()]
            for row, node in enumerate(nodes):
                start = 3 * size * 8 * LAYERS.index(layer)
                parts = bank.block(level, node)[start : start + 3 * size * 8].split(size * 8)
                for (name, tensor), part in zip(found.tensors.items(), parts, strict=True):
                    expected = part.view(tensor.shape[1:])
                    assert torch.equal(tensor[found.blocks[row]], expected), name
    assert all(len(found) == len(set(ids[:, level - 1].tolist())) for level, found in fetched.records.items())


def test_rows_of_one_path_share_one_block(bank):
    fetched = bank.fetch(torch.tensor([[1, 5, 21]] * 3), dtype=torch.float64)
    assert all(len(record) == 1 and record.dtype == torch.float64 for record in fetched.records.values())
    assert all(blocks.tolist() == [0, 0, 0] for blocks in fetched.blocks.values())


def test_blocks_read_last_are_kept_as_many_as_there_is_room_for(folder, monkeypatch):
    layout = layout_of()
    size = 4 * layout.record_numel(3)
    bank = MemoryBank(folder, layout, cache_bytes=3 * size)
    read = []
    file = bank._files[3]
    monkeypatch.setattr(
        file, "prepare", lambda index, prepare=file.prepare, **given: read.append(index) or prepare(index, **given)
    )
    for index in (0, 1, 2, 0, 3, 0, 2, 1):
        bank.block(3, index)
    assert read == [0, 1, 2, 3, 1]  # 3 took the place of 1, not of 0, which was read since; 1 that of 3
    assert bank.statistics()["memory"].held_bytes == 3 * size
    assert [bank.keeps(3, index) for index in range(4)] == [True, True, True, False]
    bank.close()
    tiny = MemoryBank(folder, layout, cache_bytes=size - 1)
    for index in range(4):
        tiny.block(3, index)
    assert tiny.statistics()["memory"].held_bytes == 0 and not tiny.keeps(3, 3)
    tiny.close()


def test_what_is_written_leaves_no_stale_copy_and_the_count_of_bytes_holds(folder):
    bank = MemoryBank(folder, layout_of(), writable=True)
    for level, index in ((1, 0), (3, 0), (1, 0)):
        bank.block(level, index)
        bank.write(level, index, torch.ones(bank.layout.record_numel(level)))
        assert bank.block(level, index).eq(1).all()
        bank.forget(level, index)
        assert not bank.block(level, index).eq(1).all()
        assert bank.statistics()["memory"].held_bytes == 4 * sum(
            bank.layout.record_numel(level) for level in (1, 3) if bank.keeps(level, 0)
        )
    bank.close()


def test_the_latest_fetch_serves_again_until_a_block_changes(bank):
    ids = torch.tensor([[1, 5, 21]])
    first = bank.fetch(ids)
    assert bank.fetch(ids.clone()) is first  # generation asks at every token
    for other in (bank.fetch(ids, dtype=torch.float64), bank.fetch(torch.tensor([[1, 5, 20]])), bank.fetch(ids)):
        assert other is not first
    assert torch.equal(bank.fetch(ids).records[1], first.records[1])
    bank.write(1, 1, torch.ones(bank.layout.record_numel(1)))
    assert bank.fetch(ids).records[1].eq(1).all()
    bank.forget(1, 1)
    assert not bank.fetch(ids).records[1].eq(1).any()


def test_what_inference_mode_fetched_serves_a_pass_with_gradients(bank):
    ids = torch.tensor([[1, 5, 21], [0, 0, 0]])
    with torch.inference_mode():
        bank.fetch(ids)
    fetched = bank.fetch(ids)
    weight = torch.ones(3, requires_grad=True)
    for level in fetched.of(0).levels:
        assert not any(tensor.is_inference() for tensor in level.tensors.values())
        (level.tensors["gate"][:, :, :3] * weight).sum().backward()
    assert weight.grad.any()
    assert not bank.block(1, 1).is_inference()


def test_a_copy_has_what_was_written_and_stays_sparse(tmp_path):
    layout = layout_of(HierFFNOptions(sizes=[64, 32], branching=16), LLAMA_1B)
    bank = MemoryBank(made(tmp_path / "bank", layout, torch.bfloat16, seed=8), layout, writable=True)
    for level, index in ((1, 3), (2, 256), (2, 7), (2, 9)):
        bank.write(level, index, record_of(layout, level, index, torch.bfloat16))
    bank.forget(2, 9)
    bank.save(tmp_path / "new" / "copy")
    copied = MemoryBank(tmp_path / "new" / "copy", layout)
    assert copied.seed == 8 and copied.dtype == torch.bfloat16
    assert copied.written(1) == [3] and copied.written(2) == [7, 256]
    for level, index in ((1, 3), (2, 256), (2, 7), (2, 9), (1, 0), (1, 16)):
        assert torch.equal(copied.block(level, index), bank.block(level, index))
    written = 2 * (layout.record_numel(1) + 2 * layout.record_numel(2))
    assert on_disk(copied.folder) < written + 2**17 < sum(path.stat().st_size for path in copied.folder.iterdir()) / 8
    for opened in (bank, copied):
        opened.close()


def test_a_bank_saved_where_it_lies_is_left_as_it_is(bank, folder):
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}
    bank.save(folder)
    bank.save(folder.parent / "." / "bank")
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()} == before


def test_a_copy_replaces_what_another_bank_left_there(bank, tmp_path):
    other = layout_of(HierFFNOptions(sizes=[5], branching=2))
    made(tmp_path / "there", other)
    bank.save(tmp_path / "there")
    copied = MemoryBank(tmp_path / "there", bank.layout)
    assert copied.written(1) == [1] and copied.written(3) == [5, 64]
    copied.close()


def test_a_copy_of_a_bank_with_a_flipped_byte_is_refused(bank, folder, tmp_path):
    path = folder / "level-3.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    with pytest.raises(BankError, match=r"block 64 of bank file .*level-3\.safetensors is not what was written"):
        bank.save(tmp_path / "copy")


def test_two_cannot_write_and_many_can_read(bank, folder):
    with pytest.raises(BankError) as raised:
        MemoryBank(folder, bank.layout, writable=True)
    assert str(raised.value) == f"the memory bank in {folder} is being written by another run. Wait for it."
    readers = [MemoryBank(folder, bank.layout) for _ in range(2)]
    for reader in readers:
        reader.close()


def test_where_the_file_system_has_no_locks_a_bank_is_written_all_the_same(folder, tmp_path, monkeypatch):
    def none(*_):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    made(tmp_path / "copy")
    monkeypatch.setattr("fcntl.flock", none)
    writer = MemoryBank(folder, layout_of(), writable=True)
    writer.write(1, 2, record_of(layout_of(), 1, 2))
    writer.save(tmp_path / "copy")
    writer.close()
    copy = MemoryBank(tmp_path / "copy", layout_of())
    assert torch.equal(copy.block(1, 2), record_of(layout_of(), 1, 2))
    copy.close()


def test_a_lock_of_a_bank_that_fails_otherwise_is_not_told_as_another_run(folder, monkeypatch):
    def failing(*_):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr("fcntl.flock", failing)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        MemoryBank(folder, layout_of(), writable=True)


def test_a_copy_that_broke_off_is_no_bank(bank, tmp_path, monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(LevelFile, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        bank.save(tmp_path / "copy")
    with pytest.raises(BankError, match="there is no memory bank in"):
        MemoryBank(tmp_path / "copy", layout_of())


def test_a_copy_does_not_take_the_place_of_what_another_run_writes(bank, tmp_path):
    other = MemoryBank(made(tmp_path / "there"), bank.layout, writable=True)
    other.write(1, 2, record_of(bank.layout, 1, 2))
    with pytest.raises(BankError, match="is being written by another run"):
        bank.save(tmp_path / "there")
    other._drop(1, 2)
    assert torch.equal(other.block(1, 2), record_of(bank.layout, 1, 2))
    other.close()
    bank.save(tmp_path / "there")


def test_a_writer_that_closed_lets_another_write(folder):
    for _ in range(2):
        bank = MemoryBank(folder, layout_of(), writable=True)
        bank.write(1, 0, torch.zeros(bank.layout.record_numel(1)))
        bank.close()


def test_a_bank_that_could_not_be_opened_for_writing_can_be_once_it_is_repaired(folder, tmp_path):
    path = folder / "level-3.safetensors"
    shutil.copy(path, tmp_path / "kept")
    path.unlink()
    before = len(list(Path("/proc/self/fd").iterdir()))
    for _ in range(3):
        with pytest.raises(BankError, match="cannot be opened"):
            MemoryBank(folder, layout_of(), writable=True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    shutil.copy(tmp_path / "kept", path)
    MemoryBank(folder, layout_of(), writable=True).close()


def test_a_pickled_bank_opens_its_files_anew(bank):
    """What number an open file has means nothing to another process."""
    again = pickle.loads(pickle.dumps(bank))
    assert again._files[3]._file != bank._files[3]._file and again._lock is None
    assert torch.equal(again.block(3, 5), record_of(again.layout, 3, 5))
    assert copy.deepcopy(again) is again
    again.close()


def refused(folder, layout=None):
    with pytest.raises(BankError) as raised:
        MemoryBank(folder, layout or layout_of())
    return str(raised.value)


def test_an_absent_bank_is_missed(tmp_path):
    assert refused(tmp_path / "none") == (
        f"there is no memory bank in {tmp_path / 'none'} (No such file or directory: bank.json); expected one beside the model."
    )


@pytest.mark.parametrize(
    ("options", "difference"),
    [
        (HierKVOptions(sizes=[3, 0, 2], branching=4), "its type is 'hier-ffn'; expected 'hier-kv'"),
        (HierFFNOptions(sizes=[3, 0, 2], branching=5), "its branching is 4; expected 5"),
        (HierFFNOptions(sizes=[3, 0, 3], branching=4), "its levels is "),
        (HierFFNOptions(sizes=[3, 0, 2, 0], branching=4), "its levels is "),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_bank_of_another_model_is_refused(options, difference, folder):
    message = refused(folder, layout_of(options))
    assert message.startswith(f"the memory bank in {folder} belongs to another model: {difference}")
    assert message.endswith(". Put the model's own there.")


def test_a_bank_of_a_model_with_other_layers_is_refused_and_one_whose_layers_have_moved_is_not(folder):
    assert "its layers is 2; expected 3" in refused(folder, layout_of(layers=(0, 1, 2)))
    moved = MemoryBank(folder, layout_of(layers=(1, 4)))
    moved.close()


def test_a_bank_of_other_widths_is_refused(folder):
    wider = ModelSizes(hidden_size=16, num_heads=2, intermediate_size=12, num_layers=3)
    assert "its levels is" in refused(folder, layout_of(sizes=wider))


@pytest.mark.parametrize("description", ["{", "[]", "null", '"x"', "{}", '{"format": 2}', '{"format": 1}'])
def test_a_description_that_is_none_is_refused(description, folder):
    path = folder / "bank.json"
    path.write_text(description)
    message = refused(folder)
    if description == "{":
        assert message == f"{path} is no JSON; expected the description of a bank. Copy the bank again."
    elif description == '{"format": 1}':
        assert message == (
            f"the memory bank in {folder} belongs to another model: its layout is None. Put the model's own there."
        )
    else:
        assert message == f"{path} has another format than 1; expected a bank that this version reads."


@pytest.mark.parametrize("seed", [..., None, "5"], ids=str)
def test_a_description_without_a_seed_is_refused(seed, folder):
    """Blocks that were never written would start as others than the model was trained with."""
    path = folder / "bank.json"
    description = json.loads(path.read_text())
    del description["seed"]
    path.write_text(json.dumps({**description, **({} if seed is ... else {"seed": seed})}))
    assert str(path) in refused(folder)


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        (
            torch.zeros(3, dtype=torch.int64),
            "memory_ids is (3,), torch.int64; expected integers [batch, 3], for each row a node of each level of the tree.",
        ),
        (
            torch.zeros(2, 4, dtype=torch.int64),
            "memory_ids is (2, 4), torch.int64; expected integers [batch, 3], for each row a node of each level of the tree.",
        ),
        (
            torch.zeros(2, 3),
            "memory_ids is (2, 3), torch.float32; expected integers [batch, 3], for each row a node of each level of the tree.",
        ),
        (
            torch.tensor([[0, 0, 0], [0, 0, 64]]),
            "memory_ids has 64 for level 3 in row 1; expected 0 to 63, or a row of -1 for the generic memory.",
        ),
        (
            torch.tensor([[0, 16, 0]]),  # of a level without blocks
            "memory_ids has 16 for level 2 in row 0; expected 0 to 15, or a row of -1 for the generic memory.",
        ),
        (
            torch.tensor([[-1, -1, 3]]),
            "memory_ids has -1 for level 1 in row 0; expected 0 to 3, or a row of -1 for the generic memory.",
        ),
        (
            torch.tensor([[-2, -2, -2]]),
            "memory_ids has -2 for level 1 in row 0; expected 0 to 3, or a row of -1 for the generic memory.",
        ),
    ],
    ids=["flat", "levels", "floats", "beyond", "level without blocks", "partly generic", "minus two"],
)
def test_ids_that_name_no_blocks_are_refused(ids, message, bank):
    with pytest.raises(ValueError) as raised:
        bank.fetch(ids)
    assert str(raised.value) == message


def test_a_leaf_has_the_nodes_on_the_way_to_it():
    """Each is the child of the one above, `parent * k` to `parent * k + k - 1`."""
    blocks = layout_of().blocks
    for leaf in range(64):
        path = blocks.path(leaf)
        assert path[-1] == leaf and [node // 4 for node in path] == [0, *path[:-1]]
