"""What a stack of layers needs whose memories fetch blocks: banks, and what the texts of a pass fetch from them."""

import contextlib
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from huggingface_hub import snapshot_download

from midus_config.fetched_blocks import BANKS_FOLDER, BankLayout
from midus_hf.banks.level_file import BankError
from midus_hf.banks.memory_bank import MemoryBank
from midus_hf.banks.trained_bank import TrainedBank
from midus_hf.memory.fetched import FetchedBatch

IDS, BLOCKS = "memory_ids", "memory_blocks"
"""Arguments of a forward pass: which blocks the rows fetch, and blocks that were fetched before."""


class Banks:
    """The banks of a model, by the name of the memory.

    Args:
        layouts: That the config implies.
    """

    def __init__(self, layouts: Mapping[str, BankLayout]):
        self.layouts = dict(layouts)
        self._open: dict[str, MemoryBank | TrainedBank] = {}
        self.trainable = False
        """Whether a Trainer trains their blocks; `set_trainable` says so."""

    @property
    def read_without_ids(self) -> bool:
        """Whether texts read something that name no blocks."""
        return any(layout.blocks.without_ids == "generic" for layout in self.layouts.values())

    def open(self, folder: str | os.PathLike, **options: Any) -> None:
        """Open the banks that lie beside a checkpoint.

        Args:
            folder: The checkpoint's.
            options: Of `MemoryBank`.

        Raises:
            BankError: If one is absent, or that of another model.
        """
        self._open = {
            name: MemoryBank(Path(folder, BANKS_FOLDER, name), layout, **options)
            for name, layout in self.layouts.items()
        }

    def train(self) -> dict[str, TrainedBank]:
        """Let blocks be trained from now on: passes that want gradients give them to blocks that were fetched.

        Returns:
            The banks by the name of the memory; those that were trained before go on from there.

        Raises:
            BankError: If one is not open.
        """
        trained = {}
        for name in self.layouts:
            bank = self.of(name)
            trained[name] = bank if isinstance(bank, TrainedBank) else TrainedBank(bank)
        self._open |= trained
        return trained

    def of(self, name: str) -> MemoryBank | TrainedBank:
        """The bank of a memory.

        Raises:
            BankError: If none is open.
        """
        if name not in self._open:
            raise BankError(
                f"memory {name!r} fetches blocks from a bank, and none is open; expected a model that from_pretrained loaded "
                "from its folder. Call open_banks(folder) on a model that was made otherwise."
            )
        return self._open[name]

    def save(self, folder: str | os.PathLike) -> None:
        """Write those that are open beside a checkpoint in another folder."""
        for name, bank in self._open.items():
            bank.save(Path(folder, BANKS_FOLDER, name))

    def fetch(
        self, memory_ids: torch.Tensor | None, batch: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, FetchedBatch]:
        """What the rows of a batch fetch, by the name of the memory; nothing of one that reads none without ids.

        Args:
            memory_ids: As `MemoryBank.fetch` takes them; None where none are given.
            batch: B.
            device: To put blocks on.
            dtype: To cast them to.

        Raises:
            ValueError: If ids have another shape or are out of range, or no bank is open.
        """
        fetched = {}
        for name, layout in self.layouts.items():
            if memory_ids is not None:
                if len(memory_ids) != batch:
                    raise ValueError(
                        f"memory_ids has {len(memory_ids)} rows; expected {batch}, one for each text of the batch."
                    )
                fetched[name] = self.of(name).fetch(memory_ids, device, dtype)
            elif layout.blocks.without_ids == "generic":
                bank = self.of(name)
                fetched[name] = bank.fetch(bank.generic_ids(batch), device, dtype)
        return fetched


def folder_of_checkpoint(name: str | os.PathLike, options: Mapping[str, Any]) -> Path | None:
    """Where the files of a checkpoint lie; those of banks are downloaded if it is on the hub. None if there are none.

    Args:
        name: Folder or hub id, as given to `from_pretrained`.
        options: What else was given to it.
    """
    folder = Path(name, options.get("subfolder") or "")
    if folder.is_dir():
        return folder
    known = ("revision", "cache_dir", "token", "local_files_only")
    given = {key: options[key] for key in known if options.get(key) is not None}
    subfolder = options.get("subfolder") or "."
    pattern = PurePosixPath(subfolder, BANKS_FOLDER, "**").as_posix()
    with contextlib.suppress(OSError, ValueError):
        return Path(snapshot_download(str(name), allow_patterns=[pattern], **given), subfolder)
    return None
