"""Run a script in one of several processes on CPUs whose parameters accelerate shards, which it does on accelerators alone:

    sharding_rank.py SCRIPT [WORD ...]

What it takes CPUs for is changed, where it chooses; all that follows is its own: FSDP2 over gloo.
"""

import runpy
import sys

from accelerate.state import PartialState
from accelerate.utils import DistributedType

initialise = PartialState.__init__


def as_accelerators(self: PartialState, *args, **kwargs) -> None:
    initialise(self, *args, **kwargs)
    if self.distributed_type is DistributedType.MULTI_CPU:
        PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU


PartialState.__init__ = as_accelerators
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
