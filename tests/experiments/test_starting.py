"""Studies that were made once still start: each tells what it asks, and its command line."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = {"__init__", "small_tokenizer", "steps"}
STUDIES = sorted(path.stem for path in (ROOT / "experiments").glob("*.py") if path.stem not in SHARED)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_tells_its_command_line(name):
    command = [sys.executable, "-m", f"experiments.{name}", "--help"]
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.startswith("usage: ")


def test_the_page_names_every_study_and_its_results():
    page = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in STUDIES)
    assert all(f"[{path.stem}](results/{path.name})" in page for path in (ROOT / "experiments/results").glob("*.csv"))
