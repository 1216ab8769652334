"""Kill a comparison whose runs are processes, and run it again: nothing of it goes on, and it finds what an undisturbed one finds."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import yaml
from compare.small_comparison import HEADWISE, SmallComparison, compare_in_this_process, keys, write_room

from midus_hf.cli.compare import main

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="processes end with their parent on Linux alone")


def children(process: int) -> list[int]:
    listed = Path(f"/proc/{process}/task/{process}/children")
    return [int(word) for word in listed.read_text().split()] if listed.exists() else []


def results(output: Path) -> dict[str, dict]:
    """Return what was found, without how long it took and what memory."""
    outcomes = {}
    for path in [output / "runs" / "base.json", *sorted(output.rglob("seed-*.json"))]:
        result = json.loads(path.read_text())
        del result["origin"]["machine"]  # threads differ between the processes
        changing = ("seconds", "peak_memory_bytes")
        outcomes[str(path.relative_to(output))] = {key: value for key, value in result.items() if key not in changing}
    return outcomes


def test_a_killed_comparison_leaves_nothing_running_and_the_same_command_goes_on(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    room = write_room(tmp_path)
    variants = {"hml": {"upscale": HEADWISE, "rates": [{"learning_rate": 1e-2}]}}
    recipe = keys(room, tmp_path / "killed", variants, controls=False)
    (tmp_path / "compare.yaml").write_text(yaml.safe_dump(recipe))
    words = [str(tmp_path / "compare.yaml")]
    for folder in ("killed", "whole"):  # here, since a process takes seconds to import what it needs
        SmallComparison(room, tmp_path / folder, variants, controls=False).measure_base()
    killed, began = os.fork(), time.monotonic()
    if not killed:
        with contextlib.suppress(BaseException):
            main(words)
        os._exit(1)
    while not (tmp_path / "killed/runs/hml/0.01/seed-0/trained").exists():
        assert os.waitpid(killed, os.WNOHANG) == (0, 0) and time.monotonic() < began + 300
        time.sleep(0.05)
    (run,) = children(killed)
    os.kill(killed, signal.SIGKILL)
    os.waitpid(killed, 0)
    while Path(f"/proc/{run}/stat").exists() and ") Z" not in Path(f"/proc/{run}/stat").read_text():
        assert time.monotonic() < began + 300
        time.sleep(0.01)
    assert set(results(tmp_path / "killed")) == {"runs/base.json"}
    capsys.readouterr()
    compare_in_this_process(monkeypatch)
    assert main(words) == 0
    done = [line for line in capsys.readouterr().err.splitlines() if ": done (" in line]
    assert [line.partition(":")[0] for line in done] == ["hml/0.01/seed-0"]
    undisturbed = SmallComparison(room, tmp_path / "whole", variants, controls=False)
    undisturbed.measure(undisturbed.runs()[0])
    assert results(tmp_path / "killed") == results(tmp_path / "whole")
    names = {"runs", "report.html", "frontier.png"}
    assert {path.name for path in (tmp_path / "killed").iterdir()} == names
    assert {path.name for path in (tmp_path / "killed/runs/hml/0.01").iterdir()} == {"seed-0.json", "seed-0.log"}
