"""A folder that appears whole: built beside its place under another name, and moved there only when it is complete."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from midus_config.locks import Lock, lock_or_warn
from midus_config.whole_files import sync
from midus_config.wording import first_few

_FILE_TOO_LARGE = frozenset({errno.EFBIG, errno.EINVAL, errno.ENOSPC})
"""What file systems say; the last is said by those that have no holes."""


@dataclass(frozen=True)
class Replacing:
    """What may take the place of what, and in whose words it is refused.

    Args:
        by: Who writes the folder, as messages call it.
        check: Raises `error` if something of a person's would be lost with a folder.
        error: What is raised for people. Default: `ValueError`.
    """

    by: str
    check: Callable[[Path], None]
    error: type[ValueError] = ValueError

    @property
    def mark(self) -> str:
        """A file in folders that are half written or half deleted: the next run to the same place may remove them."""
        return f".written-by-{self.by}"

    def allows(self, folder: Path) -> bool:
        """Whether `check` lets a folder pass."""
        try:
            self.check(folder)
        except self.error:
            return False
        return True


class _HeldByAnotherRun(Exception):
    """Another run works in the folder."""


class WholeFolder:
    """A folder that appears whole or not at all, also when the process is killed.

    The work goes on in `.NAME.partial`. What a killed run left there is removed by the next run to the same output; a
    run that is still alive holds a lock on it. An output that is to be replaced is moved aside to `.NAME.replaced` for
    the moment between two renames, and moved back by the next run should the process be killed in that moment. Folders
    of these names that no run left are a person's: they are refused and stay as they are.

    Where the file system has no locks the work goes on, and a line on standard error says that nothing guards the folder.

    Args:
        path: The output. A link stands for what it points to.
        replacing: What it may take the place of.
        overwrite: Whether an existing folder may be replaced, if `replacing` lets it pass.

    Raises:
        ValueError: If the output exists, cannot be written, or is being written by another run: as `replacing` says.
    """

    def __init__(self, path: Path, replacing: Replacing, overwrite: bool = False):
        self.path = Path(os.path.realpath(path))
        self.partial = self.path.parent / f".{self.path.name}.partial"
        self._replaced = self.path.parent / f".{self.path.name}.replaced"
        self._replacing = replacing
        self._overwrite = overwrite
        self._lock: Lock | None = None
        self._committed = False
        self._check()

    def _recover(self) -> None:
        if not self._replaced.exists() or self.path.exists():
            return
        if (self._replaced / self._replacing.mark).exists() or not any(self._replaced.iterdir()):
            self._delete(self._replaced)  # a run was at it when it was killed, with the new output in its place
        else:
            self._replaced.rename(self.path)

    def _check(self) -> None:
        error = self._replacing.error
        if os.path.lexists(self.path):
            if not self._overwrite:
                raise error(f"output {self.path} exists; pass --overwrite to replace it, or choose another folder.")
            self._replacing.check(self.path)
        self._check_siblings()
        if not self.disk.is_dir() or not os.access(self.disk, os.W_OK):
            raise error(f"output {self.path} cannot be made: {self.disk} is not a writable folder.")

    def _check_siblings(self) -> None:
        for sibling in (self.partial, self._replaced):
            if os.path.lexists(sibling) and not self._is_left_over(sibling):
                by = self._replacing.by
                raise self._replacing.error(
                    f"{sibling} is in the way of output {self.path}: {by} works in folders of that name and deletes them, but "
                    f"no run of it left this one ({_described(sibling)}). Move it elsewhere, or choose another output."
                )

    def check_space(self, num_bytes: int) -> None:
        """Check that the disk has room for `num_bytes`.

        Raises:
            ValueError: If it has not.
        """
        free = self.free_bytes()
        if free < num_bytes:
            raise self._replacing.error(
                f"the output needs {num_bytes / 1e9:.2f} GB, but {self.disk} has {free / 1e9:.2f} GB free. Make room or "
                "choose another disk."
            )

    @property
    def disk(self) -> Path:
        """The nearest folder around the output that there is."""
        return next(parent for parent in self.path.parents if parent.exists())

    def free_bytes(self) -> int:
        """Room on the disk for the output, what a killed run left of it included."""
        free = shutil.disk_usage(self.disk).free
        if self.partial.exists():
            free += sum(file.stat().st_blocks * 512 for file in self.partial.rglob("*") if file.is_file())
        return free

    def can_hold_file(self, num_bytes: int) -> bool:
        """Whether the file system takes a file of that size that is one hole; tried with a file that has no name."""
        try:
            with tempfile.TemporaryFile(dir=self.disk) as file:
                file.truncate(num_bytes)
        except OverflowError:
            return False
        except OSError as error:
            if error.errno not in _FILE_TOO_LARGE:
                raise
            return False
        return True

    def __enter__(self) -> Path:
        self._take_lock()
        try:
            self._recover()
            self._check()  # again, now that no other run can change what it sees
            self._delete(self._replaced)
            self._clear(self.partial)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self.partial

    def _take_lock(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.partial.mkdir(exist_ok=True)
        try:
            self._lock = self._locked()
            self._check_siblings()
            (self.partial / self._replacing.mark).touch()
        except _HeldByAnotherRun:
            raise self._replacing.error(
                f"output {self.path} is being written by another run. Wait for it, or choose another folder."
            ) from None
        except BaseException:
            with contextlib.suppress(OSError):
                self.partial.rmdir()  # goes only where it is empty
            self._release()
            raise

    def _locked(self) -> Lock | None:
        """The lock on the folder that the work goes on in; None, and a line that says so, where the file system has none."""
        try:
            lock = lock_or_warn(self.partial, self.path)
        except (BlockingIOError, FileNotFoundError):
            raise _HeldByAnotherRun from None
        if lock is None:
            return None
        # The run that held it may have moved this very folder to its place in the meantime.
        if not lock.is_on(self.partial):
            lock.release()
            raise _HeldByAnotherRun
        return lock

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def commit(self) -> None:
        """Force the folder's files to the disk and put it in its place.

        Raises:
            ValueError: If what is at its place has become something that may not be replaced.
        """
        for file in self.partial.rglob("*"):
            sync(file)
        self._check()  # again, since the work may have taken hours
        (self.partial / self._replacing.mark).unlink()
        sync(self.partial)
        if self.path.exists():
            self._delete(self._replaced)
            self.path.rename(self._replaced)
        self.partial.rename(self.path)
        self._committed = True
        sync(self.path.parent)
        self._delete(self._replaced)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            self._delete(self.partial)
            self._recover()
        self._release()

    def _is_left_over(self, folder: Path) -> bool:
        """Whether a run of ours left a folder behind: an empty one, one with the mark, or one that may be replaced."""
        if folder.is_symlink() or not folder.is_dir():
            return False
        try:
            return (folder / self._replacing.mark).is_file() or self._replacing.allows(folder)
        except FileNotFoundError:
            return True  # the run that it belongs to is moving or deleting it

    def _clear(self, folder: Path) -> None:
        for path in folder.iterdir():
            if path.name != self._replacing.mark:
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()

    def _delete(self, folder: Path) -> None:
        """Delete a folder of ours, its mark last, so that one that is half deleted is still known as ours."""
        mark = folder / self._replacing.mark
        with contextlib.suppress(OSError):
            mark.touch()
            self._clear(folder)
            mark.unlink()
            folder.rmdir()


def _described(path: Path) -> str:
    if path.is_symlink() or not path.is_dir():
        return "a link" if path.is_symlink() else "a file"
    return first_few(sorted(os.listdir(path)))
