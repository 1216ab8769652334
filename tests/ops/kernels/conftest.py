"""Fixtures of the tests that every fast body of an op must pass."""

import pytest
from ops.interpreter import mended_interpreter


@pytest.fixture(params=["torch", "native", "triton"])
def body(request) -> str:
    """Each fast body of an op that has one in C; that one where it can run, and kernels in triton's interpreter without a GPU."""
    if request.param == "native":
        request.getfixturevalue("in_c")
    return request.param


@pytest.fixture(autouse=True)
def interpreter():
    with mended_interpreter():
        yield


@pytest.fixture(autouse=True)
def poisoned(poisoned_memory):
    """Memory is poisoned in every test of kernels."""
