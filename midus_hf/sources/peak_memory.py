"""The most memory that this process has had."""

import contextlib
import resource
import sys
from pathlib import Path


def peak_memory_bytes() -> int:
    """Return the largest resident memory of this process so far, in bytes, without that of its parent."""
    # On Linux, getrusage includes the memory of the parent process at the fork.
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
