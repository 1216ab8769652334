"""A bank as a checkpoint's own code reads it: one block at a time, from whole files, with nothing kept but the last fetch."""

import os
import shutil
from pathlib import Path
from typing import Any

import safetensors
import torch

from midus_hf.banks.bank_description import read_description
from midus_hf.banks.block_reader import BlockReader
from midus_hf.banks.initial_blocks import initial_block
from midus_hf.banks.level_file import BankError
from midus_hf.banks.record_read import DELETED, UNWRITTEN, crc_of
from midus_hf.config.fetched_blocks import BankLayout, level_file


class MemoryBank(BlockReader):
    """The blocks of a memory, to be read.

    Args:
        folder: That has the files.
        layout: That the model's config implies.

    Raises:
        BankError: If a file is absent, or is that of another model.
    """

    def __init__(self, folder: str | os.PathLike, layout: BankLayout):
        super().__init__(layout)
        self.folder = Path(folder)
        self.description = read_description(self.folder, layout)
        self._files = {}
        for level in layout.levels:
            path = self.folder / level_file(level)
            if not path.is_file():
                raise BankError(f"{path} is absent; expected the blocks of level {level}. Copy the bank again.")
            self._files[level] = safetensors.safe_open(path, "pt")

    def __deepcopy__(self, memo: Any) -> "MemoryBank":
        """Itself: copies of a model read the same bank."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """The same bank, to be read: an open file is nothing to another process."""
        return MemoryBank, (self.folder.absolute(), self.layout)

    @property
    def dtype(self) -> torch.dtype:
        """That blocks are stored in."""
        return next(iter(self._files.values())).get_slice("blocks")[0:1].dtype

    def block(self, level: int, index: int) -> torch.Tensor:
        """Return the record of a block, `[numel]`; one that was never written is drawn.

        Raises:
            BankError: If it is not what was written.
        """
        file = self._files[level]
        mark = int(file.get_slice("checksums")[index : index + 1].item())
        if mark in (UNWRITTEN, DELETED):
            return initial_block(self.layout, level, index, self.description["seed"], self.dtype)
        record = file.get_slice("blocks")[index : index + 1][0]
        if crc_of(record) != mark:
            raise BankError(
                f"block {index} of level {level} in {self.folder} is not what was written; expected its checksum. "
                "Copy the bank again."
            )
        return record

    def save(self, folder: str | os.PathLike, link_from: Path | None = None) -> None:
        """Copy the bank into another folder, unless it lies there; `link_from`, which copies to link with, is for other banks."""
        if not (Path(folder).exists() and self.folder.samefile(folder)):
            shutil.copytree(self.folder, folder, dirs_exist_ok=True, copy_function=_copy_to_new_file)


def _copy_to_new_file(source: str, path: str) -> None:
    """Copy a file; one that is there is replaced and not written into, since it may have other names in other checkpoints."""
    Path(path).unlink(missing_ok=True)
    shutil.copy2(source, path)
