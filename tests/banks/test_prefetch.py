"""Blocks that are read ahead: the call returns at once, each block is read once, and errors reach the fetch."""

import gc
import os
import signal
import threading
import time

import pytest
import torch
from banks.small_bank import filled, flip, made, open_files, same
from banks.test_tiers import IDS, LARGE, LAYOUT, SMALL, TIERED, ids_of_tiers
from models.fresh_process import run_python

from midus_hf.banks import MemoryBank, record_read
from midus_hf.banks.level_file import BankError, LevelFile
from midus_hf.banks.trained_bank import TrainedBank

ONE = torch.tensor([[1, 5, 21]])
OTHER = torch.tensor([[2, 9, 37]])
# That nothing here takes.
SECONDS = 20


@pytest.fixture(params=[None, 64], ids=["whole", "in pieces"])
def folder(tmp_path, request, monkeypatch):
    """A bank whose blocks are read at once, or in many pieces."""
    if request.param:
        monkeypatch.setattr(record_read, "_PIECE", request.param)
    return filled(tmp_path / "bank")


@pytest.fixture
def gate(monkeypatch):
    """Reading waits until it is set; lists what is being read."""

    class Gate(threading.Event):
        def __init__(self):
            super().__init__()
            self.reading = []

    opened = Gate()
    read_at = LevelFile._read_at

    def waiting(self, index, start, data):
        opened.reading.append((self.path.name, index, start))
        assert opened.wait(SECONDS)
        read_at(self, index, start, data)

    monkeypatch.setattr(LevelFile, "_read_at", waiting)
    yield opened
    opened.set()


def eventually(holds):
    deadline = time.monotonic() + SECONDS
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def test_it_returns_at_once_and_the_fetch_waits_for_what_is_under_way(folder, gate, opened):
    bank, plain = opened(folder), opened(folder)
    bank.prefetch(ONE)
    eventually(lambda: gate.reading)
    bank.prefetch(ONE)
    threading.Timer(0.05, gate.set).start()
    started = time.monotonic()
    fetched = bank.fetch(ONE)
    assert time.monotonic() - started > 0.03
    assert sorted(set(gate.reading)) == sorted(gate.reading)  # each piece of each block once
    assert {path for path, _, _ in gate.reading} == {"level-1.safetensors", "level-3.safetensors"}
    counts = bank.statistics()["memory"]
    assert (counts.hits, counts.misses, counts.ahead, counts.read_bytes) == (0, 2, 2, LARGE + SMALL)
    assert same(fetched, plain.fetch(ONE)) and not bank._under_way._reads


@pytest.mark.parametrize("levels", TIERED, ids=ids_of_tiers)
def test_what_was_read_ahead_is_what_a_fetch_reads(levels, folder, opened):
    """Blocks that were never written as well, and those of other rows and of other tiers."""
    bank, plain = opened(folder, tiers={"levels": levels}), opened(folder)
    bank.prefetch(IDS)
    for ids, ahead in ((IDS[3:], 2), (IDS, 7)):
        assert same(bank.fetch(ids), plain.fetch(ids))
        assert sum(counts.ahead for counts in bank.statistics().values()) == ahead


def test_blocks_that_are_kept_are_not_read_ahead(folder, gate, opened):
    gate.set()
    bank = opened(folder)
    bank.fetch(ONE)
    count = len(gate.reading)
    bank.prefetch(ONE)
    bank.fetch(torch.cat([ONE, ONE]))
    assert len(gate.reading) == count and not bank._under_way._reads


def test_what_is_read_ahead_takes_no_more_room_than_there_is(folder, opened):
    bank = opened(folder, tiers={"ahead_bytes": LARGE + SMALL})
    bank.prefetch(ONE)
    bank.prefetch(OTHER)
    assert list(bank._under_way._reads) == [(1, 2), (3, 37)]
    bank.fetch(ONE)
    bank.fetch(OTHER)
    assert bank.statistics()["memory"].ahead == 2
    small = opened(folder, tiers={"ahead_bytes": 0})
    small.prefetch(ONE)
    assert not small._under_way._reads
    assert same(small.fetch(ONE), bank.fetch(ONE))


def test_what_was_written_meanwhile_is_read_again(folder, opened):
    bank, writer = opened(folder), opened(folder, writable=True)
    for opened, value in ((bank, 7.0), (writer, 8.0)):  # by another, and by the bank itself
        opened.prefetch(ONE)
        writer.write(1, 1, torch.full((LAYOUT.record_numel(1),), value))
        assert opened.fetch(ONE).records[1].eq(value).all()
    writer.prefetch(OTHER)
    writer.forget(1, 2)
    assert torch.equal(writer.fetch(OTHER).records[1], bank.fetch(OTHER).records[1])


def test_an_error_reaches_the_fetch_with_the_name_of_the_block_and_the_next_reads_again(folder, opened):
    flip(path := folder / "level-3.safetensors")
    bank, generic = opened(folder), torch.tensor([[-1, -1, -1]])
    for _ in range(2):
        bank.prefetch(generic)
        with pytest.raises(BankError, match=r"^block 64 of bank file .*level-3\.safetensors is not what was written"):
            bank.fetch(generic)
    flip(path)
    plain = opened(folder)
    assert same(bank.fetch(generic), plain.fetch(generic))


def test_a_disk_that_does_not_answer_is_said_with_the_name_of_the_block(folder, monkeypatch, opened):
    bank = opened(folder)

    def fail(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "preadv", fail)
    bank.prefetch(ONE)
    with pytest.raises(BankError) as raised:
        bank.fetch(ONE)
    assert str(raised.value) == (
        f"block 1 of bank file {folder / 'level-1.safetensors'} cannot be read (Input/output error); expected an open file on a disk "
        "that answers. Open the bank again."
    )


def test_ids_that_name_no_blocks_are_refused_at_once(folder, opened):
    bank = opened(folder)
    with pytest.raises(ValueError, match=r"memory_ids has 64 for level 3 in row 0; expected 0 to 63"):
        bank.prefetch(torch.tensor([[0, 0, 64]]))


def test_a_bank_that_trains_reads_ahead_what_it_has_not_trained(folder):
    bank = TrainedBank(MemoryBank(folder, LAYOUT))
    fetched = bank.fetch(ONE)
    sum(record.square().sum() for record in fetched.records.values()).backward()
    bank.step(1e-1, (0.9, 0.95), 1e-8, 0.0)
    both = torch.cat([ONE, OTHER])
    with torch.no_grad():
        bank.prefetch(both)
        assert sorted(bank.bank._under_way._reads) == [(1, 2), (3, 37)]
        found = bank.fetch(both)
        assert torch.equal(found.records[1][0], bank._states[1, 1].master)
        assert torch.equal(found.records[1][1], bank.bank.block(1, 2))
    assert bank.statistics()["memory"].ahead == 2
    bank.close()


@pytest.mark.parametrize("how", ["closed", "dropped"])
def test_a_bank_that_is_gone_reads_nothing_more_and_leaves_no_open_files(how, folder, gate):
    before = open_files()
    bank = MemoryBank(folder, LAYOUT)
    bank.prefetch(torch.tensor([[index // 16, index // 4, index] for index in range(64)]))
    eventually(lambda: len(gate.reading) == 8)  # as many as there are threads
    if how == "closed":
        bank.close()
    del bank
    gc.collect()
    gate.set()
    eventually(lambda: open_files() == before)
    assert len(gate.reading) == 8


def test_a_process_that_was_forked_reads_by_threads_of_its_own(folder, gate, opened):
    """What its parent was reading never arrives there."""
    bank, plain = opened(folder), opened(folder)
    gate.set()
    both = torch.cat([ONE, OTHER])
    expected = plain.fetch(both)
    gate.clear()
    gate.reading.clear()
    bank.prefetch(ONE)
    eventually(lambda: gate.reading)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            gate.set()
            bank.prefetch(OTHER)
            status = 0 if same(bank.fetch(both), expected) else 1
            bank.close()
        finally:
            os._exit(status)
    deadline = time.monotonic() + SECONDS
    while (done := os.waitpid(child, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    gate.set()
    assert done[1] == 0
    assert same(bank.fetch(both), expected)


def test_a_program_draws_the_same_blocks_and_ends_while_blocks_are_read_ahead(tmp_path, opened):
    bank = opened(made(tmp_path / "bank"))
    run_python(
        """
import sys
sys.path.insert(0, "TESTS")
import torch
from banks.test_tiers import LAYOUT
from midus_hf.banks import MemoryBank
bank = MemoryBank("bank", LAYOUT)
torch.save({key: bank.block(*key).clone() for key in [(3, 64), (1, 0), (3, 7)]}, "blocks.pt")
bank.prefetch(torch.tensor([[index // 16, index // 4, index] for index in range(64)]))
""".replace("TESTS", os.path.dirname(os.path.dirname(__file__))),
        tmp_path,
        package_present=True,
    )
    for key, block in torch.load(tmp_path / "blocks.pt").items():
        assert torch.equal(block, bank.block(*key))
