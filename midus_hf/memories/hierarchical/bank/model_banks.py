"""Banks of a model whose memories fetch blocks."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.hierarchical.bank.fetched import FetchedBatch
from midus_hf.memories.hierarchical.bank.memory_bank import MemoryBank
from midus_hf.memories.hierarchical.bank.trained_bank import TrainedBank
from midus_hf.memories.hierarchical.blocks import BankLayout


class Banks:
    """Banks of a model, by the name of the memory."""

    def __init__(self, layouts: Mapping[str, BankLayout]):
        self.layouts = dict(layouts)
        # Open banks, which training replaces by banks whose blocks train.
        self.opened: dict[str, Any] = {}
        # Whether a Trainer trains the blocks of the banks; set by `set_trainable`.
        self.trainable = False
        # Fingerprint of the tree whose paths train the blocks, and the folder with its files, if known.
        self.tree: tuple[str | None, Path | None] = (None, None)

    @property
    def read_without_ids(self) -> bool:
        """True if texts without ids read blocks too, from the generic memory."""
        return any(layout.blocks.without_ids == "generic" for layout in self.layouts.values())

    @property
    def are_open(self) -> bool:
        """True if there are banks, and they are open."""
        return bool(self.opened)

    def open(self, folder: str | os.PathLike) -> None:
        """Open the banks in a checkpoint's folder."""
        self.opened = {
            name: MemoryBank(Path(folder, BANKS_FOLDER, name), layout) for name, layout in self.layouts.items()
        }
        self.layouts = {name: bank.layout for name, bank in self.opened.items()}

    def bank(self, name: str) -> Any:
        """Return the bank of a memory."""
        if name not in self.opened:
            raise RequestError(
                f"memory {name!r} fetches blocks from a bank, and none is open; expected a model that from_pretrained loaded "
                "from its folder. Call banks.open(folder) of a model that was made otherwise."
            )
        return self.opened[name]

    def check_training(self) -> None:
        """Refuse a pass that trains while `set_trainable` lets blocks train, and no `MemoryTrainer` makes them trainable."""
        if self.trainable and not all(bank.trains for bank in self.opened.values()):
            raise RequestError(
                "blocks of a memory bank shall train, and this trainer would leave them as they are; expected MemoryTrainer, or a "
                "trainer class with MemoryTrainerMixin. Or freeze the blocks: set_trainable(model, [3, 7]) trains only layers."
            )

    def save(self, folder: str | os.PathLike) -> None:
        """Write the open banks into the folder of another checkpoint."""
        for name, bank in self.opened.items():
            bank.save(Path(folder, BANKS_FOLDER, name))

    def fetch(
        self, memory_ids: torch.Tensor | None, batch: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, FetchedBatch]:
        """Fetch the blocks of a batch's rows, by the memory's name. Without ids, only memories with generic blocks fetch blocks."""
        if memory_ids is not None and len(memory_ids) != batch:
            raise RequestError(
                f"memory_ids has {len(memory_ids)} rows; expected {batch}, one for each text of the batch."
            )
        fetched = {}
        for name, layout in self.layouts.items():
            if memory_ids is not None or layout.blocks.without_ids == "generic":
                bank = self.bank(name)
                ids = bank.generic_ids(batch) if memory_ids is None else memory_ids
                fetched[name] = bank.fetch(ids, device, dtype)
        return fetched


def check_tree(
    banks: Banks,
    tree: str | None,
    owner: str,
    remedy: str,
    *,
    shape: tuple[int, int] | None = None,
    roots: int | None = None,
    grown_from: Collection[str] = (),
) -> None:
    """Refuse a tree, by its fingerprint, if an open bank was trained with another, unless one was grown from the other.

    So is a tree whose levels and branching, `shape`, are not those of the banks. Paths may name the nodes of a tree that was grown
    from the bank's from then on.
    """
    for name, layout in banks.layouts.items():
        needed = (layout.num_levels, layout.blocks.branching)
        if shape not in (None, needed):
            raise RequestError(
                f"the tree of {owner} has {shape[0]} levels of {shape[1]}, and memory {name!r} fetches blocks by a tree of "
                f"{needed[0]} levels of {needed[1]}; expected one tree. Give the one that the bank was trained with, or build one."
            )
    for name, bank in banks.opened.items():
        stored = bank.bank if isinstance(bank, TrainedBank) else bank
        lineage = {*stored.description["grown_from"], *grown_from}
        if None not in (bank.tree, tree) and bank.tree != tree and not {bank.tree, tree} & lineage:
            raise RequestError(
                f"{owner} is of the tree with the fingerprint {str(tree)[:16]}..., and the model's bank was trained with "
                f"{str(bank.tree)[:16]}...; expected one tree, since a node has another topic in another tree. {remedy}"
            )
        stored.grow(roots)
        banks.layouts[name] = bank.layout = stored.layout
