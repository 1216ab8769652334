"""The entry points of `upscale` and `midus`, which end in one line where they are interrupted before they read their words.

A command's own imports take up to a second, and an interruption among them would be a traceback. So this module imports nothing
that takes time, and of the commands of `midus` the one that is called alone.
"""

import importlib
import os
import signal
import sys
from collections.abc import Callable, Sequence
from functools import partial
from types import FrameType

_INTERRUPTED = 128 + signal.SIGINT


COMMANDS = {
    "train": "train",
    "sft": "sft",
    "eval": "evaluate",
    "compare": "compare",
    "look": "look",
    "edit": "edit",
    "bank": "bank",
    "cluster": "clusters",
    "reproduce": "reproduce",
    "flops": "flops",
}
"""The commands of `midus`, in the order of its help, and the module of each in this package."""


def upscale() -> int:
    """Run `upscale`, and return its exit status."""
    return start("upscale", "upscale", sys.argv[1:])


def midus() -> int:
    """Run a command of `midus`, and return its exit status."""
    words = sys.argv[1:]
    if words and words[0] in COMMANDS:
        return start(f"midus {words[0]}", COMMANDS[words[0]], words[1:])
    return start("midus", "midus", words)


def start(command: str, module: str, words: Sequence[str]) -> int:
    """Import a command and run it.

    Args:
        command: Its name.
        module: Where its `main` is, in this package.
        words: What follows the name on the command line.

    Returns:
        Its exit status.
    """
    hears = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else the shell has it ignored
    if hears:
        signal.signal(signal.SIGINT, partial(_end, command))
    try:
        main: Callable[[Sequence[str]], int] = importlib.import_module(f"midus_hf.cli.{module}").main
    finally:
        if hears:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main(words)
    except KeyboardInterrupt:  # before the command line is read, or behind the work
        print(f"{command}: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _end(command: str, number: int, frame: FrameType | None) -> None:
    """End the process where it is: nothing is under way, and an exception could get lost in what is imported."""
    os.write(sys.stderr.fileno(), f"{command}: interrupted\n".encode())
    os._exit(_INTERRUPTED)
