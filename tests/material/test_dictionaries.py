"""The dictionary: entries by headword, and packages of Debian."""

import gzip
import hashlib
import json
import os
import shutil
import subprocess

import pytest

from material import dictionaries
from material.registry import MaterialError, Package, extract

DICTIONARY = """Abandon \\A*ban"don\\ v. t.
   1. To give up
      wholly.
      [1913 Webster]

   2. To leave. [PJC]
Abandoned \\A*ban"doned\\ a.
   Forsaken.
"""


def test_numbers_have_the_most_significant_digit_first():
    assert [dictionaries.read_number(digits) for digits in ("A", "B", "/", "BA", "BP")] == [0, 1, 63, 64, 79]


def test_entries_stand_under_the_word_that_they_begin_with():
    text = DICTIONARY.encode()
    second = text.index(b"Abandoned")
    places = {"abandon": (0, second), "abandoning": (0, second), "abandoned": (second, len(text) - second)}
    lines = [f"{word}\t{written(offset)}\t{written(length)}" for word, (offset, length) in places.items()]
    entries = dictionaries.read_entries(text, "\n".join(["00-database-info\tA\tB", *lines]))
    assert list(entries) == ["Abandon", "Abandoned"]
    assert entries["Abandon"] == 'Abandon \\A*ban"don\\ v. t. 1. To give up wholly.\n2. To leave. [PJC]'


def written(value: int) -> str:
    digits = [digit for digit, number in dictionaries._DIGITS.items() if number == value % 64]
    return (written(value // 64) if value >= 64 else "") + digits[0]


def test_a_headword_is_in_one_part():
    names = [f"word{number}" for number in range(2000)]
    parts = [dictionaries.part_of(name) for name in names]
    assert parts == [dictionaries.part_of(name) for name in names]
    assert set(parts) == {"train", "validation", "held_out"}
    assert parts.count("train") > 1900


@pytest.fixture
def debian(tmp_path, monkeypatch) -> Package:
    """A package, and an `apt-get` that copies it to the folder that it runs in."""
    if shutil.which("dpkg-deb") is None:
        pytest.skip("dpkg-deb is not installed")
    root = tmp_path / "root"
    (root / "DEBIAN").mkdir(parents=True)
    (root / "DEBIAN" / "control").write_text(
        "Package: dict-gcide\nVersion: 1.0\nArchitecture: all\nMaintainer: a\nDescription: b\n"
    )
    (root / "usr" / "share").mkdir(parents=True)
    (root / "usr" / "share" / "gcide.dict.dz").write_bytes(gzip.compress(DICTIONARY.encode()))
    (root / "usr" / "share" / "gcide.index").write_text(
        f"abandon\tA\t{written(len(DICTIONARY.encode()))}\n", encoding="utf-8"
    )
    archive = tmp_path / "dict-gcide_1.0_all.deb"
    subprocess.run(["dpkg-deb", "--build", str(root), str(archive)], check=True, capture_output=True)
    client = tmp_path / "bin" / "apt-get"
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\n[ "$3" = "dict-gcide=1.0" ] && cp {archive} .\n')
    client.chmod(0o755)
    monkeypatch.setenv("PATH", f"{client.parent}{os.pathsep}{os.environ['PATH']}")
    return Package("apt", "dict-gcide", "1.0", hashlib.sha256(archive.read_bytes()).hexdigest())


def test_the_dictionary_comes_from_a_package_of_debian(debian, tmp_path, monkeypatch):
    monkeypatch.setenv("MIDUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(dictionaries, "GCIDE", debian)
    folder = dictionaries.gcide()
    assert sorted(path.name for path in folder.iterdir()) == ["held_out.jsonl", "train.jsonl", "validation.jsonl"]
    rows = [json.loads(line) for path in folder.iterdir() for line in path.read_text().splitlines()]
    assert [row["name"] for row in rows] == ["Abandon"]


def test_missing_apt_is_named(debian, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    (tmp_path / "out").mkdir()
    with pytest.raises(MaterialError, match="comes from Debian, and apt-get is not on the PATH; fetch it on Debian"):
        extract(debian, ["*"], tmp_path / "out")
