"""Memory that this process can still allocate."""

import contextlib
import os
import resource
from pathlib import Path


def available_bytes(root: Path = Path("/")) -> int:
    """Return the bytes of memory that this process can still take.

    This is the machine's available memory, or less where the container's limit or the limit on the process's address
    space leaves less.

    Args:
        root: Folder that holds the kernel's `proc` and `sys`. Default: `/`.
    """
    available = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    with contextlib.suppress(OSError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
    with contextlib.suppress(OSError, ValueError, KeyError):  # "max" where the container has no limit
        group = root / "sys/fs/cgroup"
        limit, used = (int((group / name).read_text()) for name in ("memory.max", "memory.current"))
        of_files = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())["inactive_file"]
        available = min(available, max(0, limit - used + int(of_files)))  # the kernel frees these pages on demand
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        with contextlib.suppress(OSError):
            taken = int((root / "proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
            available = min(available, max(0, limit - taken))
    return available
