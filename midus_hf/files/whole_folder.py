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

from midus_hf.config.wording import first_few
from midus_hf.files.locks import Lock, lock_or_warn
from midus_hf.files.whole_files import new_unfinished_path, sync, unfinished_paths

_FILE_TOO_LARGE = frozenset({errno.EFBIG, errno.EINVAL, errno.ENOSPC})
"""What file systems say; the last is said by those that have no holes."""


@dataclass(frozen=True)
class Replacing:
    """What may take the place of what, and in whose words it is refused.

    Args:
        by: Who writes the folder, as messages call it.
        check: Raises `ValueError` if something of a person's would be lost with a folder.
        error: What is raised for people. Default: `ValueError`.
    """

    by: str
    check: Callable[[Path], None]
    error: type[ValueError] = ValueError

    @property
    def mark(self) -> str:
        """The file in the folder that a run works in: by it the next run to the same place knows that the folder may be removed."""
        return f".written-by-{self.by}"


class _HeldByAnotherRun(Exception):
    """Another run works in the folder."""


class WholeFolder:
    """A folder that appears whole or not at all, also when the process is killed.

    All work goes on in `.NAME.partial`, a folder that has a file of ours, the mark, from its first moment to its last. The output is
    made in it as `output`. An output that is to be replaced is moved into it, as `replaced`, for the moment between two renames, and
    moved back by the next run should the process be killed in that moment. Whatever else a killed run left there is removed
    by the next run to the same output; a run that is still alive holds a lock on it. A folder of that name that has no mark is a
    person's: it is refused and stays as it is.

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
        self._workplace = self.path.parent / f".{self.path.name}.partial"
        self.partial = self._workplace / "output"
        self._replaced = self._workplace / "replaced"
        self._replacing = replacing
        self._overwrite = overwrite
        self._lock: Lock | None = None
        self._committed = False
        self._check()

    def _recover(self) -> None:
        """Put an output back that a run moved aside without putting another one in its place."""
        if self._replaced.exists() and not os.path.lexists(self.path):
            self._replaced.rename(self.path)

    def _check(self) -> None:
        error = self._replacing.error
        if os.path.lexists(self.path):
            if not self._overwrite:
                raise error(f"output {self.path} exists; pass --overwrite to replace it, or choose another folder.")
            try:
                self._replacing.check(self.path)
            except ValueError as refusal:
                raise error(str(refusal)) from None
        self._check_workplace()
        if not self.disk.is_dir() or not os.access(self.disk, os.W_OK):
            raise error(f"output {self.path} cannot be made: {self.disk} is not a writable folder.")

    def _check_workplace(self) -> None:
        if os.path.lexists(self._workplace) and not self._is_ours(self._workplace):
            by = self._replacing.by
            raise self._replacing.error(
                f"{self._workplace} is in the way of output {self.path}: {by} works in a folder of that name and deletes it, but "
                f"no run of it left this one ({_described(self._workplace)}). Move it elsewhere, or choose another output."
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
            raise self._replacing.error(
                f"output {self.path} is being written by another run. Wait for it, or choose another folder."
            ) from None
        except BaseException:
            self._release()
            raise

    def _make_workplace(self) -> None:
        """Make the folder that the work goes on in, which has its mark when it gets its name."""
        made = new_unfinished_path(self.path)
        made.mkdir()
        try:
            (made / self._replacing.mark).touch()
            made.rename(self._workplace)
        except FileNotFoundError:
            raise _HeldByAnotherRun from None  # a run that has the lock by now has cleared it away
        except OSError:
            shutil.rmtree(made, ignore_errors=True)
            if not os.path.lexists(self._workplace):
                raise

    def _locked(self) -> Lock | None:
        """The lock on the folder that the work goes on in; None, and a line that says so, where the file system has none."""
        try:
            lock = lock_or_warn(self._workplace, self.path)
        except (BlockingIOError, FileNotFoundError):
            raise _HeldByAnotherRun from None
        if lock is None:
            return None
        # The run that held it may have removed this very folder in the meantime.
        if not lock.is_on(self._workplace):
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
        for file in (*self.partial.rglob("*"), self.partial):
            sync(file)
        self._check()  # again, since the work may have taken hours
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
        return folder.is_dir() and not folder.is_symlink() and (folder / self._replacing.mark).is_file()

    def _clear_workplace(self) -> None:
        """Delete all but the mark; what was replaced first loses the name by which the next run would take it for whole."""
        deleted = self._workplace / "deleted"
        for path in self._workplace.iterdir():
            if path not in (self._workplace / self._replacing.mark, self._replaced):
                shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        if self._replaced.exists():
            self._replaced.rename(deleted)
            shutil.rmtree(deleted)

    def _remove_workplace(self) -> None:
        """Delete the folder that the work went on in, which goes by a name of ours alone once it has no mark."""
        with contextlib.suppress(OSError):
            self._clear_workplace()
            empty = new_unfinished_path(self.path)
            self._workplace.rename(empty)
            shutil.rmtree(empty)


def _described(path: Path) -> str:
    if path.is_symlink() or not path.is_dir():
        return "a link" if path.is_symlink() else "a file"
    return first_few(sorted(os.listdir(path))) or "an empty folder"
