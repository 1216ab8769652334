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

_INTERRUPTED = 128 + signal.SIGINT


def start(command: str, module: str) -> int | None:
    """Import a command and run it.

    Args:
        command: Its name.
        module: Where its `main` is, in this package.

    Returns:
        Its exit status, or None if it is done, as its `main` returns it.
    """
    hears = signal.getsignal(signal.SIGINT) is signal.default_int_handler  # else the shell has it ignored
    if hears:
        signal.signal(signal.SIGINT, partial(_end, command))
    try:
        main = importlib.import_module(f"midus_hf.cli.{module}").main
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


upscale = partial(start, "upscale", "upscale")
midus_train = partial(start, "midus-train", "train")
midus_sft = partial(start, "midus-sft", "sft")
midus_eval = partial(start, "midus-eval", "evaluate")
midus_usage = partial(start, "midus-usage", "look.usage")
midus_chapters = partial(start, "midus-chapters", "look.chapters")
midus_depth = partial(start, "midus-depth", "look.depth")
midus_flops = partial(start, "midus-flops", "flops")
midus_bank = partial(start, "midus-bank", "banks")
midus_cluster = partial(start, "midus-cluster", "clusters")
midus_compare = partial(start, "midus-compare", "compare")
midus_analyze = partial(start, "midus-analyze", "look.analyze")
midus_reproduce = partial(start, "midus-reproduce", "reproduce")
