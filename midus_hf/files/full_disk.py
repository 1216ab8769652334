"""The error of a full disk: the file that could not be written, the reason, and the free space."""

import contextlib
import errno
import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from midus_hf.config.wording import first_line

# Numbers of errors of a full disk, and the messages of torch for them.
_OF_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS}
_TORCH_CANNOT_WRITE = re.compile("PytorchStreamWriter failed|unexpected pos|iostream error")


class NotWritten(OSError):
    """Error of a write that failed because of the disk.

    Args:
        facts: The file that could not be written, the reason, and the free space.
        remedy: What to do. Default: free some space, and run the command again.
    """

    def __init__(self, facts: str, remedy: str = "Free some space there, and run the command again."):
        super().__init__(f"{facts}. {remedy}")
        self.facts = facts


def _reason_of_disk(error: BaseException) -> str | None:
    """Return why the disk refused a write by Python, safetensors or torch; None for any other error."""
    if type(error).__module__.startswith(("midus_hf.", "upscalers.")):  # which is already such an error
        return None
    number = error.errno if isinstance(error, OSError) else None
    if number is None and (said := re.search(r"\(os error (\d+)\)", str(error))):
        number = int(said[1])
    if number in _OF_DISK:
        return os.strerror(number)
    is_of_torch = isinstance(error, RuntimeError) and _TORCH_CANNOT_WRITE.search(str(error))
    return f"torch says '{first_line(error)}'" if is_of_torch else None


def not_written(error: BaseException, path: Path | None = None, needed: int | None = None) -> NotWritten | None:
    """Return the error about a failed write to disk, or None for an error of another kind.

    Args:
        error: The exception.
        path: The file that was being written. Default: unknown; the message has the free space of all disks that a command uses.
        needed: About how many bytes it needs. Default: unknown.
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
    if lacks_room:  # which torch does not report
        reason = os.strerror(errno.ENOSPC)
    about = "" if needed is None else f"it needs about {_megabytes(needed)}, and "
    return NotWritten(f"{'a file' if path is None else path} could not be written: {reason} ({about}{room})")


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


@contextlib.contextmanager
def telling_room(path: Path, needed: int | None = None) -> Iterator[None]:
    """Raise `NotWritten` if the block's writing to a path fails because of the disk; it needs about `needed` bytes."""
    try:
        yield
    except Exception as error:
        told = not_written(error, path, needed)
        if told is None or told is error:
            raise
        raise told from error
