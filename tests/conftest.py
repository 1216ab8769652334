"""Fixtures that several test folders share."""

import os

# Before anything imports huggingface_hub, which reads the switch once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import pytest
from tiny import FAMILIES


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    """Each family of the table in turn."""
    return request.param
