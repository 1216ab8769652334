"""What blocks have learnt is saved, loaded and gone on from to the same bytes."""

import pytest
import torch
from banks.trained_blocks import EVERY, FETCHED, bank_in, blocks_of, layout_of, train

from midus_hf.banks import MemoryBank


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "bank"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saving_writes_what_was_trained_in_the_dtype_of_the_bank(dtype, folder, tmp_path):
    bank = bank_in(folder, dtype)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    train(bank)
    bank.save(tmp_path / "saved")
    saved = MemoryBank(tmp_path / "saved", layout_of())
    assert saved.dtype == dtype and saved.description["seed"] == bank.bank.description["seed"]
    assert saved.written(1) == [-1, 0, 2] and saved.written(3) == [-1, 0, 4, 5, 6, 9, 22]
    trained = blocks_of(bank)
    assert all(block.dtype == torch.float32 for block in trained.values())
    for key in EVERY:
        assert torch.equal(saved.block(*key), trained[key].to(dtype))
    for key in ((3, 9), (1, 1), (3, 1)):
        assert torch.equal(saved.block(*key), bank.bank.block(*key))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before  # its own files stay


def test_a_save_into_its_own_folder_is_whole(folder):
    bank = bank_in(folder)
    train(bank, steps=[0])
    bank.save(folder)
    saved = MemoryBank(folder, layout_of())
    assert all(torch.equal(saved.block(*key), block) for key, block in blocks_of(bank, bank.touched()).items())


@pytest.mark.parametrize("stop", [1, 2, 4])
def test_training_goes_on_from_a_saved_state_to_the_same_bytes(stop, folder, tmp_path):
    whole = bank_in(folder)
    train(whole)
    first = bank_in(folder)
    train(first, steps=range(stop))
    first.save_state(tmp_path / "state")
    half = blocks_of(first)
    train(first, steps=range(stop, 5))  # saving changed nothing
    second = bank_in(folder)
    train(second, steps=[4])  # what was trained before is left behind
    second.load_state(tmp_path / "state")
    assert second.touched() == sorted(set().union(*FETCHED[:stop]))
    assert all(torch.equal(block, half[key]) for key, block in blocks_of(second).items())
    train(second, steps=range(stop, 5))
    expected = blocks_of(whole)
    for bank in (first, second):
        actual = blocks_of(bank)
        assert bank.touched() == EVERY and all(torch.equal(actual[key], expected[key]) for key in EVERY)
    second.save(tmp_path / "saved")
    saved = MemoryBank(tmp_path / "saved", layout_of())
    assert all(torch.equal(saved.block(*key), expected[key]) for key in EVERY)


def test_a_state_may_be_saved_where_it_was_loaded_from(folder, tmp_path):
    """Its blocks are read when they are fetched, so they are still read from there."""
    bank, second, third = (bank_in(folder) for _ in range(3))
    train(bank, steps=range(2))
    bank.save_state(tmp_path / "state")
    expected = blocks_of(bank, bank.touched())
    second.load_state(tmp_path / "state")
    second.save_state(tmp_path / "state")
    third.load_state(tmp_path / "state")
    for again in (second, third):
        assert again.touched() == sorted(expected)
        assert all(torch.equal(block, expected[key]) for key, block in blocks_of(again, list(expected)).items())
