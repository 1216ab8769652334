"""The file of a level: records come back as they were written, the rest is a hole, and whatever is wrong with it is said."""

import contextlib
import json
import os
import struct
import zlib

import pytest
import torch
from banks.small_bank import open_files
from safetensors import safe_open

from midus_hf.banks.level_file import BankError, LevelFile, create_level_file
from midus_hf.banks.record_read import DELETED, HALF_WRITTEN, UNWRITTEN

RECORDS, NUMEL = 7, 5
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


def made(path, num_records=RECORDS, numel=NUMEL, dtype=torch.float32):
    create_level_file(path, num_records, numel, dtype)
    return path


def record(index, numel=NUMEL, dtype=torch.float32):
    return torch.randn(numel, generator=torch.Generator().manual_seed(index)).to(dtype)


@pytest.fixture
def path(tmp_path):
    return made(tmp_path / "level-1.safetensors")


@pytest.fixture
def file(path):
    """An open file of which records 2 and 6 were written."""
    opened = LevelFile(path, RECORDS, NUMEL, writable=True)
    for index in (2, 6):
        opened.write(index, record(index))
    yield opened
    opened.close()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_records_come_back_and_others_were_never_written(dtype, tmp_path):
    path = made(tmp_path / "file", dtype=dtype)
    file = LevelFile(path, RECORDS, NUMEL, writable=True)
    for index in (6, 0, 3):
        file.write(index, record(index, dtype=dtype))
    file.write(3, record(4, dtype=dtype))
    file.sync()
    file.close()
    again = LevelFile(path, RECORDS, NUMEL)
    assert again.dtype == dtype and again.record_bytes == NUMEL * dtype.itemsize
    assert again.written() == [0, 3, 6] and again.deleted() == []
    for index in range(RECORDS):
        found = again.read(index)
        if index in (0, 3, 6):
            assert found.dtype == dtype and torch.equal(found, record(4 if index == 3 else index, dtype=dtype))
            found.zero_()
            assert torch.equal(again.read(index), record(4 if index == 3 else index, dtype=dtype)), "the file stays"
        else:
            assert found is None and not again.is_written(index)
    again.close()


def test_it_is_a_safetensors_file_with_checksums_in_front(file, path):
    """Whoever knows safetensors alone reads the blocks, and CRC-32 of each, or four letters where there is none."""
    file.forget(3)
    with safe_open(path, framework="numpy") as opened:
        assert set(opened.keys()) == {"checksums", "blocks"}
        checksums, blocks = opened.get_tensor("checksums"), opened.get_tensor("blocks")
    assert checksums.dtype.name == "uint32" and blocks.shape == (RECORDS, NUMEL)
    for index in range(RECORDS):
        expected = record(index) if index in (2, 6) else torch.zeros(NUMEL)
        assert torch.equal(torch.from_numpy(blocks[index]), expected)
        if index in (2, 6):
            assert checksums[index] == zlib.crc32(expected.numpy().tobytes())
        else:
            assert checksums[index].tobytes() == (b"gone" if index == 3 else b"none")
    assert (file.checksums() == checksums).all()


def test_what_is_written_is_cast_and_may_want_gradients(file):
    wide = torch.arange(2 * NUMEL, dtype=torch.float64)[::2].requires_grad_()
    file.write(1, wide)
    assert torch.equal(file.read(1), torch.arange(0, 2 * NUMEL, 2, dtype=torch.float32))


def test_what_was_forgotten_is_deleted_until_it_is_written_again(file):
    file.forget(2)
    assert file.read(2) is None and torch.equal(file.read(6), record(6))
    assert file.deleted() == [2] and file.written() == [6] and not file.is_written(2)
    file.write(2, record(9))
    assert torch.equal(file.read(2), record(9)) and file.deleted() == []


class Killed(BaseException):
    """The end of a process, at the call where it is raised."""


@pytest.mark.parametrize("half", [False, True], ids=["between", "within"])
@pytest.mark.parametrize("calls", range(5))
def test_a_deletion_that_is_killed_at_any_moment_never_says_deleted_while_bytes_remain(
    calls, half, file, path, monkeypatch
):
    """After so many writes and syncs that were done, nothing more is; `half`: but half of the one at which the process ends."""
    expected, begun = record(2), []
    real_write, real_sync = os.pwrite, os.fsync

    def is_killed() -> bool:
        begun.append(1)
        return len(begun) > calls

    def write(descriptor, data, place):
        if not is_killed():
            return real_write(descriptor, data, place)
        if half:
            real_write(descriptor, data[: len(data) // 2], place)
        raise Killed

    def sync(descriptor):
        if is_killed():
            raise Killed
        real_sync(descriptor)

    monkeypatch.setattr("midus_hf.banks.level_file.os.pwrite", write)
    monkeypatch.setattr("midus_hf.banks.level_file.os.fsync", sync)
    with contextlib.suppress(Killed):
        file.forget(2)
    monkeypatch.undo()
    again = LevelFile(path, RECORDS, NUMEL, writable=True)
    remains = any(expected[place : place + 2].numpy().tobytes() in path.read_bytes() for place in range(NUMEL - 1))
    if again.deleted() == [2]:
        assert not remains and again.read(2) is None
    elif calls == 0 and not half:
        assert torch.equal(again.read(2), expected)
    else:
        with pytest.raises(BankError, match="delete the block"):
            again.read(2)
    again.forget(2)
    again.close()
    assert not any(expected[place : place + 2].numpy().tobytes() in path.read_bytes() for place in range(NUMEL - 1))
    assert torch.equal(file.read(6), record(6)) and file.deleted() == [2], "repeated, the deletion is done"


def test_zeros_are_on_the_disk_before_the_mark_says_that_a_record_was_deleted(file, monkeypatch):
    order, real_write, real_sync = [], os.pwrite, os.fsync
    monkeypatch.setattr(
        "midus_hf.banks.level_file.os.pwrite", lambda *args: [order.append(bytes(args[1])), real_write(*args)][1]
    )
    monkeypatch.setattr(
        "midus_hf.banks.level_file.os.fsync", lambda *args: [order.append("sync"), real_sync(*args)][1]
    )
    file.forget(2)
    assert order[:2] == [bytes(4 * NUMEL), "sync"] and order[-1] == b"gone"


def test_a_deletion_gives_the_room_back(tmp_path):
    numel = 2**18  # 1 MB
    path = made(tmp_path / "large", numel=numel)
    file = LevelFile(path, RECORDS, numel, writable=True)
    file.write(3, record(3, numel))
    file.sync()
    before = path.stat().st_blocks
    file.forget(3)
    file.close()
    assert path.stat().st_blocks <= before - 2**20 // 512 + 2 * 4096 // 512


@pytest.mark.parametrize(
    ("mark", "record_bytes"),
    [(0, "9d0ad96d"), (UNWRITTEN, "229da444"), (DELETED, "2eb6e8f2"), (HALF_WRITTEN, "e9ab446a")],
)
def test_a_record_whose_checksum_would_be_a_mark_counts_as_written(mark, record_bytes, path):
    """Four bytes can be chosen so that their CRC-32 is anything, also what says elsewhere that there is no record."""
    data = bytes.fromhex(record_bytes)
    assert zlib.crc32(data) == mark
    path = made(path.with_name("one"), 2, 1)
    file = LevelFile(path, 2, 1, writable=True)
    file.write(1, torch.frombuffer(bytearray(data), dtype=torch.float32))
    assert file.checksum(1) == mark ^ 1 and file.written() == [1] and file.deleted() == []
    assert file.read(1).numpy().tobytes() == data
    file.close()


def lose_checksums(path, indices):
    """Let a file system have lost the place where some checksums lie, which is full of zeros then."""
    with path.open("r+b") as opened:
        start = 8 + int.from_bytes(opened.read(8), "little")
        for index in indices:
            opened.seek(start + 4 * index)
            opened.write(bytes(4))


@pytest.mark.parametrize("index", [1, 2, 6])
def test_a_lost_checksum_names_its_block_whether_it_was_written_or_not(file, path, index):
    lose_checksums(path, [index])
    lost = (
        f"block {index} of bank file {path} has lost its checksum: there are zeros in its place, which a bank never writes. Copy "
        "the bank again, or delete the block."
    )
    for read in (lambda: file.read(index), lambda: file.is_written(index), file.written):
        with pytest.raises(BankError) as raised:
            read()
        assert str(raised.value) == lost
    assert torch.equal(file.read(8 - max(index, 2)), record(8 - max(index, 2)))
    file.forget(index)
    assert file.read(index) is None and index not in file.written()


@pytest.mark.parametrize("index", [2, 6])
@pytest.mark.parametrize("byte", [0, 11, 4 * NUMEL - 1])
def test_a_flipped_byte_names_its_block_and_no_other(file, path, index, byte):
    place = path.stat().st_size - (RECORDS - index) * 4 * NUMEL + byte
    with path.open("r+b") as opened:
        opened.seek(place)
        (before,) = opened.read(1)
        opened.seek(place)
        opened.write(bytes([before ^ 4]))
    with pytest.raises(BankError) as raised:
        file.read(index)
    assert str(raised.value) == (
        f"block {index} of bank file {path} is not what was written: its checksum differs. Copy the bank again, or delete the block."
    )
    other = 8 - index
    assert torch.equal(file.read(other), record(other))


def test_a_record_that_was_half_written_is_known_by_it(file, path, monkeypatch):
    """A mark takes the place of the checksum before the record is written, so that a run that is killed leaves none that misleads."""

    def killed(place, data, write=file._write_at):
        if len(data) > 4:
            write(place, data[:7])
            raise KeyboardInterrupt
        write(place, data)

    monkeypatch.setattr(file, "_write_at", killed)
    with pytest.raises(KeyboardInterrupt):
        file.write(2, record(9))
    half = (
        f"block 2 of bank file {path} is half written: a process ended while it wrote it. Copy the bank again, or delete the "
        "block."
    )
    for read in (lambda: file.read(2), lambda: file.is_written(2), file.written):
        with pytest.raises(BankError) as raised:
            read()
        assert str(raised.value) == half


def test_a_file_takes_little_of_the_disk_until_it_is_written(tmp_path):
    path = made(tmp_path / "large", 65537, 2**20, torch.bfloat16)
    assert path.stat().st_size > 2**37 and path.stat().st_blocks * 512 <= 4 * 65537 + 2**16
    file = LevelFile(path, 65537, 2**20, writable=True)
    last = torch.ones(2**20, dtype=torch.bfloat16)
    file.write(65536, last)
    assert torch.equal(file.read(65536), last) and file.read(65535) is None
    file.close()
    assert path.stat().st_blocks * 512 <= 4 * 65537 + 2**21 + 2**16


def other_header(change):
    header = {
        "checksums": {"dtype": "U32", "shape": [RECORDS], "data_offsets": [0, 4 * RECORDS]},
        "blocks": {"dtype": "F32", "shape": [RECORDS, NUMEL], "data_offsets": [28, 28 + 4 * RECORDS * NUMEL]},
    }
    change(header)
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(28 + 4 * RECORDS * NUMEL)


BLOCKS = {"dtype": "F32", "shape": [RECORDS, NUMEL], "data_offsets": [28, 28 + 4 * RECORDS * NUMEL]}
SUMS = {"dtype": "U32", "shape": [RECORDS], "data_offsets": [0, 4 * RECORDS]}


def headed(header, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", length or len(text)) + text + bytes(28 + 4 * RECORDS * NUMEL)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"1234",
        bytes(100),
        headed(b"", 2**62),
        headed(b"no json!"),
        headed(b"\xff" * 8),
        headed([]),
        headed(None),
        headed({"blocks": BLOCKS}),
        headed({"checksums": SUMS}),
        headed({"checksums": SUMS, "blocks": {"dtype": "F32", "shape": [RECORDS, NUMEL]}}),
        headed({"checksums": SUMS, "blocks": {**BLOCKS, "data_offsets": []}}),
        headed({"checksums": {**SUMS, "data_offsets": []}, "blocks": BLOCKS}),
        headed({"checksums": SUMS, "blocks": {**BLOCKS, "data_offsets": ["0", "1"]}}),
        headed({"checksums": SUMS, "blocks": {**BLOCKS, "dtype": "I32"}}),
    ],
)
def test_what_is_no_file_of_a_bank_is_refused(content, path):
    path.write_bytes(content)
    with pytest.raises(BankError) as raised:
        LevelFile(path, RECORDS, NUMEL)
    assert str(raised.value) == f"bank file {path} has no header of a bank; expected one. Copy the bank again."


def test_files_that_do_not_fit_are_refused_and_closed(file, path):
    before = open_files()

    def refused(read, message):
        with pytest.raises(BankError) as raised:
            read()
        assert str(raised.value) == f"bank file {message}"

    absent = path.with_name("none")
    missed = f"{absent} cannot be opened (No such file or directory); expected it beside the model."
    refused(lambda: LevelFile(absent, RECORDS, NUMEL), missed)
    for sizes in ((RECORDS + 1, NUMEL), (RECORDS, NUMEL + 1), (NUMEL, RECORDS)):
        other = f"{path} has blocks of shape [7, 5]; expected {list(sizes)}. It belongs to another model."
        refused(lambda sizes=sizes: LevelFile(path, *sizes), other)
    size = path.stat().st_size
    os.truncate(path, size - 1)
    refused(lambda: file.read(6), f"{path} ends within block 6. Copy the bank again.")  # open since before
    for cut in (1, 4 * NUMEL, 4 * NUMEL * RECORDS + 1):
        os.truncate(path, size - cut)
        short = f"{path} has {size - cut:,} bytes; expected {size:,}. Copy the bank again."
        refused(lambda: LevelFile(path, RECORDS, NUMEL), short)
    assert open_files() == before
