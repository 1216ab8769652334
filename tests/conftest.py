"""Fixtures that several test folders share."""

import os

import pytest
from tiny import FAMILIES

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    """Each family of the table in turn."""
    return request.param
