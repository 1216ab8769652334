"""Steps of a cell: commands that a person would type, each with a log of its own.

`python -m midus_hf.compare.commands PARENT COMMAND...` is a command that is terminated when the process that started it ends: a
comparison that is killed leaves no run behind that goes on alone, where the next one would meet it. Linux alone can do this;
elsewhere the command just runs.
"""

import ctypes
import dataclasses
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

_BIN = Path(sys.executable).parent
_SET_PARENT_DEATH_SIGNAL = 1


def ask_for_termination(parent: int) -> None:
    """Let the system send SIGTERM to this process when its parent ends.

    Args:
        parent: Its number; if it has ended already, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(128 + signal.SIGTERM)


class StepFailed(RuntimeError):
    """A command ended with a status other than 0; the message is the last line that it said."""


@dataclasses.dataclass(frozen=True)
class Done:
    """What a command gave.

    Args:
        output: What it printed.
        peak_rss_bytes: Its largest resident memory.
    """

    output: str
    peak_rss_bytes: int


class Commands:
    """Run commands one after the other; a signal to this process is passed on to the one that runs.

    Args:
        logs: Folder for a file for each command: its words, and what it said.
        held: Descriptor of a lock that commands hold as well, should they outlive this process. Default: none.
    """

    def __init__(self, logs: Path, held: int | None = None):
        self._held = () if held is None else (held,)
        self._logs = logs
        self._running: subprocess.Popen[str] | None = None
        self._is_ending = False
        logs.mkdir(parents=True, exist_ok=True)

    def hear_signals(self) -> None:
        """Pass SIGTERM and SIGINT on to the command that runs, and end when it has ended."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def run(self, step: str, command: str, *words: Any) -> Done:
        """Run a command of this environment.

        Args:
            step: Name of its log.
            command: Its name, such as `midus train`.
            words: Its arguments.

        Raises:
            StepFailed: If its status is not 0.
        """
        program, *names = command.split()
        line = [str(_BIN / program), *names, *map(str, words)]
        log = self._logs / f"{step}.log"
        with log.open("a", encoding="utf-8") as said:
            print(f"$ {shlex.join(line)}", file=said, flush=True)
            # Its own process ends it when this one is killed.
            guarded = [sys.executable, "-m", "midus_hf.compare.commands", str(os.getpid()), *line]
            process = self._running = subprocess.Popen(
                guarded, stdout=subprocess.PIPE, stderr=said, text=True, pass_fds=self._held
            )
            assert process.stdout is not None
            output = process.stdout.read()
            _, status, usage = os.wait4(process.pid, 0)
            self._running = None
            code = process.returncode = os.waitstatus_to_exitcode(status)
        if code:
            raise StepFailed(f"{command} ended with status {code}: {_last_line(log)} (see {log})")
        return Done(output, usage.ru_maxrss * (1 if sys.platform == "darwin" else 1024))

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        if self._running is not None:
            self._running.send_signal(number)
        if (
            self._is_ending
        ):  # the handler of the first signal waits below, and a Popen cannot be waited for twice at once
            return
        self._is_ending = True
        if self._running is not None:
            self._running.wait()
        sys.exit(128 + number)


def _last_line(log: Path) -> str:
    lines: Sequence[str] = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip() and not line.startswith("$ ")]
    return said[-1] if said else "it said nothing"


if __name__ == "__main__":
    ask_for_termination(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
