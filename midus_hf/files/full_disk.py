"""What is said where a disk does not take what is written: what it was, why, and the room that is left."""

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from midus_hf.config.wording import first_line

# Numbers of errors with which a disk does not take what is written, and what torch says in their place.
_OF_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS}
_TORCH_CANNOT_WRITE = re.compile("PytorchStreamWriter failed|unexpected pos|iostream error")


class NotWritten(OSError):
    """Error of a disk that does not take what is written.

    Args:
        facts: What could not be written and why, and the room that there is.
        remedy: What to do. Default: to make room, and to run the command again.
    """

    def __init__(self, facts: str, remedy: str = "Make room there, and run the command again."):
        super().__init__(f"{facts}. {remedy}")
        self.facts = facts


def _reason_of_disk(error: BaseException) -> str | None:
    """Return why a disk did not take what Python, safetensors or torch wrote; None for any other error."""
    if type(error).__module__.startswith(("midus_hf.", "upscalers.")):  # which has been told of one
        return None
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (said := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(said[1])
    if number in _OF_DISK:
        return os.strerror(number)
    is_of_torch = isinstance(error, RuntimeError) and _TORCH_CANNOT_WRITE.search(str(error))
    return f"torch says '{first_line(error)}'" if is_of_torch else None


def not_written(error: BaseException, path: Path | None = None, needed: int | None = None) -> NotWritten | None:
    """Return the error about what a disk did not take, or None for an error of another kind.

    Args:
        error: What was raised.
        path: What was being written. Default: not known, so that the room of all disks that a command writes to is said.
        needed: About how many bytes it needs. Default: not known.
    """
    if isinstance(error, NotWritten):
        return error
    reason = _reason_of_disk(error)
    if reason is None:
        return None
    caches = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    places = (
        [path, Path(tempfile.gettempdir())] if path is not None else [Path.cwd(), Path(tempfile.gettempdir()), caches]
    )
    disks: dict[int, Path] = {}
    for place in map(Path.absolute, places):
        folder = next(each for each in (place, *place.parents) if each.is_dir())
        disks.setdefault(folder.stat().st_dev, folder)
    room = ", ".join(f"{folder} has {_megabytes(shutil.disk_usage(folder).free)} free" for folder in disks.values())
    lacks_room = needed is not None and shutil.disk_usage(next(iter(disks.values()))).free < needed
    if lacks_room:  # which torch does not tell
        reason = os.strerror(errno.ENOSPC)
    about = "" if needed is None else f"it needs about {_megabytes(needed)}, and "
    return NotWritten(f"{'a file' if path is None else path} could not be written: {reason} ({about}{room})")


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


@contextlib.contextmanager
def telling_room(path: Path, needed: int | None = None) -> Iterator[None]:
    """Raise `NotWritten` where a disk does not take what the block writes to a path, which needs about so many bytes."""
    try:
        yield
    except Exception as error:
        told = not_written(error, path, needed)
        if told is None or told is error:
            raise
        raise told from error
