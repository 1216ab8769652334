"""Where blocks wait: every tier serves the same blocks, keeps what it has room for, and never one that was changed since."""

import copy
import pickle
import shutil

import pytest
import torch
from banks.small_bank import filled, flip, layout_of, same

from midus_hf.banks import MemoryBank
from midus_hf.banks.level_file import BankError
from midus_hf.banks.tiers import TIERS, BankTiers

LAYOUT = layout_of()
# Bytes of the blocks of both levels, in float32.
LARGE, SMALL = 4 * LAYOUT.record_numel(1), 4 * LAYOUT.record_numel(3)

IDS = torch.tensor([[1, 5, 21], [-1, -1, -1], [0, 1, 5], [1, 5, 20]])
TIERED = [{1: one, 3: other} for one in TIERS for other in TIERS]


def ids_of_tiers(levels):
    return "-".join(levels.values())


@pytest.fixture
def folder(tmp_path):
    return filled(tmp_path / "bank")


def counted(bank, tier):
    counts = bank.statistics()[tier]
    return counts.hits, counts.misses


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("levels", TIERED, ids=ids_of_tiers)
def test_every_tier_serves_the_blocks_of_the_file(levels, stored, tmp_path, opened):
    folder = filled(tmp_path / "bank", dtype=stored)
    plain, tiered = opened(folder, cache_bytes=0), opened(folder, tiers={"levels": levels})
    for dtype in (None, torch.float64, torch.float32):
        for ids in (IDS, IDS[2:], IDS[:1], IDS):
            assert same(tiered.fetch(ids, dtype=dtype), plain.fetch(ids, dtype=dtype))
            assert all(torch.equal(tiered.block(*key), plain.block(*key)) for key in ((1, 1), (3, 20), (3, 64)))


def test_levels_wait_where_tiers_say_and_others_in_memory(folder, opened):
    bank = opened(folder, tiers=BankTiers({1: "device"}))
    bank.fetch(IDS[:1], dtype=torch.bfloat16)
    statistics = bank.statistics()
    assert statistics["device"].held_bytes == LARGE // 2  # in the dtype of the model
    assert statistics["memory"].held_bytes == SMALL and statistics["disk"].held_bytes == 0
    assert statistics["device"].read_bytes == LARGE and statistics["memory"].read_bytes == SMALL


def test_what_waits_on_the_device_is_served_without_a_copy(folder, opened):
    bank = opened(folder, tiers={"levels": {1: "device", 3: "device"}})
    first = bank.fetch(torch.tensor([[1, 5, 21]]), dtype=torch.bfloat16)
    second = bank.fetch(torch.tensor([[1, 5, 22]]), dtype=torch.bfloat16)
    assert first.records[1].data_ptr() == second.records[1].data_ptr()
    assert first.records[3].data_ptr() != second.records[3].data_ptr()
    assert counted(bank, "device") == (1, 3) and counted(bank, "memory") == (0, 0)


def test_what_waits_on_the_disk_takes_no_memory_and_is_read_whenever_it_is_fetched(folder, opened):
    bank = opened(folder, tiers={"levels": {1: "disk"}})
    for number in range(3):
        bank.fetch(torch.tensor([[1, 5, 21 + number % 2]]))
    counts = bank.statistics()["disk"]
    assert (counts.hits, counts.misses, counts.read_bytes, counts.held_bytes) == (0, 3, 3 * LARGE, 0)
    assert not bank.keeps(1, 1) and bank.keeps(3, 21)


@pytest.mark.parametrize(("tier", "size"), [("device", SMALL // 2), ("memory", SMALL)], ids=["device", "memory"])
def test_within_a_tier_what_was_fetched_longest_ago_gives_way(tier, size, folder, opened):
    bank = opened(folder, tiers={"levels": {1: "disk", 3: tier}, f"{tier}_bytes": 2 * size})
    for leaf in (0, 1, 0, 2, 0, 1):
        bank.fetch(torch.tensor([[leaf // 16, leaf // 4, leaf]]), dtype=torch.bfloat16)
    assert counted(bank, tier) == (2, 4)  # 2 took the place of 1, and 1 that of 2
    assert bank.statistics()[tier].held_bytes == 2 * size
    assert [bank.keeps(3, leaf) for leaf in (0, 1, 2)] == [True, True, False]


def test_a_block_without_room_is_served_and_not_kept(folder, opened):
    bank = opened(folder, tiers={"levels": {1: "device"}, "device_bytes": LARGE - 1, "memory_bytes": 0})
    assert same(bank.fetch(IDS), opened(folder).fetch(IDS))
    assert all(counts.held_bytes == 0 for counts in bank.statistics().values())


def test_another_device_or_dtype_empties_the_tier_of_the_device(folder, opened):
    """As `model.to` leads to: nothing stays behind on a device that the model has left."""
    bank = opened(folder, tiers={"levels": {1: "device", 3: "device"}})
    expected = opened(folder).fetch(IDS)
    for device, dtype, element in (("cpu", torch.float32, 4), ("meta", torch.float32, 4), ("cpu", torch.bfloat16, 2)):
        fetched = bank.fetch(IDS, device, dtype)
        assert all(record.device.type == device and record.dtype == dtype for record in fetched.records.values())
        blocks = [block.record for block in bank._kept["device"]._blocks.values()]
        assert len(blocks) == 7 and all(block.device.type == device and block.dtype == dtype for block in blocks)
        assert bank.statistics()["device"].held_bytes == element * sum(block.numel() for block in blocks)
    assert same(bank.fetch(IDS, "cpu", torch.float32), expected)


@pytest.mark.parametrize("levels", TIERED, ids=ids_of_tiers)
def test_what_another_writes_into_the_file_is_never_served_stale(levels, folder, opened):
    """Also where the same blocks were just fetched, as generation does at every token."""
    bank, writer = opened(folder, tiers={"levels": levels}), opened(folder, writable=True)
    ids = torch.tensor([[1, 5, 21]])
    bank.fetch(ids)
    writer.write(1, 1, torch.full((LAYOUT.record_numel(1),), 7.0))
    assert bank.fetch(ids).records[1].eq(7).all()
    writer.write(3, 21, torch.full((LAYOUT.record_numel(3),), 8.0))
    assert bank.fetch(ids).records[3].eq(8).all() and bank.block(3, 21).eq(8).all()
    writer.forget(1, 1)
    assert not bank.fetch(ids).records[1].eq(7).any() and bank.fetch(ids).records[3].eq(8).all()


@pytest.mark.parametrize("levels", TIERED, ids=ids_of_tiers)
def test_what_the_bank_writes_itself_is_never_served_stale_and_leaves_earlier_fetches_alone(levels, folder, opened):
    bank = opened(folder, writable=True, tiers={"levels": levels})
    ids = torch.tensor([[1, 5, 21]])
    before = bank.fetch(ids)
    kept = {level: record.clone() for level, record in before.records.items()}
    for level, index in ((1, 1), (3, 21)):
        bank.write(level, index, torch.full((LAYOUT.record_numel(level),), 7.0))
    assert all(record.eq(7).all() for record in bank.fetch(ids).records.values())
    assert all(torch.equal(before.records[level], kept[level]) for level in LAYOUT.levels)


@pytest.mark.parametrize("levels", TIERED, ids=ids_of_tiers)
def test_a_bank_whose_file_was_replaced_goes_on_with_what_it_opened_and_a_new_one_has_the_new(
    levels, folder, tmp_path, opened
):
    other = filled(tmp_path / "other", number=1)
    bank = opened(folder, tiers={"levels": levels})
    old, new = opened(folder).fetch(IDS), opened(other).fetch(IDS)
    bank.fetch(IDS[:2])
    for path in other.glob("level-*"):
        shutil.copy(path, folder / "partial")
        (folder / "partial").rename(folder / path.name)
    assert same(bank.fetch(IDS), old)
    assert same(opened(folder, tiers={"levels": levels}).fetch(IDS), new) and not same(old, new)


def test_a_pickled_bank_has_its_tiers_and_nothing_in_them_and_opens_its_files_to_read(folder, opened):
    tiers = BankTiers({1: "device", 3: "disk"}, device_bytes=10 * LARGE, memory_bytes=5, ahead_bytes=6)
    bank = opened(folder, writable=True, tiers=tiers)
    fetched = bank.fetch(IDS)
    again = pickle.loads(pickle.dumps(bank))
    assert again.tiers == tiers and copy.deepcopy(bank) is bank
    assert all(counts.held_bytes == counts.misses == 0 for counts in again.statistics().values())
    assert same(again.fetch(IDS), fetched)
    again.close()


def test_cache_bytes_are_the_room_in_memory(folder, opened):
    assert opened(folder).tiers == BankTiers() == BankTiers({}, 2**30, 2**30, 2**30)
    tiers = opened(folder, cache_bytes=5, tiers={"levels": {1: "disk"}}).tiers
    assert tiers == BankTiers({1: "disk"}, memory_bytes=5)


NAMES = "levels, device_bytes, memory_bytes, ahead_bytes"


@pytest.mark.parametrize(
    ("tiers", "message"),
    [
        ({"level": {1: "disk"}}, f"tiers has 'level'; expected keys among {NAMES}."),
        ("disk", f"tiers is 'disk'; expected BankTiers or a mapping with the keys {NAMES}."),
        ({"levels": ["disk"]}, "levels of tiers is ['disk']; expected tiers by level, such as {1: 'device'}."),
        ({"levels": {1: "gpu"}}, "the tier of level 1 is 'gpu'; expected one of: device, memory, disk."),
        ({"levels": {"1": "disk"}}, "tiers names level '1'; expected a number from 1, the level of a tree."),
        ({"levels": {0: "disk"}}, "tiers names level 0; expected a number from 1, the level of a tree."),
        ({"levels": {4: "disk"}}, "tiers names level 4; expected 1 to 3, the levels of the tree."),
        ({"memory_bytes": -1}, "memory_bytes of tiers is -1; expected a number of bytes, 0 or more."),
        ({"device_bytes": 1e9}, "device_bytes of tiers is 1000000000.0; expected a number of bytes, 0 or more."),
        ({"ahead_bytes": None}, "ahead_bytes of tiers is None; expected a number of bytes, 0 or more."),
    ],
    ids=lambda value: "" if isinstance(value, str) else str(value),
)
def test_tiers_that_are_none_are_refused(tiers, message, folder):
    with pytest.raises(ValueError) as raised:
        MemoryBank(folder, LAYOUT, tiers=tiers)
    assert str(raised.value) == message


def test_a_mapped_block_that_was_altered_is_refused(folder, opened):
    flip(folder / "level-3.safetensors")
    bank = opened(folder, tiers={"levels": {3: "disk"}})
    with pytest.raises(BankError, match=r"block 64 of bank file .*level-3\.safetensors is not what was written"):
        bank.fetch(torch.tensor([[-1, -1, -1]]))


def test_a_mapped_file_that_was_cut_while_it_is_open_says_so(folder, opened):
    bank = opened(folder, tiers={"levels": {3: "disk"}})
    with (folder / "level-3.safetensors").open("r+b") as file:
        file.truncate(file.seek(0, 2) - 5000)
    with pytest.raises(
        BankError, match=r"^bank file .*level-3\.safetensors ends within block 64\. Copy the bank again\.$"
    ):
        bank.fetch(torch.tensor([[-1, -1, -1]]))
