"""Atomic output: it is written under a hidden name next to its path, and renamed at the end.

A process locks what it writes. The files of a killed process are not locked, and the next one that writes there removes them.
"""

import contextlib
import fcntl
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from midus_hf.anatomy.record import RECORD_KEY, has_record
from midus_hf.config.errors import RequestError
from midus_hf.config.wording import first_few
from midus_hf.files.checkpoint_files import (
    CONFIG_FILE,
    OF_UPSCALED,
    RECORD_FILE,
    Kind,
    indexed_weights,
    is_of,
    named_code,
)
from midus_hf.files.full_disk import telling_room
from midus_hf.files.json_text import parse_json

# Entry of a record that says that the new parts were removed.
STRIPPED_KEY = "stripped"


def unfinished_path(path: Path, state: str = "partial") -> Path:
    """Return the path next to `path` for its unfinished content, or for the replaced content (`"replaced"`) in the meantime."""
    return path.with_name(f".{path.name}.midus-{state}")


@contextlib.contextmanager
def _locked(path: Path, refusal: RequestError) -> Iterator[bool]:
    """Lock what is at a path, or raise `refusal` if another process has it; yield whether the file system has locks."""
    descriptor, has_locks = os.open(path, os.O_RDONLY), True
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
    """Create a folder if there is none, and lock it, or raise `refusal` if another run has; warn if there are no locks."""
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
    """Yield the path of an empty hidden file to write to, which is moved to `path` after the block, and removed after an error."""
    partial, busy = unfinished_path(path), RequestError(f"{path} is being written by another process. Wait for it.")
    with telling_room(path):
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
    """A checkpoint's folder, which replaces only checkpoints that our record names; other files are a `RequestError`.

    Args:
        path: Path of the output; `~` is expanded, and links are followed.
        source: The folder it is made from, which must neither contain the output nor lie inside it. Default: none.
        overwrite: Whether an existing checkpoint may be replaced. Default: False.
    """

    def __init__(self, path: str | Path, source: Path | None = None, overwrite: bool = False):
        if path == "":  # an empty path would mean the current folder
            raise RequestError("output is ''; expected the folder to make. Pass --output DIR.")
        self.path = Path(os.path.realpath(Path(path).expanduser()))
        self.partial = unfinished_path(self.path)
        self._source = None if source is None else Path(os.path.realpath(source))
        self._overwrite = overwrite
        self._check()

    def own_files(self) -> Kind:
        """Return the patterns of files that may be replaced."""
        return OF_UPSCALED

    @property
    def disk(self) -> Path:
        """The nearest existing folder above the output."""
        return next(parent for parent in self.path.parents if parent.exists())

    def _check(self) -> None:
        source, output = self._source, f"output {self.path}"
        if source is not None and self.path.is_relative_to(source):
            raise RequestError(f"{output} is inside the base {source}; expected a folder elsewhere.")
        if source is not None and source.is_relative_to(self.path):
            raise RequestError(
                f"{output} contains the base {source}, which --overwrite would delete; expected a folder elsewhere."
            )
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
        """Yield the hidden folder to write to, which is moved to its path after the block, and removed after an error."""
        busy = f"output {self.path} is being written by another run. Wait for it, or choose another folder."
        with telling_room(self.path), exclusive(self.partial, RequestError(busy)):
            try:
                for left in self.partial.iterdir():  # by a killed run
                    shutil.rmtree(left) if left.is_dir() and not left.is_symlink() else left.unlink()
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
    """Return the paths of files in a folder that do not belong to a checkpoint, sorted; metadata of the Hub's client does."""
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
