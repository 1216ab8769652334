"""The entry points of the commands, which end in one line where they are interrupted before they read their words.

A command's own imports take up to a second, and an interruption among them would be a traceback. So this module imports nothing
that takes time.
"""

import importlib
import os
import signal
import sys
from functools import partial
from types import FrameType

MODULES = {
    "upscale": "upscale",
    "midus-train": "train",
    "midus-sft": "sft",
    "midus-eval": "evaluate",
    "midus-usage": "usage",
    "midus-chapters": "chapters",
    "midus-depth": "depth",
    "midus-flops": "flops",
    "midus-bank": "banks",
    "midus-cluster": "clusters",
    "midus-compare": "compare",
    "midus-analyze": "analyze",
    "midus-reproduce": "reproduce",
}
"""Where the `main` of each command is, in this package."""

_INTERRUPTED = 128 + signal.SIGINT


def start(command: str) -> int | None:
    """Import a command and run it.

    Args:
        command: Its name.

    Returns:
        Its exit status, or None if it is done, as its `main` returns it.
    """
    hears = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else the shell has it ignored
    if hears:
        signal.signal(signal.SIGINT, partial(_end, command))
    try:
        main = importlib.import_module(f"midus_commands.{MODULES[command]}").main
    finally:
        if hears:
            signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        return main()
    except KeyboardInterrupt:  # before the command line is read, or behind the work
        print(f"{command}: interrupted", file=sys.stderr)
        return _INTERRUPTED


def _end(command: str, number: int, frame: FrameType | None) -> None:
    """End the process where it is: nothing is under way, and an exception could get lost in what is imported."""
    os.write(sys.stderr.fileno(), f"{command}: interrupted\n".encode())
    os._exit(_INTERRUPTED)


upscale = partial(start, "upscale")
midus_train = partial(start, "midus-train")
midus_sft = partial(start, "midus-sft")
midus_eval = partial(start, "midus-eval")
midus_usage = partial(start, "midus-usage")
midus_chapters = partial(start, "midus-chapters")
midus_depth = partial(start, "midus-depth")
midus_flops = partial(start, "midus-flops")
midus_bank = partial(start, "midus-bank")
midus_cluster = partial(start, "midus-cluster")
midus_compare = partial(start, "midus-compare")
midus_analyze = partial(start, "midus-analyze")
midus_reproduce = partial(start, "midus-reproduce")
