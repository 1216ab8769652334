"""Checkpoints and texts that the training tests share."""

from pathlib import Path

import pytest
import torch
from training.tiny_run import save_upscaled, write_corpus
from transformers import logging


@pytest.fixture(scope="session", autouse=True)
def one_thread():
    """Tiny models run fastest on one thread, and sums keep their order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    logging.set_verbosity_error()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> Path:
    """A folder of twenty texts."""
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="session")
def upscaled(tmp_path_factory):
    """Gives the upscaled checkpoint of a family, made once."""
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            made[family] = save_upscaled(family, tmp_path_factory.mktemp(f"upscaled_{family}"))
        return made[family]

    return checkpoint
