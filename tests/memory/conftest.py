"""Fixtures of memories on their own."""

import pytest
from memory.building import RETRIEVING


@pytest.fixture(params=RETRIEVING)
def memory_type(request) -> str:
    return request.param
