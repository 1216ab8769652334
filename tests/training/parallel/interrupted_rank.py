"""Run a script in one of several processes, or `all`, that hears SIGINT when it would update parameters for a given time:

interrupted_rank.py RANK STEP SCRIPT [WORD ...]
"""

import os
import runpy
import signal
import sys
from typing import Any

from torch.optim.optimizer import register_optimizer_step_pre_hook

rank, step = sys.argv[1:3]
left = iter(range(int(step) - 1, -1, -1))


def interrupt(*_: Any) -> None:
    if next(left, -1) == 0:
        signal.raise_signal(signal.SIGINT)


if rank in ("all", os.environ["RANK"]):
    register_optimizer_step_pre_hook(interrupt)
sys.argv = sys.argv[3:]
runpy.run_path(sys.argv[0], run_name="__main__")
