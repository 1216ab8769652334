"""Banks of a model whose memories fetch blocks."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path

import torch

from midus_hf.banks.bank_description import check_same_tree, growth_of
from midus_hf.banks.fetched import FetchedBatch
from midus_hf.banks.level_file import BankError
from midus_hf.banks.memory_bank import MemoryBank
from midus_hf.banks.trained_bank import TrainedBank
from midus_hf.config.fetched_blocks import BANKS_FOLDER, BankLayout


class Banks:
    """Banks of a model, by the name of the memory."""

    def __init__(self, layouts: Mapping[str, BankLayout]):
        self.layouts = dict(layouts)
        self._open: dict[str, MemoryBank | TrainedBank] = {}
        self._tree: str | None = None
        self._tree_folder: Path | None = None
        # Whether a Trainer trains the blocks of the banks; set by `set_trainable`.
        self.trainable = False

    @property
    def read_without_ids(self) -> bool:
        """True if texts without ids read blocks too, from the generic memory."""
        return any(layout.blocks.without_ids == "generic" for layout in self.layouts.values())

    def open(self, folder: str | os.PathLike) -> None:
        """Open the banks that lie beside a checkpoint."""
        self._open = {
            name: MemoryBank(Path(folder, BANKS_FOLDER, name), layout) for name, layout in self.layouts.items()
        }
        self.layouts = {name: bank.layout for name, bank in self._open.items()}

    def train_blocks(self) -> dict[str, TrainedBank]:
        """Make blocks trainable: from now on, passes with gradients compute gradients of the blocks that were fetched."""
        trained = {}
        for name in self.layouts:
            bank = self.of(name)
            if isinstance(bank, MemoryBank):
                bank.grow(tree=self._tree, **growth_of(self._tree_folder))
            trained[name] = bank if isinstance(bank, TrainedBank) else TrainedBank(bank)
            trained[name].tree = trained[name].bank.tree
            # Paths of a tree that the bank's tree was grown from leave the bank its own tree.
            trained[name].tree_folder = self._tree_folder if trained[name].tree == self._tree else None
        self._open |= trained
        return trained

    def train_with_tree(self, tree: str | None, folder: Path | None) -> None:
        """Set the tree whose paths train the banks that `train_blocks` makes trainable."""
        self._tree, self._tree_folder = tree, folder

    def of(self, name: str) -> MemoryBank | TrainedBank:
        """Return the bank of a memory."""
        if name not in self._open:
            raise BankError(
                f"memory {name!r} fetches blocks from a bank, and none is open; expected a model that from_pretrained loaded "
                "from its folder. Call banks.open(folder) of a model that was made otherwise."
            )
        return self._open[name]

    def check_tree(
        self, tree: str | None, owner: str, remedy: str, *, roots: int | None = None, grown_from: Collection[str] = ()
    ) -> None:
        """Refuse a tree if an open bank was trained by the paths of another tree, unless one was grown from the other."""
        for bank in self._open.values():
            own = bank if isinstance(bank, MemoryBank) else bank.bank
            check_same_tree(bank.tree, tree, owner, remedy, {*own.description["grown_from"], *grown_from})
            own.grow(roots)
            bank.layout = own.layout
        self.layouts |= {name: bank.layout for name, bank in self._open.items()}

    @property
    def are_open(self) -> bool:
        """True if there are banks, and they are open."""
        return bool(self._open)

    def save(self, folder: str | os.PathLike) -> None:
        """Write the open banks beside a checkpoint in another folder."""
        for name, bank in self._open.items():
            bank.save(Path(folder, BANKS_FOLDER, name))

    def fetch(
        self, memory_ids: torch.Tensor | None, batch: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, FetchedBatch]:
        """Fetch the blocks of a batch's rows, by the memory's name. Without ids, only memories with generic blocks fetch blocks."""
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
