"""Files that appear whole or not at all, whenever a process ends."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """Write a file beside its place, and move it there when it is complete and on the disk.

    Args:
        path: Of the file, in a folder that exists; one that is there is replaced.

    Yields:
        Where to write: the same folder, under the name `.NAME.partial`. After an error nothing is left there.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        yield partial
        with partial.open("rb") as written:
            os.fsync(written.fileno())
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
