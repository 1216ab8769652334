"""A signal to the process of a run reaches the command that runs there, however often it comes."""

import subprocess
import sys
import time
from pathlib import Path

import pytest

from midus_hf.compare.commands import Commands, StepFailed

COMMAND = """
import pathlib, signal, sys, time
heard = []
signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
seen = pathlib.Path(sys.argv[1])
while len(heard) < 2:
    seen.write_text(str(len(heard)))
    time.sleep(0.02)
"""
RUN = """
import sys
from pathlib import Path
from midus_hf.compare import commands as module
module._words_of = lambda command, *words: [sys.executable, "-c", *words]
commands = module.Commands(Path(sys.argv[1]))
commands.hear_signals()
commands.run("step", "midus train", sys.argv[2], sys.argv[3])
"""


def wait_until(seen: Path, number: str) -> None:
    deadline = time.monotonic() + 60
    while not (seen.exists() and seen.read_text() == number):
        assert time.monotonic() < deadline, f"the command never heard {number} signals"
        time.sleep(0.02)


def test_a_second_signal_reaches_a_command_that_is_still_saving_and_both_end(tmp_path):
    """Send two signals, as when a whole group of processes is terminated and the comparison then terminates its runs."""
    seen = tmp_path / "seen"
    run = subprocess.Popen([sys.executable, "-c", RUN, str(tmp_path / "logs"), COMMAND, str(seen)])
    try:
        wait_until(seen, "0")
        run.terminate()
        wait_until(seen, "1")
        run.terminate()
        assert run.wait(timeout=60) == 143
    finally:
        run.kill()


def test_a_command_is_run_through_the_interpreter_wherever_scripts_lie(tmp_path):
    commands = Commands(tmp_path / "logs")
    assert "Usage: midus " in commands.run("help", "midus", "--help").output
    with pytest.raises(StepFailed, match="upscale ended with status 2"):
        commands.run("upscale", "upscale", "--base", tmp_path, "--method", "x", "--output", tmp_path / "out")
    assert f"$ {sys.executable} -m midus_hf upscale --base" in (tmp_path / "logs" / "upscale.log").read_text()
