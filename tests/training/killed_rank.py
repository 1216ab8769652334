"""Run a script in one of several processes, or `all`, which is killed with SIGKILL and not started again by torchrun:

    killed_rank.py RANK KIND POINT SCRIPT [WORD ...]

KIND and POINT are `step 3`, when it would update parameters for the third time; `interrupt 3`, when it hears SIGINT then; `save NAME`
or `open NAME`, when it would write a file whose path ends so, by `torch.save` or by Python; or `seconds 0.3`, so long after its first
update. It is not killed by `spoil 3`, but the loss of its third pass is infinite.
"""

import os
import runpy
import signal
import sys
import threading
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

rank, kind, point = sys.argv[1:4]
steps, save = 0, torch.save


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def step(*_: Any) -> None:
    global steps
    steps += 1
    if kind == "step" and steps == int(point):
        die()
    if kind == "interrupt" and steps == int(point):
        signal.raise_signal(signal.SIGINT)
    if kind == "seconds" and steps == 1:
        threading.Timer(float(point), die).start()


def watched_save(value: Any, path: Any, *args: Any, **kwargs: Any) -> None:
    if kind == "save" and str(path).endswith(point):
        die()
    save(value, path, *args, **kwargs)


def watch(event: str, arguments: tuple) -> None:
    if event == "open" and kind == "open" and str(arguments[0]).endswith(point) and arguments[1] not in ("r", "rb"):
        die()


if rank in ("all", os.environ["RANK"]) and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    register_optimizer_step_pre_hook(step)
    if kind == "spoil":
        from transformers import Trainer

        compute_loss, passes = Trainer.compute_loss, iter(range(1, 1000))
        Trainer.compute_loss = lambda *args, **kwargs: (
            compute_loss(*args, **kwargs) * (float("inf") if next(passes) == int(point) else 1.0)
        )
    torch.save = watched_save
    sys.addaudithook(watch)
sys.argv = sys.argv[4:]
runpy.run_path(sys.argv[0], run_name="__main__")
