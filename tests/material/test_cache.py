"""The cache folder: complete or absent, whoever is killed or races."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from material.cache import cache_root, cached_folder

ROOT = Path(__file__).parents[2]

BUILD_SLOWLY = """
import sys, time
from pathlib import Path
from material.cache import cached_folder

def build(folder):
    (folder / "half").write_text("1")
    with open({log!r}, "a") as log:
        log.write("built\\n")
    time.sleep({seconds})
    (folder / "whole").write_text("2")

folder = cached_folder("thing-1", build)
print(sorted(path.name for path in folder.iterdir()))
"""


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIDUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start(tmp_path, seconds: float) -> subprocess.Popen:
    code = BUILD_SLOWLY.format(log=str(tmp_path / "log"), seconds=seconds)
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_a_folder_is_built_once_where_the_environment_says_or_at_home(cache, monkeypatch):
    calls = []
    for _ in range(2):
        folder = cached_folder("thing-1", lambda folder: calls.append((folder / "a").write_text("x")))
        assert folder == cache / "thing-1" and [path.name for path in folder.iterdir()] == ["a"]
    assert len(calls) == 1
    monkeypatch.delenv("MIDUS_CACHE")
    assert cache_root() == Path.home() / ".cache" / "midus_hf"


def test_a_failed_build_leaves_nothing_and_the_next_succeeds(cache):
    def fail(folder):
        (folder / "half").write_text("1")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cached_folder("thing-1", fail)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
    folder = cached_folder("thing-1", lambda folder: (folder / "whole").touch())
    assert [path.name for path in folder.iterdir()] == ["whole"]


def test_processes_that_race_build_once_and_see_the_whole(tmp_path):
    racers = [start(tmp_path, seconds=0.5) for _ in range(4)]
    outputs = [racer.communicate(timeout=60)[0] for racer in racers]
    assert outputs == ["['half', 'whole']\n"] * 4
    assert (tmp_path / "log").read_text() == "built\n"


def test_a_killed_process_leaves_no_folder_that_looks_complete_and_the_next_cleans_up(tmp_path, cache):
    killed = start(tmp_path, seconds=600)
    deadline = time.monotonic() + 60
    while not (tmp_path / "log").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not (cache / "thing-1").exists()
    assert start(tmp_path, seconds=0).communicate(timeout=60)[0] == "['half', 'whole']\n"
    assert [path.name for path in cache.iterdir() if path.is_dir()] == ["thing-1"]
