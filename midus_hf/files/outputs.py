"""Atomic output, written under a hidden name and renamed at the end; and the error of a full disk."""

import contextlib
import errno
import fcntl
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import RECORD_KEY, has_record
from midus_hf.config.errors import RequestError, first_few, first_line
from midus_hf.files.checkpoint_files import (
    CONFIG_FILE,
    OF_UPSCALED,
    RECORD_FILE,
    Kind,
    indexed_weights,
    is_of,
    named_code,
    parse_json,
)

STRIPPED_KEY = "stripped"  # entry of a record that says that the new parts were removed


def unfinished_path(path: Path, state: str = "partial") -> Path:
    """Return the path next to `path` for its unfinished or replaced content."""
    return path.with_name(f".{path.name}.midus-{state}")


@contextlib.contextmanager
def _locked(path: Path, refusal: RequestError) -> Iterator[bool]:
    """Lock a path, or raise `refusal` if it is locked; yield whether the file system has locks."""
    descriptor = os.open(path, os.O_RDONLY)
    has_locks = True
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise refusal from None
    except OSError:
        has_locks = False
    try:
        yield has_locks
    finally:
        if has_locks:
            fcntl.flock(descriptor, fcntl.LOCK_UN)  # forked processes have the descriptor too
        os.close(descriptor)


@contextlib.contextmanager
def exclusive(folder: Path, refusal: RequestError) -> Iterator[None]:
    """Create and lock a folder, or raise `refusal` if another run has; warn without locks."""
    folder.mkdir(parents=True, exist_ok=True)
    with _locked(folder, refusal) as has_locks:
        if not has_locks:
            print(
                f"{folder} is not locked: its file system has no locks. Do not let another run write to it.",
                file=sys.stderr,
            )
        yield


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[Path]:
    """Yield an empty hidden file, moved to `path` after the block and removed after an error."""
    partial = unfinished_path(path)
    busy = RequestError(f"{path} is being written by another process. Wait for it.")
    with convert_disk_errors(path):
        partial.touch()
        with _locked(partial, busy):
            try:
                os.truncate(partial, 0)
                yield partial
                _sync(partial)
                if path.is_file():
                    shutil.copymode(path, partial)
                os.replace(partial, path)
            except BaseException:  # after the move, a file of this name belongs to another process
                partial.unlink(missing_ok=True)
                raise


def write_text(path: Path, text: str) -> None:
    """Write a text to a file in UTF-8 with the line ends that it has, whole or not at all."""
    with atomic_write(path) as partial:
        partial.write_bytes(text.encode())


class OutputFolder:
    """A checkpoint's folder, which replaces only checkpoints that our record names.

    Args:
        path: Path of the output; `~` is expanded, and links are followed.
        source: The folder it is made from; neither may contain the other. Default: none.
        overwrite: Whether an existing checkpoint may be replaced. Default: False.
    """

    def __init__(self, path: str | Path, source: Path | None = None, overwrite: bool = False):
        if path == "":  # an empty path would mean the current folder
            raise RequestError("output is ''; expected the folder to make. Pass --output DIR.")
        self.path = Path(os.path.realpath(Path(path).expanduser()))
        self.partial = unfinished_path(self.path)
        self._overwrite = overwrite
        if source is not None:
            self.check_source(source)
        self._check()

    def own_files(self) -> Kind:
        """Return the patterns of files that may be replaced."""
        return OF_UPSCALED

    @property
    def disk(self) -> Path:
        """The nearest existing folder above the output."""
        return next(parent for parent in self.path.parents if parent.exists())

    def check_source(self, source: Path) -> None:
        """Raise `RequestError` if the output and the folder it is made from contain one another."""
        source = Path(os.path.realpath(source))
        if self.path.is_relative_to(source):
            raise RequestError(f"output {self.path} is inside the base {source}; expected a folder elsewhere.")
        if source.is_relative_to(self.path):
            raise RequestError(
                f"output {self.path} contains the base {source}, which --overwrite would delete; expected a folder elsewhere."
            )

    def _check(self) -> None:
        """Refuse an output that cannot be written, or that would replace other files than a checkpoint's."""
        output = f"output {self.path}"
        if not self.disk.is_dir() or not os.access(self.disk, os.W_OK):
            raise RequestError(f"{output} cannot be made: {self.disk} is not a writable folder.")
        if not os.path.lexists(self.path):
            return
        if not self.path.is_dir():
            raise RequestError(f"{output} is a file, so --overwrite will not delete it. Choose another path.")
        config, record = _read_object(self.path / CONFIG_FILE), _read_object(self.path / RECORD_FILE)
        is_recorded = "midus_hf" in record and ("plan" in record or STRIPPED_KEY in record)
        if any(self.path.iterdir()) and not has_record(config) and not is_recorded:
            raise RequestError(
                f"{output} was not written by upscale or strip, so --overwrite will not delete it: its {CONFIG_FILE} has no "
                f"{RECORD_KEY!r} entry, and it has no {RECORD_FILE} of theirs. Choose another folder, or remove it yourself."
            )
        foreign = foreign_files(self.path, self.own_files())
        if foreign:
            raise RequestError(
                f"{output} contains files that no checkpoint has, which --overwrite would delete: {first_few(foreign)}; expected "
                "only weights, config, tokenizer, licence, model card and exported code. Move it, or choose another folder."
            )
        if not self._overwrite:
            raise RequestError(f"{output} exists; pass --overwrite to replace it, or choose another folder.")

    @contextlib.contextmanager
    def writing(self) -> Iterator[Path]:
        """Yield a hidden folder, moved to its path after the block and removed after an error."""
        busy = f"output {self.path} is being written by another run. Wait for it, or choose another folder."
        with convert_disk_errors(self.path), exclusive(self.partial, RequestError(busy)):
            try:
                for left in self.partial.iterdir():  # by a killed run
                    if left.is_dir() and not left.is_symlink():
                        shutil.rmtree(left)
                    else:
                        left.unlink()
                self._check()
                yield self.partial
                self._commit()
            except BaseException:  # after the move, a folder of this name belongs to another run
                shutil.rmtree(self.partial, ignore_errors=True)
                raise

    def _commit(self) -> None:
        for file in filter(Path.is_file, self.partial.rglob("*")):
            _sync(file)
        self._check()  # once more, since the work may have taken hours
        replaced = unfinished_path(self.path, "replaced")
        shutil.rmtree(replaced, ignore_errors=True)
        if self.path.exists():
            self.path.rename(replaced)
        try:
            self.partial.rename(self.path)
        except BaseException:
            if replaced.exists():
                replaced.rename(self.path)
            raise
        shutil.rmtree(replaced, ignore_errors=True)


def _sync(file: Path) -> None:
    with file.open("rb") as stream:
        os.fsync(stream.fileno())


def foreign_files(folder: Path, kind: Kind) -> list[str]:
    """Return the files of a folder that do not belong to a checkpoint, sorted."""
    own = {*indexed_weights(folder), *(path.name for path in named_code(folder))}
    names = [path.relative_to(folder) for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    foreign = [name for name in names if not is_of(name, kind) and Path(".cache/huggingface") not in name.parents]
    return sorted({*map(str, foreign)} - own)


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = parse_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


# Numbers of errors of a full disk, and the messages of torch for them.
_OF_DISK = {errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG, errno.EROFS}
_TORCH_CANNOT_WRITE = re.compile("PytorchStreamWriter failed|unexpected pos|iostream error")


class DiskWriteError(OSError):
    """Error of a write that failed because of the disk; `facts`: the file, the reason, and the free space."""

    def __init__(self, facts: str):
        super().__init__(f"{facts}. Free some space there, and run the command again.")
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


def as_disk_error(error: BaseException, path: Path | None = None, needed: int | None = None) -> DiskWriteError | None:
    """Return the error about a failed write to disk, or None for an error of another kind.

    Args:
        error: The exception.
        path: The file being written. Default: unknown; the message has the free space of all disks that a command uses.
        needed: About how many bytes it needs. Default: unknown.
    """
    if isinstance(error, DiskWriteError):
        return error
    reason = _reason_of_disk(error)
    if reason is None:
        return None
    caches = Path(os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"))
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
    return DiskWriteError(f"{'a file' if path is None else path} could not be written: {reason} ({about}{room})")


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:,.1f} MB"


@contextlib.contextmanager
def convert_disk_errors(path: Path, needed: int | None = None) -> Iterator[None]:
    """Raise `DiskWriteError` if the block fails to write its `needed` bytes because of the disk."""
    try:
        yield
    except Exception as error:
        told = as_disk_error(error, path, needed)
        if told is None or told is error:
            raise
        raise told from error
