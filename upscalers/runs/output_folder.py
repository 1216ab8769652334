"""Output folder of all commands that write a checkpoint, and the files beside the weights of one that was made from another one."""

import contextlib
import errno
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from midus_hf.config.backbone import MEMORY_PREFIX
from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.files.locks import Lock, has_no_locks, warn_of_no_locks
from midus_hf.files.ownership import check_replaceable
from midus_hf.files.whole_files import begin_unfinished, new_unfinished_path, sync, unfinished_paths
from upscalers.architecture.family import Config
from upscalers.checkpoint.banks import bytes_of_banks, carry_banks, tie_banks
from upscalers.checkpoint.base_model import BaseModel, open_base, write_config
from upscalers.checkpoint.source import copy_travelling_files
from upscalers.request.errors import RequestError, refusing_requests
from upscalers.request.progress import Progress, shown
from upscalers.tensors.writer import CheckpointWriter, OutputTensor, Written

# Errors of file systems for files that are too large; `ENOSPC` comes from file systems without holes.
_FILE_TOO_LARGE = frozenset({errno.EFBIG, errno.EINVAL, errno.ENOSPC})


class OutputFolder:
    """Folder that appears complete or not at all, even if the process is killed, and replaces only what this package wrote.

    It is built beside its path, under a name of `unfinished_name`, and renamed when it is complete. What it replaces has a hidden
    name too for the moment between two renames; if the process is killed in that moment, the next run with the same output moves
    it back. A running process holds a lock on the unfinished folder. What a killed run left unfinished is locked by nobody, and
    the next run removes it.

    If the file system has no locks, the run continues and removes nothing that is unfinished, and a line on standard error says
    that nothing guards the output.

    Args:
        path: Path of the output; `~` is expanded, and a link stands for its target.
        base: The base folder, which must neither contain the output nor lie inside it; None if there is none. Default:
            None.
        overwrite: Whether an existing checkpoint may be replaced, if `check_replaceable` allows that. Default: False.

    Raises:
        RequestError: If the output has no name, exists, lies inside the base or around it, cannot be written, or is
            being written by another run.
    """

    #: The unfinished folder, within the context.
    partial: Path

    def __init__(self, path: str | Path, base: Path | None = None, overwrite: bool = False):
        if path == "":  # an empty path would stand for the current folder
            raise RequestError("output is ''; expected the folder to make. Pass --output DIR.")
        self.path = Path(os.path.realpath(Path(path).expanduser()))
        self._base = None if base is None else Path(os.path.realpath(base))
        self._overwrite = overwrite
        self._lock: Lock | None = None
        self._check()

    def _check(self) -> None:
        if self._base is not None:
            if self.path.is_relative_to(self._base):
                raise RequestError(
                    f"output {self.path} lies inside the base {self._base}; expected a folder elsewhere."
                )
            if self._base.is_relative_to(self.path):
                raise RequestError(
                    f"output {self.path} holds the base {self._base}, which --overwrite would delete; expected a folder elsewhere."
                )
        if os.path.lexists(self.path):
            if not self._overwrite:
                raise RequestError(
                    f"output {self.path} exists; pass --overwrite to replace it, or choose another folder."
                )
            with refusing_requests():
                check_replaceable(self.path)
        if not self.disk.is_dir() or not os.access(self.disk, os.W_OK):
            raise RequestError(f"output {self.path} cannot be made: {self.disk} is not a writable folder.")

    @property
    def disk(self) -> Path:
        """The nearest existing folder above the output."""
        return next(parent for parent in self.path.parents if parent.exists())

    def check_space(self, num_bytes: int) -> None:
        """Raise an error if the disk has less room than `num_bytes` bytes."""
        free = self.free_bytes()
        if free < num_bytes:
            raise RequestError(
                f"the output needs {num_bytes / 1e9:.2f} GB, but {self.disk} has {free / 1e9:.2f} GB free. Make room or "
                "choose another disk."
            )

    def free_bytes(self) -> int:
        """Return the free bytes of the output's disk plus the bytes of what killed runs left, which is removed first."""
        free = shutil.disk_usage(self.disk).free
        for folder in self._abandoned():
            free += sum(file.lstat().st_blocks * 512 for file in folder.rglob("*") if not file.is_dir())
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

    def flush(self, progress: Progress) -> None:
        """Force all files written so far to the disk; later writes are left to `commit`.

        Args:
            progress: Display that shows how many bytes are on the disk.
        """
        sizes = {file: file.stat().st_size for file in self.partial.rglob("*")}
        progress.stage("waiting for the disk", sum(sizes.values()), "bytes")
        for file, num_bytes in sizes.items():
            sync(file)
            progress.advance(num_bytes)

    def __enter__(self) -> Path:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.partial, self._lock = begin_unfinished(self.path, Path.mkdir)
        try:
            if self._lock is None:
                warn_of_no_locks(self.path)
            for folder in self._abandoned():  # after the lock was taken: of two runs, one at least sees the other
                shutil.rmtree(folder, ignore_errors=True)
            self._recover()
            self._check()  # checked in the constructor too, but only now can no other run interfere
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self.partial

    def _abandoned(self) -> Iterator[Path]:
        """Yield the unfinished folders of killed runs, each locked while it is yielded, and refuse if a run is writing one."""
        for folder in unfinished_paths(self.path) if self.path.parent.is_dir() else ():
            if folder.is_symlink() or not folder.is_dir() or folder == getattr(self, "partial", None):
                continue
            try:
                lock = Lock(folder)
            except BlockingIOError:
                raise RequestError(
                    f"output {self.path} is being written by another run. Wait for it, or choose another folder."
                ) from None
            except FileNotFoundError:
                continue  # another run has just finished
            except OSError as error:
                if not has_no_locks(error):
                    raise
                continue
            try:
                yield folder
            finally:
                lock.release()

    def _recover(self) -> None:
        """Move an output back that was moved aside for a new one that never took its place; else remove what was replaced."""
        for folder in unfinished_paths(self.path, "replaced"):
            if os.path.lexists(self.path):
                self._remove(folder)
            else:
                folder.rename(self.path)

    def _remove(self, replaced: Path) -> None:
        """Remove a replaced output. It is renamed first, so that nobody takes the partly deleted rest for a complete output."""
        deleted = new_unfinished_path(self.path)
        replaced.rename(deleted)
        shutil.rmtree(deleted, ignore_errors=True)

    def commit(self) -> None:
        """Flush the folder's files to the disk and move the folder to its path, unless a person's files have appeared there."""
        for file in (*self.partial.rglob("*"), self.partial):
            sync(file)
        self._check()  # once more, since the work may have taken hours
        if self.path.exists():
            self.path.rename(new_unfinished_path(self.path, "replaced"))
        try:
            self.partial.rename(self.path)
        finally:
            sync(self.path.parent)
            self._recover()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)  # nothing after a commit
        if self._lock is not None:
            self._lock.release()


@contextlib.contextmanager
def written_from(
    model: BaseModel,
    folder: OutputFolder,
    shards: dict[str, list[OutputTensor]],
    banks: Mapping[str, BankLayout],
    progress: Progress,
    copied: Callable[[str], None] = lambda name: None,
    stored_name: Callable[[str], str] = lambda name: name,
) -> Iterator[Written]:
    """Write tensors and banks of a checkpoint to an output folder, and commit the folder after the block if the block raises nothing.

    The block writes the files beside them, to `folder.partial`.

    Args:
        model: The checkpoint that has the tensors and banks.
        folder: The output folder.
        shards: Tensors to write by file name.
        banks: Layout of each bank to copy, by the name of its memory.
        progress: Display that shows every step, started before the first and finished after the last.
        copied: Function called with the name of each tensor right after it was copied. Default: does nothing.
        stored_name: Function that returns the name in the files of a tensor to write, by its full name. Default: the full name.

    Raises:
        RequestError: If the disk has too little room, or a bank is absent or another model's.
    """
    num_bytes = sum(tensor.num_bytes for tensors in shards.values() for tensor in tensors)
    folder.check_space(num_bytes + bytes_of_banks(model.folder, banks))
    with folder as partial, shown(progress):
        writer = CheckpointWriter(model.tensors, scan=False, progress=progress, copied=copied, stored_name=stored_name)
        written = writer.write(partial, shards)
        carry_banks(model.folder, partial, banks)
        yield written
        folder.commit()


def write_part(source: Path, partial: Path, config: Config, progress: Progress) -> None:
    """Write the files beside the weights of a checkpoint that holds a part of another one's tensors.

    Args:
        source: Folder of the other checkpoint.
        partial: Folder of the result, with its weights and banks.
        config: Raw config of the result.
        progress: Display that says what code is copied.
    """
    copy_travelling_files(source, partial, progress)
    write_config(partial, config)
    tie_banks(partial, open_base(partial).layout.memories.banks)
    if str(config.get("model_type")).startswith(MEMORY_PREFIX):
        write_code_of(partial)


def write_code_of(folder: Path) -> None:
    """Write the code that a checkpoint's config needs into its folder, so that the checkpoint loads without this package."""
    from transformers import AutoConfig

    import midus_hf  # noqa: F401 - registers the classes
    from midus_hf.carried.module import write_code

    write_code(folder, AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False))
