"""The bank that a checkpoint's own code reads: one block at a time, from whole files, with only the last fetch kept."""

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
    """Bank of a memory's blocks, for reading only.

    Args:
        folder: Folder with the bank's files.
        layout: Layout of the bank that the model's config implies.

    Raises:
        BankError: If a file is absent, or belongs to another model.
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
        """Return this bank itself: copies of a model read the same bank."""
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        """Return how to open the same bank again, since another process cannot use an open file."""
        return MemoryBank, (self.folder.absolute(), self.layout)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype in which the blocks are stored."""
        return next(iter(self._files.values())).get_slice("blocks")[0:1].dtype

    def block(self, level: int, index: int) -> torch.Tensor:
        """Return the record of a block, `[numel]`; a block that was never written or was deleted is drawn from the bank's seed.

        Raises:
            BankError: If the record's checksum differs from the checksum that was written.
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
        """Copy the bank into another folder, unless the bank is already there; `link_from` is ignored: other banks use it."""
        if not (Path(folder).exists() and self.folder.samefile(folder)):
            shutil.copytree(self.folder, folder, dirs_exist_ok=True, copy_function=_copy_to_new_file)


def _copy_to_new_file(source: str, path: str) -> None:
    """Copy a file. An existing file is replaced, never written into, since other checkpoints may link to the same file."""
    Path(path).unlink(missing_ok=True)
    shutil.copy2(source, path)
