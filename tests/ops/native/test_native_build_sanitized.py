"""C under scrutiny: its compiler's warnings are errors, and sanitizers watch what it reads and writes."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from midus_hf.ops.dispatch import build
from midus_hf.ops.dispatch.library import variant

WARNINGS = ("-Wall", "-Wextra", "-Werror")
SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-g1")


@pytest.fixture
def gcc(monkeypatch):
    path = shutil.which("gcc")
    if path is None:
        pytest.skip("there is no gcc")
    monkeypatch.setenv("CC", path)
    return path


def find_runtimes(gcc) -> str:
    """Return the libraries that a process must load before all others: exceptions of C++ are watched from the start, or never."""
    found = []
    for name in ("libasan.so", "libstdc++.so.6"):
        words = [gcc, f"-print-file-name={name}"]
        path = subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()
        if not Path(path).is_absolute():
            pytest.skip(f"gcc has no {name}")
        found.append(path)
    return " ".join(found)


def test_every_variant_compiles_without_warnings(gcc, monkeypatch, tmp_path):
    monkeypatch.setattr(build, "FLAGS", (*build.FLAGS, *WARNINGS, "-fsyntax-only"))
    for name in build.VARIANTS if variant() != "baseline" else ("baseline",):
        build.compile_library(tmp_path / "library.so", name)


def test_sanitizers_find_no_access_out_of_bounds(gcc, monkeypatch, tmp_path):
    runtimes = find_runtimes(gcc)
    quick = (*build.FLAGS, "-O0")  # sanitizers make -O3 take a minute
    monkeypatch.setattr(build, "FLAGS", (*quick, *WARNINGS, *SANITIZERS))
    build.compile_library(tmp_path / "sanitized.so", variant())
    watched = {
        "LD_PRELOAD": runtimes,
        "ASAN_OPTIONS": "detect_leaks=0",  # Python keeps what it has until the end
        "PYTHONPATH": str(Path(build.__file__).parents[3]),
    }
    script = Path(__file__).with_name("sanitized.py")
    words = [sys.executable, str(script), str(tmp_path / "sanitized.so")]
    done = subprocess.run(words, env=os.environ | watched, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[:4000]
    assert done.stdout == "watched\n", done.stderr[:4000]
