"""A small bank in a folder, untouched or written into."""

import pytest
from banks.small_bank import layout_of, made, record_of

from midus_hf.banks import MemoryBank


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path / "bank")


@pytest.fixture
def bank(folder):
    """Writable; blocks 1 of level 1 and 5, -1 (the generic one) of level 3 were written."""
    opened = MemoryBank(folder, layout_of(), writable=True)
    for level, index in ((1, 1), (3, 5), (3, -1)):
        opened.write(level, index, record_of(opened.layout, level, index))
    yield opened
    opened.close()


@pytest.fixture
def opened():
    """Opens banks, and closes them."""
    banks = []

    def open_one(folder, layout=None, **options):
        banks.append(MemoryBank(folder, layout or layout_of(), **options))
        return banks[-1]

    yield open_one
    for bank in banks:
        bank.close()
