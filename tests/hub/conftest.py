"""A Hub over HTTP, and someone's day on it."""

from collections.abc import Iterator

import pytest
from hub.day import Day
from hub.loopback import LoopbackHub
from hub.repositories import Fault


@pytest.fixture(scope="module")
def loopback() -> Iterator[LoopbackHub]:
    """An empty Hub at a free port of this machine, for clients in processes of their own."""
    hub = LoopbackHub()
    with hub.serving():
        yield hub


@pytest.fixture(scope="module")
def day(loopback, tmp_path_factory) -> Day:
    return Day(tmp_path_factory.mktemp("day"), loopback)


@pytest.fixture
def faults(loopback) -> Iterator[list[Fault]]:
    """Faults of the Hub during a test, to which it adds."""
    yield loopback.faults
    loopback.faults.clear()
