"""Comparisons are killed at random moments and run again: what they find is what one finds that nobody disturbed."""

import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from compare.small_comparison import HEADWISE, keys, write_room
from pairs import by_default

ROOT = Path(__file__).parents[2]
VARIANTS = {"hml": {"upscale": HEADWISE, "rates": [1e-2]}, "full": {"rates": [1e-3]}}
# A signal, whether the first process that the comparison started gets it, and how the comparison ends then.
KILLS = {
    "kill": (signal.SIGKILL, False, {-signal.SIGKILL}),
    # The comparison goes on without the run, and says so in the end.
    "kill-run": (signal.SIGKILL, True, {1}),
    "terminate": (signal.SIGTERM, False, {143}),
    "interrupt": (signal.SIGINT, False, {130}),
}
# How a comparison is killed, time after time.
SEQUENCES = {"each": ("kill", "terminate", "kill-run"), **{kill: (kill,) * 3 for kill in KILLS}}
RUNS = [(name, number) for name in SEQUENCES for number in range(10)]


class Forks:
    """Comparisons in processes that one forks which has imported what they need.

    Args:
        folder: For notes.
    """

    def __init__(self, folder: Path):
        self.notes = folder / "processes"
        path = os.pathsep.join([str(ROOT / "tests"), str(ROOT)])
        self.server = subprocess.Popen(
            [sys.executable, "-W", "ignore", ROOT / "tests/compare/forked_comparisons.py", self.notes],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
        assert self._line() == "ready"

    def start(self, *words) -> int:
        """Start `midus compare`; gives the number of its process."""
        self.notes.unlink(missing_ok=True)
        print(json.dumps([*map(str, words)]), file=self.server.stdin, flush=True)
        return int(self._line())

    def status(self) -> int:
        """How it ended."""
        return int(self._line())

    def is_running(self) -> bool:
        return not select.select([self.server.stdout], [], [], 0)[0]

    def processes(self) -> list[int]:
        """All that it started so far, itself first."""
        return [int(line) for line in self.notes.read_text().split()] if self.notes.exists() else []

    def left(self) -> list[int]:
        """Those that are alive: one of them may need a moment to end, with a checkpoint."""
        for _ in range(200):
            alive = [process for process in self.processes() if is_alive(process)]
            if not alive:
                break
            time.sleep(0.05)
        return alive

    def _line(self) -> str:
        assert select.select([self.server.stdout], [], [], 120)[0], "no answer after 120 s"
        return self.server.stdout.readline().strip()


def is_alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="processes end with their parent, and are looked at, on Linux alone"
)


@pytest.fixture(scope="module")
def forks(tmp_path_factory) -> Iterator[Forks]:
    forks = Forks(tmp_path_factory.mktemp("forks"))
    yield forks
    forks.server.stdin.close()
    forks.server.wait(timeout=60)


@pytest.fixture(scope="module")
def room(tmp_path_factory) -> Path:
    room = write_room(tmp_path_factory.mktemp("room"))
    told = keys(room, room / "whole", VARIANTS, controls=["one-row", "shuffled-addresses"], train={"save_steps": 1})
    (room / "compare.yaml").write_text(yaml.safe_dump(told))
    return room


@pytest.fixture(scope="module")
def whole(forks, room) -> tuple[dict[str, dict], float]:
    """What is found when nobody disturbs it, and the seconds that takes."""
    began = time.monotonic()
    forks.start(room / "compare.yaml")
    assert forks.status() == 0
    found = results(room / "whole")
    assert list(found) == [
        "base/result.json",
        *(f"runs/{name}/seed-0/result.json" for name in ("full/0.001", "hml/0.01", "hml+one-row/0.01")),
    ]
    return found, time.monotonic() - began


def results(output: Path) -> dict[str, dict]:
    """All that was found but how long it took and what memory."""
    found = {}
    for path in sorted(output.rglob("result.json")):
        result = json.loads(path.read_text())
        for point in result["curve"]:
            del point["seconds"]
        found[str(path.relative_to(output))] = {
            key: value for key, value in result.items() if key not in ("seconds", "peak_memory_bytes")
        }
        assert result["variant"] == "base" or result["peak_memory_bytes"] > 10**7
    return found


@pytest.mark.parametrize(("name", "number"), by_default([("each", 0)], RUNS))
def test_what_is_gone_on_with_after_kills_is_what_nobody_disturbed(forks, room, whole, tmp_path, name, number):
    expected, seconds = whole
    words = [room / "compare.yaml", f"output_dir={tmp_path / 'out'}"]
    choice = random.Random(f"{name} {number}")
    for kill in SEQUENCES[name]:
        signal_number, of_run, endings = KILLS[kill]
        main = forks.start(*words)
        time.sleep(choice.uniform(0, seconds))
        processes = [process for process in forks.processes()[1:] if is_alive(process)] if of_run else [main]
        was_running = forks.is_running() and bool(processes)
        if was_running:
            os.kill(processes[0], signal_number)
        status = forks.status()
        assert status in endings | {0} if was_running else status in (0, 1), forks.notes.with_suffix(
            ".said"
        ).read_text()
        if choice.random() < 0.5:
            assert not forks.left()
    # What the killed one had started may still be ending.
    forks.start(*words)
    assert forks.status() == 0, Path(f"{forks.notes}.said").read_text()[-3000:]
    assert not forks.left()
    assert results(tmp_path / "out") == expected
    assert_nothing_is_left(tmp_path / "out")


def assert_nothing_is_left(output: Path) -> None:
    """Of runs and of models, however they were interrupted."""
    # A page is written where matplotlib is installed.
    assert {path.name for path in output.iterdir()} - {"report.html"} == {"base", "runs", "report.md", "runs.csv"}
    kept = {"result.json", "log.jsonl", "train.yaml", "run.json", "said.txt", "logs"}
    for run in output.glob("runs/*/*/*"):
        # Of all but the null controls something was measured beside training.
        assert {path.name for path in run.iterdir()} - {"evaluations"} == kept and not any(run.rglob("*.partial"))
