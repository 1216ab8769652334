"""Fetching out of packages: through the real clients, from a registry on this machine."""

import hashlib
import http.server
import io
import json
import os
import sys
import tarfile
import threading
import zipfile
from dataclasses import replace

import pytest

from material import __main__ as command
from material import registry
from material.registry import MaterialError, Package, extract


def wheel() -> bytes:
    """A wheel with two texts, one of them in a folder."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("pieces/a.txt", "first")
        file.writestr("pieces/deep/b.txt", "second")
        file.writestr("pieces/code.py", "raise RuntimeError('never run')")
        file.writestr("pieces-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: pieces\nVersion: 1.0\n")
        file.writestr("pieces-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        file.writestr("pieces-1.0.dist-info/RECORD", "")
    return archive.getvalue()


def tarball(members: dict[str, bytes]) -> bytes:
    archive = io.BytesIO()
    with tarfile.open(fileobj=archive, mode="w:gz") as file:
        for name, content in members.items():
            member = tarfile.TarInfo(name)
            member.size = len(content)
            file.addfile(member, io.BytesIO(content))
    return archive.getvalue()


NPM_MANIFEST = json.dumps({"name": "@scope/pieces", "version": "1.0.0"}).encode()
NPM_MEMBERS = {"package/package.json": NPM_MANIFEST, "package/data/b.txt": b"two", "package/data/a.txt": b"one"}


@pytest.fixture
def pip_package(tmp_path, monkeypatch):
    """The package `pieces`, which pip finds in a folder and nowhere else."""
    (tmp_path / "wheels").mkdir()
    (tmp_path / "wheels" / "pieces-1.0-py3-none-any.whl").write_bytes(wheel())
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "wheels"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    return Package("pip", "pieces", "1.0", hashlib.sha256(wheel()).hexdigest())


SOURCE_BACKEND = b"""
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
        "sources-1.0/pyproject.toml": b'[build-system]\nrequires = []\nbuild-backend = "own"\nbackend-path = ["."]\n',
        "sources-1.0/own.py": SOURCE_BACKEND,
        "sources-1.0/data/a.jsonl": b"{}",
    }
)


@pytest.fixture
def source_package(tmp_path, monkeypatch):
    """The package `sources`, of which there is a source archive alone."""
    (tmp_path / "sources").mkdir()
    (tmp_path / "sources" / "sources-1.0.tar.gz").write_bytes(SOURCE)
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "sources"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("RAN", str(tmp_path / "ran"))
    return Package("pip-source", "sources", "1.0", hashlib.sha256(SOURCE).hexdigest())


@pytest.fixture
def npm_package(tmp_path, monkeypatch):
    """The package `@scope/pieces`, which npm finds on a registry on loopback."""
    archive = tarball(NPM_MEMBERS)

    class Registry(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            address = f"http://127.0.0.1:{self.server.server_port}"
            version = {**json.loads(NPM_MANIFEST), "dist": {"tarball": f"{address}/pieces.tgz"}}
            version["dist"]["shasum"] = hashlib.sha1(archive).hexdigest()
            listing = {"name": "@scope/pieces", "dist-tags": {"latest": "1.0.0"}, "versions": {"1.0.0": version}}
            is_archive = self.path.endswith(".tgz")
            known = is_archive or "pieces" in self.path
            self.send_response(200 if known else 404)
            self.send_header("Content-Type", "application/octet-stream" if is_archive else "application/json")
            self.end_headers()
            self.wfile.write(archive if is_archive else json.dumps(listing if known else {}).encode())

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Registry) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setenv("npm_config_registry", f"http://127.0.0.1:{server.server_port}/")
        monkeypatch.setenv("npm_config_cache", str(tmp_path / "npm-cache"))
        monkeypatch.setenv("npm_config_fetch_retries", "0")
        yield Package("npm", "@scope/pieces", "1.0.0", hashlib.sha256(archive).hexdigest())
        server.shutdown()


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "out").mkdir()
    return tmp_path / "out"


def everything_under(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())


@pytest.mark.parametrize(
    ("kind", "pattern", "files"),
    [
        ("pip_package", "pieces/*.txt", {"pieces/a.txt": "first", "pieces/deep/b.txt": "second"}),
        ("npm_package", "package/data/*.txt", {"package/data/a.txt": "one", "package/data/b.txt": "two"}),
        ("source_package", "*.jsonl", {"sources-1.0/data/a.jsonl": "{}"}),
    ],
)
def test_the_wanted_files_of_an_archive_are_extracted_and_no_others(kind, pattern, files, folder, request, capfd):
    package = request.getfixturevalue(kind)
    paths = extract(package, [pattern], folder)
    assert [path.relative_to(folder).as_posix() for path in paths] == list(files) == everything_under(folder)
    assert [path.read_text() for path in paths] == list(files.values())
    printed = capfd.readouterr()
    assert printed.out == "" and f"fetching {package} with {package.client}" in printed.err


OTHER_DIGEST = {"sha256": "0" * 64}


@pytest.mark.parametrize(
    ("kind", "changes", "pattern", "message"),
    [
        ("pip_package", OTHER_DIGEST, "*", "has the sha256 SHA256; expected 0000.*Nothing of it is used"),
        ("npm_package", OTHER_DIGEST, "*", "has the sha256 SHA256; expected 0000.*Nothing of it is used"),
        ("source_package", OTHER_DIGEST, "*", r"sources 1\.0 could not be downloaded with pip-source: "),
        ("pip_package", {"version": "9.9.9"}, "*", r"pieces 9\.9\.9 could not be downloaded with pip: .*\w"),
        ("npm_package", {"version": "9.9.9"}, "*", r"@scope/pieces 9\.9\.9 could not be downloaded with npm: .*\w"),
        ("pip_package", {}, "pieces/*.gguf", r"pieces 1\.0 holds no file that matches 'pieces/\*\.gguf'"),
    ],
)
def test_what_is_not_what_was_expected_is_an_error(kind, changes, pattern, message, folder, request, tmp_path):
    package = request.getfixturevalue(kind)
    with pytest.raises(MaterialError, match=message.replace("SHA256", package.sha256)):
        extract(replace(package, **changes), [pattern], folder)
    assert everything_under(folder) == []
    assert not (tmp_path / "ran").exists(), "nothing of a source archive with another digest is run"


def test_without_npm_the_error_says_what_to_install(npm_package, folder, monkeypatch):
    monkeypatch.setenv("PATH", str(folder))
    with pytest.raises(
        MaterialError, match=r"@scope/pieces 1\.0\.0 comes from npm, which is not on the PATH; install"
    ):
        extract(npm_package, ["*"], folder)


def test_without_pip_the_error_says_where_to_install_it(pip_package, folder, tmp_path, monkeypatch):
    (tmp_path / "python").write_text(f'#!/bin/sh\nexec {sys.executable} -I -S "$@"\n')
    os.chmod(tmp_path / "python", 0o755)
    monkeypatch.setattr(registry.sys, "executable", str(tmp_path / "python"))
    with pytest.raises(MaterialError, match=r"with pip: No module named pip: install pip for .*python"):
        extract(pip_package, ["*"], folder)


def test_members_that_point_outside_are_not_written_there(folder, tmp_path):
    (tmp_path / "evil.tgz").write_bytes(tarball({"package/../../escaped.txt": b"x"}))
    with pytest.raises(tarfile.OutsideDestinationError):
        registry._extract_members(tmp_path / "evil.tgz", ["*"], folder)
    with zipfile.ZipFile(tmp_path / "evil.whl", "w") as file:
        file.writestr("../escaped.txt", "x")
    registry._extract_members(tmp_path / "evil.whl", ["*"], folder)
    assert not list(tmp_path.glob("escaped.txt"))
    assert not list(tmp_path.parent.glob("escaped.txt"))


def test_the_command_prints_a_path_a_name_and_errors_in_one_line(monkeypatch, capsys):
    def fail():
        raise MaterialError("it is not there")

    monkeypatch.setattr(command, "FETCH", {"one": lambda: "/a", "two": lambda: "/b", "bad": fail})
    assert command.main(["one", "two"]) == 0
    assert capsys.readouterr().out == "/a\n/b\n"
    assert command.main(["bad"]) == 1
    assert capsys.readouterr().err == "material: it is not there\n"
    with pytest.raises(SystemExit, match="2"):
        command.main(["three"])
    assert "invalid choice: 'three'" in capsys.readouterr().err
