"""Shell scripts whose programs are functions of this process: nothing is imported anew."""

import contextlib
import io
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Listener
from pathlib import Path

from commands.installed import Outcome

_LAST = "script-has-ended"
# Lies in the shell's path in place of each program: hands its words and its folder to this process, and prints the answer.
_STAND_IN = """#!{python} -IS
import os, sys
from multiprocessing.connection import Client
with Client({address!r}) as connection:
    connection.send((os.path.basename(sys.argv[0]), sys.argv[1:], os.getcwd()))
    status, out, err = connection.recv()
sys.stdout.buffer.write(out)
sys.stderr.buffer.write(err)
sys.exit(status)
"""
Program = Callable[[list[str]], int | str | None]


def run_shell(script: str, folder: Path, programs: dict[str, Program]) -> Outcome:
    """Run a script with bash until a command fails; functions replace programs, and take their words."""
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    with tempfile.TemporaryDirectory() as room, Listener(family="AF_UNIX") as listener:
        for name in (*programs, _LAST):
            stand_in = Path(room, name)
            stand_in.write_text(_STAND_IN.format(python=sys.executable, address=listener.address))
            stand_in.chmod(0o700)
        environment = {**os.environ, "PATH": f"{room}{os.pathsep}{os.environ['PATH']}"}
        with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            process = subprocess.Popen(
                ["bash", "-eu", "-o", "pipefail", "-c", f"trap '{_LAST}' EXIT\n{script}"],
                **{"cwd": folder, "env": environment, "stdin": subprocess.DEVNULL, "stdout": out, "stderr": err},
            )
            while True:
                with listener.accept() as connection:
                    name, arguments, directory = connection.recv()
                    if name == _LAST:
                        connection.send((0, b"", b""))
                        break
                    with contextlib.chdir(directory):
                        connection.send(_run(name, arguments, programs[name]))
            status, printed = process.wait(), [file.seek(0) or file.read().decode() for file in (out, err)]
    return Outcome(status, *printed)


def _run(name: str, arguments: list[str], program: Program) -> tuple[int, bytes, bytes]:
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2)]
    status: int | str | None
    with contextlib.redirect_stdout(streams[0]), contextlib.redirect_stderr(streams[1]):
        try:
            status = program(arguments)
        except SystemExit as stopped:
            status = stopped.code
        if isinstance(status, str):
            print(status, file=sys.stderr)
            status = 1
    out, err = (stream.buffer.getvalue() for stream in streams)  # type: ignore[attr-defined]
    return status or 0, out, err
