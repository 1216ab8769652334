"""The bank that a checkpoint's own code reads: the mapped bank, which can be copied beside another checkpoint."""

import os
import shutil
from pathlib import Path

from midus_hf.banks.mapped_bank import MappedBank


class MemoryBank(MappedBank):
    """Bank of a memory's blocks, for reading only, as `MappedBank`."""

    def save(self, folder: str | os.PathLike) -> None:
        """Copy the bank into another folder, unless the bank is already there."""
        if not (Path(folder).exists() and self.folder.samefile(folder)):
            shutil.copytree(self.folder, folder, dirs_exist_ok=True, copy_function=_copy_to_new_file)


def _copy_to_new_file(source: str, path: str) -> None:
    """Copy a file. An existing file is replaced, never written into, since other checkpoints may link to the same file."""
    Path(path).unlink(missing_ok=True)
    shutil.copy2(source, path)
