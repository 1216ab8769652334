"""Settings of the evaluation tests."""

import pytest
import torch
from transformers import logging


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny models run fastest on one thread, and sums keep their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    yield
    torch.set_num_threads(before)
