"""The entry points of `upscale` and `midus`, which end with one line if they are interrupted before they read their arguments.

The imports of a command take up to a second, and an interruption during these imports would print a traceback. So this module
imports nothing that takes time, and only that command of `midus` which is called.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

_INTERRUPTED = 128 + signal.SIGINT


# The commands of `midus`, in the order of its help, and the module of each in this package.
COMMANDS = {
    "train": "training.train",
    "sft": "training.sft",
    "eval": "evaluate",
    "compare": "compare",
    "look": "look",
    "edit": "edit",
    "bank": "bank",
    "cluster": "clusters",
    "flops": "flops",
}


def upscale() -> int:
    """Run `upscale`, and return its exit status."""
    return start("upscale", "upscale", sys.argv[1:])


def midus() -> int:
    """Run a command of `midus`, and return its exit status."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        return start(f"midus {arguments[0]}", COMMANDS[arguments[0]], arguments[1:])
    return start("midus", "midus", arguments)


def start(command: str, module: str, arguments: Sequence[str]) -> int:
    """Import the module of this package that holds the `main` of a command, run the command, and return its exit status."""
    interruptible = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # otherwise the shell ignores it
    if interruptible:
        signal.signal(signal.SIGINT, partial(_end, command))
    try:
        main: Callable[[Sequence[str]], int] = importlib.import_module(f"midus_hf.cli.{module}").main
    finally:
        if interruptible:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main(arguments)
    except KeyboardInterrupt:  # before `run_command` catches it, or after
        print(f"{command}: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _end(command: str, number: int, frame: FrameType | None) -> None:
    """End the process at once: no work has begun, and a module that is being imported could catch an exception."""
    os.write(sys.stderr.fileno(), f"{command}: interrupted\n".encode())
    os._exit(_INTERRUPTED)
