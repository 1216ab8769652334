"""Fixtures that several test folders share."""

import gc
import importlib.util
import math
import os
import pwd
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

# Before anything imports datasets, which reads it once: tests leave nothing in the cache of who runs them.
_cache = tempfile.TemporaryDirectory(prefix="datasets-cache-")
os.environ.setdefault("HF_DATASETS_CACHE", _cache.name)
# Likewise the library of compiled ops, which is built once for all processes of the tests.
_libraries = tempfile.TemporaryDirectory(prefix="native-")
os.environ.setdefault("MIDUS_NATIVE_CACHE", _libraries.name)
# Before anything imports huggingface_hub, which reads the switch once.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
# What inductor keeps does not say for which instructions it was written: compiled for fewer, it leaves lanes unwritten.
_instructions = os.environ.get("ATEN_CPU_CAPABILITY")
_kept = os.environ.get("TORCHINDUCTOR_CACHE_DIR", os.path.join(tempfile.gettempdir(), "torchinductor"))
if _instructions and not _kept.endswith(_instructions):
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{_kept}-{_instructions}"

import pytest
import torch

ENVIRONMENT = os.environ
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # Shells start what runs in the background so, and runs leave a signal ignored that was.
    signal.signal(signal.SIGINT, signal.default_int_handler)
if not torch.cuda.is_available():
    # Before anything imports a kernel: triton's interpreter runs it on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pairs
from hypothesis import settings
from pairs import Extent, keep_each_value, keep_pairs
from tiny import FAMILIES, NATIVE_FAMILIES
from transformers import logging

from midus_hf.sources import progress as bars

# A busy machine takes longer than any deadline of an example.
settings.register_profile("without deadline", deadline=None)
settings.load_profile("without deadline")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--product",
        action="store_true",
        help="run each test with every family and every other parameter together, not only in pairs, and what is marked product",
    )
    parser.addoption(
        "--each-value",
        action="append",
        default=[],
        type=Path,
        metavar="PATH",
        help="of tests in this file or folder, run every value of a parameter, but not in pairs: for what other versions have run",
    )
    parser.addoption("--failed-to", type=Path, metavar="FILE", help="add a line to FILE for each test that fails")


def pytest_configure(config: pytest.Config) -> None:
    """Tell tests how many values of their parameters run: all where a test is named."""
    if runs_all(config):
        pairs.extent = Extent.ALL
    elif config.getoption("--each-value"):
        pairs.extent = Extent.FEWEST


def runs_all(config: pytest.Config) -> bool:
    return config.getoption("--product") or any("::" in argument for argument in config.args)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip what torch refuses where `ATEN_CPU_CAPABILITY` hides some of the processor's vectors."""
    try:
        return (yield)
    except RuntimeError as error:
        capability = ENVIRONMENT.get("ATEN_CPU_CAPABILITY")
        if capability and "only supported when avx512 is supported" in str(error):
            pytest.skip(f"torch with ATEN_CPU_CAPABILITY={capability}: {error}")
        raise


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    path = config.getoption("--failed-to")
    failed = [*terminalreporter.stats.get("failed", []), *terminalreporter.stats.get("error", [])]
    if path is not None and failed:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{report.nodeid}\n" for report in failed)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if not runs_all(config):
        paired, sampled = keep_pairs(items), [path.resolve() for path in config.getoption("--each-value")]
        in_part = [item for item in paired if any(item.path.is_relative_to(path) for path in sampled)]
        kept = set(paired) - set(in_part) | set(keep_each_value(in_part))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = [item for item in items if item in kept]


@pytest.fixture(scope="session", autouse=True)
def few_threads():
    """Tiny models run fastest on one thread, unless `OMP_NUM_THREADS` says otherwise."""
    before = torch.get_num_threads()
    torch.set_num_threads(int(ENVIRONMENT.get("OMP_NUM_THREADS", "1")))
    logging.set_verbosity(60)
    logging.disable_progress_bar()
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session", autouse=True)
def no_minute_passes():
    """A test that takes a minute on a busy machine prints what it prints in a second."""
    with patch.object(bars, "_SECONDS_PER_LINE", math.inf):
        yield


@pytest.fixture
def library_bars() -> Iterator[None]:
    shown = logging.is_progress_bar_enabled()
    logging.enable_progress_bar()
    yield
    if not shown:
        logging.disable_progress_bar()


@pytest.fixture(scope="session", autouse=True)
def no_waiting_for_disks():
    """What tests write need not outlast a loss of power: a model forces ninety files to the disk."""
    with patch.object(os, "fsync", lambda file: None):
        yield


@pytest.fixture(autouse=True)
def one_environment():
    """`datasets` leaves a copy of `os.environ` in its place, and rich goes on reading the first one."""
    yield
    os.environ = ENVIRONMENT  # noqa: B003 - put back as it was, not emptied


@pytest.fixture(scope="module", autouse=True)
def frozen_modules():
    """No collection of garbage, which training runs make, looks at what lives as long as the tests."""
    gc.collect()
    gc.freeze()


@pytest.fixture(params=FAMILIES)
def family(request) -> str:
    """Each family that hosts memory, in turn."""
    return request.param


@pytest.fixture(params=NATIVE_FAMILIES)
def native_family(request) -> str:
    """Each family that is upscaled as its own kind, in turn."""
    return request.param


@pytest.fixture
def no_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the user have no home folder, as in many containers."""

    def unknown(user: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {user}")

    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.fixture
def without(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Return what lets a machine lack a package."""
    find = importlib.util.find_spec

    def lack(package: str) -> None:
        found = lambda name, *rest: None if name == package else find(name, *rest)  # noqa: E731
        monkeypatch.setattr(importlib.util, "find_spec", found)

    return lack
