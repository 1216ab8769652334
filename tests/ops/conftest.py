"""Fixtures of the tests of ops that have a body in compiled C."""

import shutil

import pytest
import torch

from midus_hf.ops.dispatch.native.build import is_off
from midus_hf.ops.dispatch.native.library import why_missing


@pytest.fixture
def library() -> None:
    """The library of compiled ops is there; without a compiler tests that take it are skipped, and the reason is told.

    Where there is a compiler and nobody switched it off, a library that it does not build fails them.
    """
    if why_missing():
        assert is_off() or not any(map(shutil.which, ("cc", "gcc", "clang"))), why_missing()
        pytest.skip(why_missing())


@pytest.fixture
def threads():
    """Sets how many there are, for the length of a test."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)
