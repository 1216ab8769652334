"""Fixtures of the tests of ops that have a body in compiled C."""

import shutil
import sys

import pytest
import torch

from midus_hf.ops.dispatch.build import is_off
from midus_hf.ops.dispatch.calling import RESOLVED
from midus_hf.ops.dispatch.library import why_missing


@pytest.fixture(autouse=True)
def nothing_is_resolved():
    """No call was checked before, since a test may change what is there: a library, Triton, an interpreter."""
    RESOLVED.clear()
    yield
    RESOLVED.clear()


@pytest.fixture
def library() -> None:
    """The library of compiled ops is there; without a compiler tests that take it are skipped, and the reason is told.

    Where there is a compiler and nobody switched it off, a library that it does not build fails them.
    """
    if why_missing():
        assert is_off() or not any(map(shutil.which, ("cc", "gcc", "clang"))), why_missing()
        pytest.skip(why_missing())


DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def in_c(request) -> None:
    """Compiled C can run on the tensors of these tests, or they are skipped."""
    if DEVICE != "cpu":
        pytest.skip(f"tensors are on {DEVICE}")
    request.getfixturevalue("library")


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.fixture
def poisoned_memory(monkeypatch):
    """Memory that an op asks for and does not fill holds NaN, and integers that no table has."""

    def poisoned(allocate):
        def allocate_poisoned(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            if torch.compiler.is_compiling():
                return tensor
            if sys._getframe(1).f_globals.get("__name__", "").startswith("midus_hf.ops") and not tensor.is_meta:
                with torch.no_grad():
                    tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
            return tensor

        return allocate_poisoned

    # Torch notes at the first time which functions make tensors, for the whole process: these, and not those below.
    with torch.device(DEVICE):
        torch.empty(0)
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
