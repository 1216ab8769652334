"""The cache folder, whose folders are always complete, even if processes are killed or run at the same time."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock


def cache_root() -> Path:
    """The folder that holds everything fetched: `$MIDUS_CACHE`, or `~/.cache/midus_hf`."""
    return Path(os.environ.get("MIDUS_CACHE") or Path.home() / ".cache" / "midus_hf")


def cached_folder(name: str, build: Callable[[Path], None]) -> Path:
    """Return the folder `name` of the cache, built first if it is not there.

    One process builds and the others wait. The folder is built under another name and renamed when it is complete;
    remains of a killed process are removed by the next.

    Args:
        name: Name of the folder. It states everything that its contents depend on, versions included.
        build: Fills the empty folder it is given.

    Returns:
        The complete folder.
    """
    folder = cache_root() / name
    if folder.is_dir():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_name(f"{name}.lock")):
        if not folder.is_dir():
            partial = folder.with_name(f"{name}.partial")
            shutil.rmtree(partial, ignore_errors=True)
            partial.mkdir()
            try:
                build(partial)
                partial.rename(folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
    return folder
