"""Steps of a run: commands that a person would type, each with its own log.

`python -m midus_hf.compare.commands PARENT COMMAND...` runs a command that the system terminates when process PARENT ends. Thus a
comparison that is killed leaves no command behind that the next comparison in the same folder would collide with. This works on
Linux alone; elsewhere the command runs on.
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

_SET_PARENT_DEATH_SIGNAL = 1


def ask_for_termination(parent: int) -> None:
    """Ask Linux to send SIGTERM to this process when its parent ends; do nothing on other systems."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(128 + signal.SIGTERM)


class StepFailed(RuntimeError):
    """A command that ended with a status other than 0; the message has the last line of its log."""


@dataclasses.dataclass(frozen=True)
class Done:
    """Standard output of a command that succeeded, and its peak resident memory in bytes."""

    output: str
    peak_rss_bytes: int


class Commands:
    """Runner of commands, one after the other, which passes signals of this process on to the running command.

    Args:
        logs: Folder for the logs, one file per step: the command line and what the command wrote to standard error.
        held: Descriptor of a lock that commands inherit, so that the lock stays held if they outlive this process. Default: None.
    """

    def __init__(self, logs: Path, held: int | None = None):
        self._held = () if held is None else (held,)
        self._logs = logs
        self._running: subprocess.Popen[str] | None = None
        self._is_ending = False
        logs.mkdir(parents=True, exist_ok=True)

    def hear_signals(self) -> None:
        """Pass SIGTERM and SIGINT on to the running command, and exit once the command has ended."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._pass_on)

    def run(self, step: str, command: str, *arguments: Any) -> Done:
        """Run a command of this package in a fresh process, and return its output and its peak memory.

        The command is called through the interpreter, since scripts may lie elsewhere, or nowhere.
        """
        line = _words_of(command, *arguments)
        log = self._logs / f"{step}.log"
        with log.open("a", encoding="utf-8") as said:
            print(f"$ {shlex.join(line)}", file=said, flush=True)
            # This module's own command line: it asks for termination when this process is killed, and then becomes the command.
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
        """Pass a signal on to the running command, wait for that command, and exit."""
        if self._running is not None:
            self._running.send_signal(number)
        # The handler of the first signal already waits below, and only one waiter per Popen is allowed.
        if self._is_ending:
            return
        self._is_ending = True
        if self._running is not None:
            self._running.wait()
        sys.exit(128 + number)


def _words_of(command: str, *arguments: Any) -> list[str]:
    return [sys.executable, "-m", "midus_hf", *command.removeprefix("midus").split(), *map(str, arguments)]


def _last_line(log: Path) -> str:
    """Return the last line of a log that is neither empty nor a command line."""
    lines: Sequence[str] = log.read_text(encoding="utf-8", errors="replace").splitlines()
    said = [line.strip() for line in lines if line.strip() and not line.startswith("$ ")]
    return said[-1] if said else "it said nothing"


if __name__ == "__main__":
    ask_for_termination(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
