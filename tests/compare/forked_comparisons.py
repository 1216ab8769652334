"""Comparisons whose processes are all forked from this one, which has imported what they need: fresh interpreters take 5 s each.

A request is a line of JSON on standard input: the words of `midus compare`. Its answers are two lines on standard output: the id of
its process, and, when that has ended, its exit status. All its processes note their ids in the file that is this program's argument.
Each is told of its parent, hears signals and ends as one of a fresh interpreter does; what it is called in a list of processes is all
that differs.
"""

import contextlib
import gc
import importlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from commands.installed import main_of
from processes.forks import end_with
from processes.server import import_libraries

NOTED = Path(sys.argv[1])
FROM_HERE = ("midus_hf.compare.run_process", "midus_hf.compare.commands")


def note() -> None:
    with NOTED.open("a") as noted:
        print(os.getpid(), file=noted)


def run_module(words: list[str]) -> Any:
    """What `python -m` runs."""
    _, _, module, *arguments = words
    if module == "midus_hf.compare.run_process":
        from midus_hf.compare.run_process import main

        return main(Path(arguments[0]))
    from midus_hf.compare.commands import ask_for_termination

    ask_for_termination(int(arguments[0]))
    words = arguments[4:]  # behind the interpreter, -m and midus_hf
    sys.argv = words if words[0] == "upscale" else ["midus", *words]
    # What replaces a process that hears signals does not hear them.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL if number == signal.SIGTERM else signal.default_int_handler)
    return main_of(sys.argv[0])()


class Forked(subprocess.Popen):
    """Forks in place of starting an interpreter."""

    def _execute_child(self, args: Any, *rest: Any) -> None:
        if args[1:2] != ["-m"] or args[2] not in FROM_HERE:  # a compiler, say
            return super()._execute_child(args, *rest)  # type: ignore[misc]
        pass_fds, env, start_new_session = rest[3], rest[5], rest[20]
        streams = (rest[9], rest[12], rest[14])
        sys.stdout.flush()
        self.pid = os.fork()
        if self.pid == 0:
            note()
            if start_new_session:
                os.setsid()
            for number, given in enumerate(streams):
                if given != -1:
                    os.dup2(given, number)
            for number in range(3, 256):
                if number not in pass_fds:
                    with contextlib.suppress(OSError):
                        os.close(number)
            if env is not None:
                os.environ.clear()
                os.environ.update(env)
            end_with(run_module, list(map(str, args)))
        self._child_created = True
        self._close_pipe_fds(*rest[9:15])


def compare(words: list[str]) -> int:
    """Run `midus compare` with the streams of this process closed to it."""
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(os.open(f"{NOTED}.said", os.O_WRONLY | os.O_APPEND | os.O_CREAT), 1)
    os.dup2(1, 2)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv = ["midus", "compare", *words]
    return main_of("midus")()


def main() -> None:
    """Import what all of them need, and serve."""
    import_libraries()
    for command in ("midus compare", "midus eval", "midus train", "upscale"):
        main_of(command)
    for name in ("training.run", "evaluation.evaluate", "models.families"):
        importlib.import_module(f"midus_hf.{name}")
    for name in (
        "upscalers.runs.upscale",
        "upscalers.edits.shuffling",
        "midus_hf.compare.running",
        "midus_hf.compare.measuring",
    ):
        importlib.import_module(name)
    sys.modules["midus_hf.compare.running"].subprocess.Popen = Forked
    os.fsync = lambda file: None
    gc.collect()
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        identifier = os.fork()
        if identifier == 0:
            note()
            end_with(compare, json.loads(line))
        print(identifier, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(identifier, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
