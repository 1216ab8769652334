"""What blocks have learnt is saved, loaded and gone on from to the same bytes."""

import json
import shutil

import pytest
import torch
from banks.small_bank import flip
from banks.trained_blocks import (
    EVERY,
    FETCHED,
    bank_in,
    blocks_of,
    layout_of,
    train,
)

from midus_hf.banks import MemoryBank
from midus_hf.banks.audit import BankAudit
from midus_hf.banks.level_file import BankError
from midus_hf.config.fetched_blocks import BANK_AUDIT


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "bank"


@pytest.fixture
def resumed(folder):
    """Return what makes a bank that goes on from a state."""

    def made(state, **options):
        bank = bank_in(folder, **options)
        bank.load_state(state)
        return bank

    return made


def assert_blocks(bank, expected):
    """See that a bank has trained these blocks, and that they are equal."""
    assert bank.touched() == sorted(expected)
    assert all(torch.equal(block, expected[key]) for key, block in blocks_of(bank, list(expected)).items())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("room", [0, 2**30])
def test_saving_writes_what_was_trained_in_the_dtype_of_the_bank(room, dtype, folder, tmp_path):
    bank = bank_in(folder, dtype, bytes_in_memory=room)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    train(bank)
    bank.save(tmp_path / "saved")
    saved = MemoryBank(tmp_path / "saved", layout_of())
    assert saved.dtype == dtype and saved.seed == bank.bank.seed
    assert saved.written(1) == [0, 2, 3] and saved.written(3) == [0, 4, 5, 6, 9, 22, 27]
    trained = blocks_of(bank)
    assert all(block.dtype == torch.float32 for block in trained.values())
    for key in EVERY:
        assert torch.equal(saved.block(*key), trained[key].to(dtype))
    for key in ((3, 9), (1, 1), (3, 1)):
        assert torch.equal(saved.block(*key), bank.bank.block(*key))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before  # its own files stay


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("copied", [False, True], ids=["own-folder", "copy"])
def test_the_banks_audit_stays_unless_a_block_was_trained_without_one(copied, steps, folder, tmp_path):
    bank = bank_in(folder)
    with BankAudit() as audit:
        audit.add_unrecorded([(3, 9)])
        audit.save(folder / BANK_AUDIT)
    train(bank, steps=range(steps))
    output = tmp_path / "saved" if copied else folder
    bank.save(output)
    assert (output / BANK_AUDIT).exists() == (steps == 0)
    if steps == 0:
        with BankAudit(output / BANK_AUDIT) as audit:
            assert audit.unrecorded() == {(3, 9)}


@pytest.mark.parametrize("audited", [False, True])
def test_a_save_that_is_killed_leaves_no_audit_beside_changed_blocks(audited, folder, monkeypatch):
    bank = bank_in(folder)
    with BankAudit() as empty:
        empty.save(folder / BANK_AUDIT)
    train(bank, steps=[0])

    def killed(*arguments):
        raise KeyboardInterrupt

    # The save is killed before it writes the first block, or, with an audit to save, once it has written all blocks.
    monkeypatch.setattr(MemoryBank, "sync" if audited else "write", killed)
    with BankAudit() as audit, pytest.raises(KeyboardInterrupt):
        bank.audit = audit if audited else None
        bank.save(folder)
    assert not (folder / BANK_AUDIT).exists()


@pytest.mark.parametrize("room", [0, 1000, 2**30])
@pytest.mark.parametrize("stop", [1, 2, 4])
def test_training_goes_on_from_a_saved_state_to_the_same_bytes(stop, room, folder, tmp_path):
    whole = bank_in(folder)
    train(whole)
    first = bank_in(folder, bytes_in_memory=room)
    train(first, steps=range(stop))
    first.save_state(tmp_path / "state")
    half = blocks_of(first)
    train(first, steps=range(stop, 5))  # saving changed nothing
    second = bank_in(folder, bytes_in_memory=room)
    train(second, steps=[4])  # what was trained before is left behind
    second.load_state(tmp_path / "state")
    assert second.touched() == sorted(set().union(*FETCHED[:stop]))
    assert all(torch.equal(block, half[key]) for key, block in blocks_of(second).items())
    train(second, steps=range(stop, 5))
    expected = blocks_of(whole)
    for bank in (first, second):
        found = blocks_of(bank)
        assert bank.touched() == EVERY and all(torch.equal(found[key], expected[key]) for key in EVERY)
    second.save(tmp_path / "saved")
    saved = MemoryBank(tmp_path / "saved", layout_of())
    assert all(torch.equal(saved.block(*key), expected[key]) for key in EVERY)


def test_a_state_may_be_saved_where_it_was_loaded_from(folder, resumed, tmp_path):
    """Its blocks are read when they are fetched, so they are still read from there."""
    bank = bank_in(folder)
    train(bank, steps=range(2))
    bank.save_state(tmp_path / "state")
    expected = blocks_of(bank, bank.touched())
    second = resumed(tmp_path / "state")
    second.save_state(tmp_path / "state")
    for again in (second, resumed(tmp_path / "state")):
        assert_blocks(again, expected)


def test_a_state_writes_what_has_changed_since_the_last_one_and_each_is_whole_by_itself(folder, resumed, tmp_path):
    bank, whole = bank_in(folder), bank_in(folder)
    expected = []
    for step in range(5):
        train(bank, steps=[step])
        bank.save_state(tmp_path / f"state-{step}")
        expected.append(blocks_of(bank, bank.touched()))
    links = {path.name for path in (tmp_path / "state-0").glob("level-*") if path.stat().st_nlink == 5}
    assert links == {"level-3-1.safetensors"}, "it is in every state; of level 1 all was written anew"
    second = json.loads((tmp_path / "state-1" / "touched.json").read_text())
    assert second["3"] == [["level-3-1.safetensors", [5]], ["level-3-2.safetensors", [4, 22]]]
    shutil.rmtree(tmp_path / "state-0")
    shutil.rmtree(tmp_path / "state-2")
    for step in (1, 3, 4):
        again = resumed(tmp_path / f"state-{step}")
        assert_blocks(again, expected[step])
        train(again, steps=range(step + 1, 5))
        again.save_state(tmp_path / f"again-{step}")
        assert_blocks(resumed(tmp_path / f"again-{step}"), expected[4])
    train(whole)
    assert_blocks(whole, expected[4])


def test_states_do_not_grow_for_ever(folder, tmp_path):
    bank = bank_in(folder)
    for number in range(12):
        train(bank, steps=[0])
        bank.save_state(tmp_path / f"state-{number}")
    parts = json.loads((tmp_path / "state-11" / "touched.json").read_text())
    assert all(sum(len(indices) for _, indices in of_level) <= 2 for of_level in parts.values())
    assert {path.name for path in (tmp_path / "state-11").iterdir()} == {
        "touched.json",
        *(name for of_level in parts.values() for name, _ in of_level),
    }


@pytest.mark.parametrize("damage", ["gone", "flipped"])
def test_a_state_whose_last_one_is_damaged_is_written_whole(damage, folder, resumed, tmp_path):
    bank = bank_in(folder)
    train(bank, steps=range(2))
    bank.save_state(tmp_path / "first")
    if damage == "gone":
        shutil.rmtree(tmp_path / "first")
    else:
        for path in (tmp_path / "first").glob("level-*"):
            flip(path, -100)
    train(bank, steps=[4])
    bank.save_state(tmp_path / "second")
    assert_blocks(resumed(tmp_path / "second"), blocks_of(bank, bank.touched()))


@pytest.mark.parametrize("damage", ["no list", "no JSON", "earlier list", "file", "sizes", "flipped"])
def test_a_state_that_is_damaged_or_anothers_is_refused(damage, folder, resumed, tmp_path):
    bank, state = bank_in(folder), tmp_path / "state"
    train(bank, steps=range(2))
    bank.save_state(state)
    if damage == "no list":
        (state / "touched.json").unlink()
    elif damage in ("no JSON", "earlier list"):
        (state / "touched.json").write_text("{" if damage == "no JSON" else '{"3": [5, 22]}')
    elif damage == "file":
        (state / "level-3-1.safetensors").unlink()
    elif damage == "sizes":
        found = json.loads((state / "touched.json").read_text())
        ((name, indices),) = found["3"]
        (state / "touched.json").write_text(json.dumps({**found, "3": [[name, indices[:-1]]]}))
    else:
        flip(state / "level-3-1.safetensors")
    with pytest.raises(BankError):
        blocks_of(resumed(state))
