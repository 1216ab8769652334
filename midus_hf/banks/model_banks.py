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
    """Banks of a model, by the name of the memory.

    Args:
        layouts: Layout of each bank, by the name of the memory, as the config implies.
    """

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
        """Open the banks that lie beside a checkpoint.

        Args:
            folder: The checkpoint's folder.

        Raises:
            BankError: If a bank is absent, or belongs to another model.
        """
        self._open = {
            name: MemoryBank(Path(folder, BANKS_FOLDER, name), layout) for name, layout in self.layouts.items()
        }
        self.layouts = {name: bank.layout for name, bank in self._open.items()}

    def train_blocks(self) -> dict[str, TrainedBank]:
        """Make blocks trainable: from now on, passes with gradients compute gradients of the blocks that were fetched.

        Returns:
            The banks by the name of the memory; a bank that was trained before continues from its state.

        Raises:
            BankError: If a bank is not open.
        """
        trained = {}
        for name in self.layouts:
            bank = self.bank(name)
            if isinstance(bank, MemoryBank):
                bank.grow(tree=self._tree, **growth_of(self._tree_folder))
            trained[name] = bank if isinstance(bank, TrainedBank) else TrainedBank(bank)
            trained[name].tree = trained[name].bank.tree
            # Paths of a tree that the bank's tree was grown from leave the bank its own tree.
            trained[name].tree_folder = self._tree_folder if trained[name].tree == self._tree else None
        self._open |= trained
        return trained

    def train_with_tree(self, tree: str | None, folder: Path | None) -> None:
        """Set the tree whose paths train the banks that `train_blocks` makes trainable.

        Args:
            tree: The tree's fingerprint; None if unknown: banks then keep the fingerprint they have.
            folder: Folder with the files of the tree, which are saved with the banks; None if not available.
        """
        self._tree, self._tree_folder = tree, folder

    def bank(self, name: str) -> MemoryBank | TrainedBank:
        """Return the bank of a memory.

        Raises:
            BankError: If the bank is not open.
        """
        if name not in self._open:
            raise BankError(
                f"memory {name!r} fetches blocks from a bank, and none is open; expected a model that from_pretrained loaded "
                "from its folder. Call banks.open(folder) of a model that was made otherwise."
            )
        return self._open[name]

    def check_tree(
        self, tree: str | None, owner: str, remedy: str, *, roots: int | None = None, grown_from: Collection[str] = ()
    ) -> None:
        """Refuse a tree if an open bank was trained by the paths of another tree, unless one was grown from the other.

        Paths may name the nodes of a tree that was grown from the bank's from then on.

        Args:
            tree: The tree's fingerprint; None if unknown.
            owner: Owner of the tree, for the message.
            remedy: Last sentence of the message.
            roots: Nodes of the tree's first level; None if unknown. Default: None.
            grown_from: Fingerprints of the trees that the tree was grown from. Default: none.

        Raises:
            ValueError: If a bank's tree differs from this tree, and both are known.
        """
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
        """Fetch the blocks of a batch's rows, by the memory's name. Without ids, only memories with generic blocks fetch blocks.

        Args:
            memory_ids: `[B, p]`, in the form that `MemoryBank.fetch` takes; None if there are no ids.
            batch: B, number of rows.
            device: Device to put blocks on.
            dtype: Dtype to cast blocks to.

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
                fetched[name] = self.bank(name).fetch(memory_ids, device, dtype)
            elif layout.blocks.without_ids == "generic":
                bank = self.bank(name)
                fetched[name] = bank.fetch(bank.generic_ids(batch), device, dtype)
        return fetched
