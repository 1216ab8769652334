"""`python -m midus_hf.compare.dies_with_parent COMMAND...`: a command that is terminated when the process that started it ends.

A comparison that is killed leaves no run behind that goes on alone, where the next one would meet it. Linux alone can do this;
elsewhere the command just runs.
"""

import ctypes
import os
import signal
import sys

_SET_PARENT_DEATH_SIGNAL = 1


def ask_for_termination(parent: int) -> None:
    """Let the system send SIGTERM to this process when its parent ends.

    Args:
        parent: Its number; if it has ended already, this process ends at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PARENT_DEATH_SIGNAL, signal.SIGTERM)
        if os.getppid() != parent:
            sys.exit(128 + signal.SIGTERM)


if __name__ == "__main__":
    ask_for_termination(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
