"""A small bank in a folder, untouched or written into."""

import pytest
from banks.small_bank import made, opened, record_of


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path / "bank")


@pytest.fixture
def bank(folder):
    """Blocks 1 of level 1 and 5, -1 (the generic one) of level 3 were written."""
    bank = opened(folder)
    for level, index in ((1, 1), (3, 5), (3, -1)):
        bank.write(level, index, record_of(bank.layout, level, index))
    return bank
