"""Fixtures of the tests of chapters."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from midus_hf.cli.look import chapters as cli
from tests.upscalers.chapters.made import save_chapters
from tests.upscalers.conftest import Outcome


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory) -> Path:
    """A checkpoint with one bank, which all layers read; nobody may change it."""
    return save_chapters(tmp_path_factory.mktemp("chapters") / "model")


@pytest.fixture
def chapters(in_process) -> Callable[..., Outcome]:
    """Run the `midus-chapters` command in this process."""
    return partial(in_process, cli.main, "midus-chapters")
