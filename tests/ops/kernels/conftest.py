"""Fixtures of the tests that every fast body of an op must pass."""

import sys

import pytest
import torch

from benchmarks.interpreter import mended_interpreter

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=["torch", "triton"])
def backend(request) -> str:
    """Each fast body, in turn; kernels run in triton's interpreter where there is no GPU."""
    return request.param


@pytest.fixture(params=["torch", "native", "triton"])
def body(request) -> str:
    """Each fast body of an op that has one in C; that one where it can run."""
    if request.param == "native":
        request.getfixturevalue("in_c")
    return request.param


@pytest.fixture
def in_c(request) -> None:
    """Compiled C can run on the tensors of these tests, or they are skipped."""
    if DEVICE != "cpu":
        pytest.skip(f"tensors are on {DEVICE}")
    request.getfixturevalue("library")


@pytest.fixture(autouse=True)
def interpreter():
    """One that runs every kernel."""
    with mended_interpreter():
        yield


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """Memory that an op asks for and does not fill holds NaN, and integers that no table has."""

    def poisoned(allocate):
        def allocate_poisoned(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
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
