"""The entry points of `upscale` and `midus`, which import only the called command."""

import functools
import importlib
import signal
import sys
from collections.abc import Callable, Sequence

# The commands of `midus`, in the order of its help, and the module of each in this package.
COMMANDS = {
    "train": "train",
    "sft": "sft",
    "eval": "evaluate",
    "ask": "ask",
    "compare": "compare",
    "look": "look",
    "edit": "edit",
    "cluster": "clusters",
    "flops": "flops",
}


def midus() -> int:
    """Run a command of `midus`, and return its exit status."""
    arguments = sys.argv[1:]
    if arguments and arguments[0] in COMMANDS:
        return start(f"midus {arguments[0]}", COMMANDS[arguments[0]], arguments[1:])
    return start("midus", "midus", arguments)


def start(command: str, module: str, arguments: Sequence[str] | None = None) -> int:
    """Import a command's module, run its `main`, by default on `sys.argv`, and return the exit status."""
    try:
        main: Callable[[Sequence[str] | None], int] = importlib.import_module(f"midus_hf.cli.{module}").main
        return main(arguments)
    except KeyboardInterrupt:  # before `run_command` catches it, or after
        print(f"{command}: interrupted", file=sys.stderr)
        return 128 + signal.SIGINT


upscale = functools.partial(start, "upscale", "upscale")
