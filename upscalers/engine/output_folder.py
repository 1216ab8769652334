"""The output folder: built beside its place under another name, and moved there only when it is complete."""

import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from upscalers.engine.errors import RequestError
from upscalers.engine.progress import NoProgress, Progress

_CHECKPOINT_MARK = "config.json"


class OutputFolder:
    """A folder that appears whole or not at all, also when the process is killed.

    The work goes on in `.NAME.partial`. What a killed run left there is removed by the next run to the same output; a
    run that is still alive holds a lock on it. An output that is to be replaced is moved aside to `.NAME.replaced` for
    the moment between two renames, and moved back by the next run should the process be killed in that moment.

    Args:
        path: The output. A link stands for what it points to.
        base: The base folder, which must neither contain the output nor lie inside it; None if there is none.
        overwrite: Whether an existing checkpoint may be replaced.

    Raises:
        RequestError: If the output exists, lies inside the base or around it, cannot be written, or is being written by another run.
    """

    def __init__(self, path: Path, base: Path | None = None, overwrite: bool = False):
        self.path = Path(os.path.realpath(path))
        self.partial = self.path.parent / f".{self.path.name}.partial"
        self._replaced = self.path.parent / f".{self.path.name}.replaced"
        self._base = base
        self._overwrite = overwrite
        self._lock: int | None = None
        self._committed = False
        self._check()

    def _recover(self) -> None:
        if self._replaced.exists() and not self.path.exists():
            self._replaced.rename(self.path)

    def _check(self) -> None:
        if self._base is not None:
            base = Path(os.path.realpath(self._base))
            if self.path.is_relative_to(base):
                raise RequestError(f"output {self.path} lies inside the base {base}; expected a folder elsewhere.")
            if base.is_relative_to(self.path):
                raise RequestError(
                    f"output {self.path} holds the base {base}, which --overwrite would delete; expected a folder elsewhere."
                )
        if os.path.lexists(self.path):
            if not self._overwrite:
                raise RequestError(
                    f"output {self.path} exists; pass --overwrite to replace it, or choose another folder."
                )
            if not self.path.is_dir() or (any(self.path.iterdir()) and not (self.path / _CHECKPOINT_MARK).is_file()):
                raise RequestError(
                    f"output {self.path} is no checkpoint (it has no {_CHECKPOINT_MARK}), so --overwrite will not delete it. "
                    "Choose another folder."
                )
        ancestor = next(parent for parent in self.path.parents if parent.exists())
        if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
            raise RequestError(f"output {self.path} cannot be made: {ancestor} is not a writable folder.")

    def check_space(self, num_bytes: int) -> None:
        """Check that the disk has room for `num_bytes`.

        Raises:
            RequestError: If it has not.
        """
        ancestor = next(parent for parent in self.path.parents if parent.exists())
        free = shutil.disk_usage(ancestor).free
        if self.partial.exists():
            free += sum(file.stat().st_blocks * 512 for file in self.partial.rglob("*") if file.is_file())
        if free < num_bytes:
            raise RequestError(
                f"the output needs {num_bytes / 1e9:.2f} GB, but {ancestor} has {free / 1e9:.2f} GB free. Make room or "
                "choose another disk."
            )

    def __enter__(self) -> Path:
        self._take_lock()
        try:
            self._recover()
            self._check()  # again, now that no other run can change what it sees
            shutil.rmtree(self._replaced, ignore_errors=True)
            for left_over in self.partial.iterdir():
                shutil.rmtree(left_over) if left_over.is_dir() and not left_over.is_symlink() else left_over.unlink()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self.partial

    def _take_lock(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.partial.mkdir(exist_ok=True)
        lock = os.open(self.partial, os.O_RDONLY)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The run that held the lock may have moved this very folder to its place in the meantime.
            mine = os.path.samestat(os.fstat(lock), os.stat(self.partial))
        except OSError:
            mine = False
        if not mine:
            os.close(lock)
            raise RequestError(
                f"output {self.path} is being written by another run. Wait for it, or choose another folder."
            )
        self._lock = lock

    def commit(self, progress: Progress | None = None) -> None:
        """Force the folder's files to the disk and put it in its place.

        Args:
            progress: Told of every byte that is on the disk. Default: silent.
        """
        progress = progress or NoProgress()
        sizes = {file: file.stat().st_size for file in self.partial.rglob("*")}
        progress.stage("waiting for the disk", sum(sizes.values()), "bytes")
        for file, num_bytes in sizes.items():
            sync(file)
            progress.advance(num_bytes)
        sync(self.partial)
        if self.path.exists():
            shutil.rmtree(self._replaced, ignore_errors=True)
            self.path.rename(self._replaced)
        self.partial.rename(self.path)
        self._committed = True
        sync(self.path.parent)
        shutil.rmtree(self._replaced, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            shutil.rmtree(self.partial, ignore_errors=True)
            self._recover()
        if self._lock is not None:
            os.close(self._lock)


def sync(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
