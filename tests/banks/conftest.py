"""A small bank in a folder, untouched or written into."""

import pytest
from banks.small_bank import layout_of, made, record_of

from midus_hf.banks import MemoryBank


@pytest.fixture
def folder(tmp_path):
    return made(tmp_path / "bank")


@pytest.fixture
def bank(folder):
    """Blocks 1 of level 1 and 5, -1 (the generic one) of level 3 were written."""
    opened = MemoryBank(folder, layout_of())
    for level, index in ((1, 1), (3, 5), (3, -1)):
        opened.write(level, index, record_of(opened.layout, level, index))
    return opened


@pytest.fixture
def opened():
    """Opens banks."""
    return lambda folder, layout=None: MemoryBank(folder, layout or layout_of())
