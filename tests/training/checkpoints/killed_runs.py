"""A process of its own that starts runs of `midus train` and kills them, at points that it is told, with SIGKILL.

It imports everything once and computes nothing, so that each run is a child that begins at once. Its one argument is JSON:

    [{"words": ["recipe.yaml", ...], "output": "out", "kill": ["os.rename", "a/b", 1], "copy": "seen"}]

A point is what a run is about to do to a file of its output (an event of Python's audit hooks), and at the how manieth time; or
`["step", "", 3]`, when blocks have had their third update. `copy` is where the output as it
was left is kept. It prints how each run ended, as JSON: its exit status, or minus the signal that ended it.
"""

import json
import os
import shutil
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

import midus_hf.training.run  # noqa: F401 - so that each run begins at once
from midus_hf.banks import trained_bank
from midus_hf.cli.train import main


def die_at(kind: str, path: str, times: int, output: Path) -> None:
    """Let this process be killed at a point."""
    target, left = str(output / path), [times]

    def die_at_the_point(this_kind: str, this_place: Any) -> None:
        left[0] -= this_kind == kind and str(this_place) == target
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch(event: str, arguments: tuple) -> None:
        # Files are opened for reading too, which is no point.
        if event == kind and not (event == "open" and arguments[1] in ("r", "rb")):
            die_at_the_point(event, arguments[0])

    step = trained_bank.TrainedBank.step

    def stepped(*args: Any) -> None:
        step(*args)
        die_at_the_point("step", target)

    trained_bank.TrainedBank.step = stepped
    sys.addaudithook(watch)


def one_run(request: dict[str, Any]) -> int:
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)
    status = 1
    try:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        if request["kill"] is not None:
            die_at(*request["kill"], Path(request["output"]))
        status = main(request["words"])
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    torch.set_num_threads(1)
    endings = []
    for asked in json.loads(sys.argv[1]):
        endings.append(one_run(asked))
        if asked["copy"] is not None:
            shutil.copytree(asked["output"], asked["copy"])
    print(json.dumps(endings))
