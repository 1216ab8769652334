"""Fixtures of the tests that every fast body of an op must pass."""

import pytest
import torch
from ops.interpreter import mended_interpreter

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


@pytest.fixture(autouse=True)
def interpreter():
    """One that runs every kernel."""
    with mended_interpreter():
        yield


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Memory is poisoned in every test of kernels."""
