"""The output folder: built beside its place under another name, and moved there only when it is complete."""

import contextlib
import fcntl
import os
import shutil
from pathlib import Path
from types import TracebackType

from upscalers.landing.ownership import check_replaceable, is_replaceable, listed
from upscalers.request.errors import RequestError
from upscalers.request.progress import Progress

MARK = ".written-by-upscale"
"""A file in folders that are half written or half deleted: the next run to the same output may remove them."""


class OutputFolder:
    """A folder that appears whole or not at all, also when the process is killed.

    The work goes on in `.NAME.partial`. What a killed run left there is removed by the next run to the same output; a
    run that is still alive holds a lock on it. An output that is to be replaced is moved aside to `.NAME.replaced` for
    the moment between two renames, and moved back by the next run should the process be killed in that moment. Folders
    of these names that no run left are a person's: they are refused and stay as they are.

    Args:
        path: The output. A link stands for what it points to.
        base: The base folder, which must neither contain the output nor lie inside it; None if there is none.
        overwrite: Whether an existing checkpoint may be replaced, if `check_replaceable` lets it pass.

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
        if not self._replaced.exists() or self.path.exists():
            return
        if (self._replaced / MARK).exists() or not any(self._replaced.iterdir()):
            _delete(self._replaced)  # a run was at it when it was killed, with the new output in its place
        else:
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
            check_replaceable(self.path)
        self._check_siblings()
        ancestor = next(parent for parent in self.path.parents if parent.exists())
        if not ancestor.is_dir() or not os.access(ancestor, os.W_OK):
            raise RequestError(f"output {self.path} cannot be made: {ancestor} is not a writable folder.")

    def _check_siblings(self) -> None:
        for sibling in (self.partial, self._replaced):
            if os.path.lexists(sibling) and not _is_left_over(sibling):
                raise RequestError(
                    f"{sibling} is in the way of output {self.path}: upscale works in folders of that name and deletes them, but "
                    f"no run of it left this one ({_described(sibling)}). Move it elsewhere, or choose another output."
                )

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
            _delete(self._replaced)
            _clear(self.partial)
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
        try:
            self._check_siblings()
            (self.partial / MARK).touch()
        except BaseException:
            with contextlib.suppress(OSError):
                self.partial.rmdir()  # goes only where it is empty
            os.close(lock)
            raise
        self._lock = lock

    def flush(self, progress: Progress) -> None:
        """Force what has been written so far to the disk; what is written afterwards is left to `commit`.

        Args:
            progress: Told of every byte that is on the disk.
        """
        sizes = {file: file.stat().st_size for file in self.partial.rglob("*")}
        progress.stage("waiting for the disk", sum(sizes.values()), "bytes")
        for file, num_bytes in sizes.items():
            sync(file)
            progress.advance(num_bytes)

    def commit(self) -> None:
        """Force the folder's files to the disk and put it in its place.

        Raises:
            RequestError: If what is at its place has become something that may not be replaced.
        """
        for file in self.partial.rglob("*"):
            sync(file)
        self._check()  # again, since the work may have taken hours
        (self.partial / MARK).unlink()
        sync(self.partial)
        if self.path.exists():
            _delete(self._replaced)
            self.path.rename(self._replaced)
        self.partial.rename(self.path)
        self._committed = True
        sync(self.path.parent)
        _delete(self._replaced)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            _delete(self.partial)
            self._recover()
        if self._lock is not None:
            os.close(self._lock)


def _is_left_over(folder: Path) -> bool:
    """Whether a run of ours left a folder behind: an empty one, one with the mark, or a whole checkpoint of ours."""
    if folder.is_symlink() or not folder.is_dir():
        return False
    try:
        return (folder / MARK).is_file() or is_replaceable(folder)
    except FileNotFoundError:
        return True  # the run that it belongs to is moving or deleting it


def _described(path: Path) -> str:
    if path.is_symlink() or not path.is_dir():
        return "a link" if path.is_symlink() else "a file"
    return listed(sorted(os.listdir(path)))


def _clear(folder: Path) -> None:
    for path in folder.iterdir():
        if path.name != MARK:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()


def _delete(folder: Path) -> None:
    """Delete a folder of ours, its mark last, so that one that is half deleted is still known as ours."""
    with contextlib.suppress(OSError):
        (folder / MARK).touch()
        _clear(folder)
        (folder / MARK).unlink()
        folder.rmdir()


def sync(path: Path) -> None:
    """Force a file or a folder's entries to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
