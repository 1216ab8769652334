"""Fixtures of the tests of dense methods."""

import re
from collections.abc import Callable

import pytest


@pytest.fixture
def refused(tmp_path) -> Callable[..., None]:
    """Check that a command failed as it must and that `tmp_path` holds nothing but the names given."""

    def check(outcome, message: str, left: list[str]) -> None:
        assert outcome.status == 2, outcome.err
        assert outcome.out == ""
        assert outcome.err.startswith("upscale: ") and outcome.err.count("\n") == 1
        assert "Traceback" not in outcome.err
        assert re.search(message, outcome.err), outcome.err
        assert sorted(path.name for path in tmp_path.iterdir()) == left

    return check
