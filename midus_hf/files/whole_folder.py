"""A folder that appears complete or not at all: it is built under another name and moved to its path when complete."""

import contextlib
import errno
import os
import shutil
import tempfile
from pathlib import Path
from types import TracebackType

from midus_hf.config.wording import first_few
from midus_hf.files.locks import Lock, lock_or_warn
from midus_hf.files.ownership import check_replaceable
from midus_hf.files.whole_files import new_unfinished_path, sync, unfinished_paths

# Errors of file systems for files that are too large; `ENOSPC` comes from file systems without holes.
_FILE_TOO_LARGE = frozenset({errno.EFBIG, errno.EINVAL, errno.ENOSPC})

# Name of the file that marks a run's working folder, so that the next run with the same output may remove the folder.
MARK = ".written-by-upscale"


class _HeldByAnotherRun(Exception):
    """Signal that another run is working in the folder."""


class WholeFolder:
    """Folder that appears complete or not at all, even if the process is killed.

    A run works in the folder `.NAME.partial`, which contains a mark of this package from its creation to its removal.
    The output is built inside it as `output`. An existing output that is replaced is moved into it as `replaced`, for
    the moment between two renames; if the process is killed in that moment, the next run moves it back. The next run
    with the same output also removes everything else that a killed run left in the folder. A running process holds a
    lock on the folder. A folder `.NAME.partial` without the mark belongs to a person: it is left unchanged, and the run
    is refused.

    If the file system has no locks, the run continues, and a line on standard error warns that nothing guards the
    folder.

    Args:
        path: The output. A link is followed.
        overwrite: Whether an existing folder may be replaced if `check_replaceable` accepts it. Default: false.

    Raises:
        ValueError: If the output exists and may not be replaced, cannot be written, or is being written by another run.
            The type of the error is the attribute `error`.
    """

    error: type[ValueError] = ValueError

    def __init__(self, path: Path, overwrite: bool = False):
        self.path = Path(os.path.realpath(path))
        self._workplace = self.path.parent / f".{self.path.name}.partial"
        self.partial = self._workplace / "output"
        self._replaced = self._workplace / "replaced"
        self._overwrite = overwrite
        self._lock: Lock | None = None
        self._committed = False
        self._check()

    def _recover(self) -> None:
        """Move a replaced output back if no new output was put at its path."""
        if self._replaced.exists() and not os.path.lexists(self.path):
            self._replaced.rename(self.path)

    def _check(self) -> None:
        if os.path.lexists(self.path):
            if not self._overwrite:
                raise self.error(
                    f"output {self.path} exists; pass --overwrite to replace it, or choose another folder."
                )
            try:
                check_replaceable(self.path)
            except ValueError as refusal:
                raise self.error(str(refusal)) from None
        self._check_workplace()
        if not self.disk.is_dir() or not os.access(self.disk, os.W_OK):
            raise self.error(f"output {self.path} cannot be made: {self.disk} is not a writable folder.")

    def _check_workplace(self) -> None:
        if os.path.lexists(self._workplace) and not self._is_ours(self._workplace):
            raise self.error(
                f"{self._workplace} is in the way of output {self.path}: upscale works in a folder of that name and deletes it, but "
                f"no run of it left this one ({_described(self._workplace)}). Move it elsewhere, or choose another output."
            )

    def check_space(self, num_bytes: int) -> None:
        """Raise an error if the disk has less room than `num_bytes` bytes."""
        free = self.free_bytes()
        if free < num_bytes:
            raise self.error(
                f"the output needs {num_bytes / 1e9:.2f} GB, but {self.disk} has {free / 1e9:.2f} GB free. Make room or "
                "choose another disk."
            )

    @property
    def disk(self) -> Path:
        """The nearest existing folder above the output."""
        return next(parent for parent in self.path.parents if parent.exists())

    def free_bytes(self) -> int:
        """Return the free bytes of the output's disk plus the bytes of a killed run's output, which is removed first."""
        free = shutil.disk_usage(self.disk).free
        if self.partial.exists():
            free += sum(file.stat().st_blocks * 512 for file in self.partial.rglob("*") if file.is_file())
        return free

    def can_hold_file(self, num_bytes: int) -> bool:
        """Return whether the file system accepts a file of this size, tested with an unnamed file that is a single hole."""
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
            self._check()  # checked in the constructor too, but only now can no other run interfere
            self._clear_workplace()
            for folder in unfinished_paths(self.path):
                if folder.is_dir() and not folder.is_symlink():
                    shutil.rmtree(folder, ignore_errors=True)
            self.partial.mkdir()
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self.partial

    def _take_lock(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        try:
            if not os.path.lexists(self._workplace):
                self._make_workplace()
            self._lock = self._locked()
            self._check_workplace()
        except _HeldByAnotherRun:
            raise self.error(
                f"output {self.path} is being written by another run. Wait for it, or choose another folder."
            ) from None
        except BaseException:
            self._release()
            raise

    def _make_workplace(self) -> None:
        """Create the working folder. It gets its name only after its mark, so it never exists without the mark."""
        new_folder = new_unfinished_path(self.path)
        new_folder.mkdir()
        try:
            (new_folder / MARK).touch()
            new_folder.rename(self._workplace)
        except FileNotFoundError:
            raise _HeldByAnotherRun from None  # a run that now has the lock has removed the unfinished folder
        except OSError:
            shutil.rmtree(new_folder, ignore_errors=True)
            if not os.path.lexists(self._workplace):
                raise

    def _locked(self) -> Lock | None:
        """Lock the working folder, and return the lock; without locks in the file system, warn and return None."""
        try:
            lock = lock_or_warn(self._workplace, self.path)
        except (BlockingIOError, FileNotFoundError):
            raise _HeldByAnotherRun from None
        if lock is None:
            return None
        # The run that held the lock before may have removed this very folder in the meantime.
        if not lock.is_on(self._workplace):
            lock.release()
            raise _HeldByAnotherRun
        return lock

    def _release(self) -> None:
        if self._lock is not None:
            self._lock.release()

    def commit(self) -> None:
        """Flush the folder's files to the disk and move the folder to its path, unless a person's files have appeared there."""
        for file in (*self.partial.rglob("*"), self.partial):
            sync(file)
        self._check()  # once more, since the work may have taken hours
        if self.path.exists():
            self.path.rename(self._replaced)
        self.partial.rename(self.path)
        self._committed = True
        sync(self.path.parent)
        self._remove_workplace()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._committed:
            self._recover()
            self._remove_workplace()
        self._release()

    def _is_ours(self, folder: Path) -> bool:
        return folder.is_dir() and not folder.is_symlink() and (folder / MARK).is_file()

    def _clear_workplace(self) -> None:
        """Delete everything in the working folder except the mark.

        A replaced output is renamed before it is deleted, so that the next run cannot take the partly deleted rest for
        a complete output.
        """
        deleted = self._workplace / "deleted"
        for path in self._workplace.iterdir():
            if path not in (self._workplace / MARK, self._replaced):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if self._replaced.exists():
            self._replaced.rename(deleted)
            shutil.rmtree(deleted)

    def _remove_workplace(self) -> None:
        """Delete the working folder. It is renamed first, since without its mark it must not keep its name."""
        with contextlib.suppress(OSError):
            self._clear_workplace()
            empty = new_unfinished_path(self.path)
            self._workplace.rename(empty)
            shutil.rmtree(empty)


def _described(path: Path) -> str:
    if path.is_symlink() or not path.is_dir():
        return "a link" if path.is_symlink() else "a file"
    return first_few(sorted(os.listdir(path))) or "an empty folder"
