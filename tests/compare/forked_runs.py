"""Pretended runs in forks of this process: an interpreter of its own takes each of them 0.2 s before it begins."""

import contextlib
import os
import runpy
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from processes.forks import end_with

PRETENDED = Path(__file__).with_name("pretended_run.py")


class ForkedRun:
    """What `Running` uses of a process of `subprocess.Popen`, for the one program that it starts."""

    def __init__(
        self,
        args: Sequence[str],
        *,
        env: Mapping[str, str],
        stdin: int,
        stdout: BinaryIO,
        stderr: BinaryIO,
        start_new_session: bool,
    ):
        assert args[1:3] == ["-m", "midus_hf.compare.run_process"]
        assert stdin == subprocess.DEVNULL and start_new_session
        self.returncode: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            end_with(_pretend, args[3], env, stdout, stderr)

    def poll(self) -> int | None:
        return self._reap(os.WNOHANG)

    def wait(self) -> int | None:
        return self._reap(0)

    def terminate(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGTERM)

    def _reap(self, options: int) -> int | None:
        if self.returncode is None:
            ended, status = os.waitpid(self.pid, options)
            self.returncode = os.waitstatus_to_exitcode(status) if ended else None
        return self.returncode


def _pretend(specification: str, env: Mapping[str, str], stdout: BinaryIO, stderr: BinaryIO) -> None:
    """Run the pretended program with the streams and variables that a fresh interpreter would be given."""
    os.setsid()
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    for number, stream in ((1, stdout), (2, stderr)):
        os.dup2(stream.fileno(), number)
    sys.stdout, sys.stderr = (open(number, "w", buffering=1, closefd=False) for number in (1, 2))
    variables = dict(env)
    os.environ.clear()
    os.environ.update(variables)
    sys.argv = [str(PRETENDED), specification]
    runpy.run_path(str(PRETENDED), run_name="__main__")
