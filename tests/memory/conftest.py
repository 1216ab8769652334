"""Fixtures of memories on their own."""

import pytest
from memory.building import RETRIEVING


@pytest.fixture(params=RETRIEVING)
def memory_type(request) -> str:
    """Return each type of memory whose heads retrieve slots, in turn."""
    return request.param
