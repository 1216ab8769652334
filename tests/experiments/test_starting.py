"""Studies that were made once still start: each tells what it asks, and its command line."""

import importlib
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHARED = {"__init__", "steps"}
STUDIES = sorted(path.stem for path in (ROOT / "experiments").glob("*.py") if path.stem not in SHARED)


@pytest.mark.parametrize("name", STUDIES)
def test_a_study_tells_its_command_line(name, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        importlib.import_module(f"experiments.{name}").main()
    assert ended.value.code == 0 and capsys.readouterr().out.startswith("usage: ")


def test_the_page_names_every_study_and_its_results():
    page = (ROOT / "experiments" / "README.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in page for name in STUDIES)
    assert all(f"[{path.stem}](results/{path.name})" in page for path in (ROOT / "experiments/results").glob("*.csv"))
