"""The open banks of a model, and the service that fetches the blocks of the texts of a pass from them."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from midus_hf.config.errors import RequestError
from midus_hf.files.checkpoint_files import BANKS_FOLDER
from midus_hf.memories.hierarchical.bank import FetchedBatch, MemoryBank
from midus_hf.memories.hierarchical.options import GENERIC, BankLayout, block_layouts
from midus_hf.memories.hosting.parts import Keywords
from midus_hf.memories.hosting.service import BankService, HostStack
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.registry import Memories

IDS, BLOCKS = "memory_ids", "memory_blocks"


class Banks:
    """Banks of a model, by the name of the memory."""

    def __init__(self, layouts: Mapping[str, BankLayout]):
        self.layouts = dict(layouts)
        self.opened: dict[str, Any] = {}
        self.trainable = False
        self.tree: tuple[str | None, Path | None] = (None, None)

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

    @torch.compiler.disable
    def fetch(
        self, memory_ids: torch.Tensor | None, batch: int, device: torch.device, dtype: torch.dtype
    ) -> dict[str, FetchedBatch]:
        """Fetch the blocks of a batch's rows, by memory; without ids only generic blocks, where there are any."""
        if memory_ids is not None and len(memory_ids) != batch:
            raise RequestError(
                f"memory_ids has {len(memory_ids)} rows; expected {batch}, one for each text of the batch."
            )
        fetched = {}
        for name, layout in self.layouts.items():
            if memory_ids is not None or layout.blocks.without_ids == "generic":
                ids = torch.full((batch, layout.num_levels), GENERIC) if memory_ids is None else memory_ids
                fetched[name] = self.bank(name).fetch(ids, device, dtype)
        return fetched


class BlockService(BankService):
    """Blocks that the texts of a pass fetch from the checkpoint's banks, as `fetched`, a `FetchedLayer`."""

    key = "fetched"
    is_required = True

    def __init__(self, model: HostStack, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        super().__init__(model, memories, hosted)
        self.banks = model.own_banks = Banks(block_layouts(memories))
        model.memory_input_names |= {IDS, BLOCKS}

    def prepare_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> Mapping[str, FetchedBatch]:
        """Return the blocks of the texts of the pass, by the name of the memory, or raise a `RequestError`."""
        memory_ids, memory_blocks = own.get(IDS), own.get(BLOCKS)
        if memory_ids is not None and memory_blocks is not None:
            raise RequestError("memory_ids and memory_blocks are given; expected one of them.")
        reads_without_ids = any(layout.blocks.without_ids == "generic" for layout in self.banks.layouts.values())
        if memory_ids is None and memory_blocks is None and not reads_without_ids:
            return {}
        tokens = arguments["inputs_embeds"] if arguments["input_ids"] is None else arguments["input_ids"]
        if memory_blocks is None:
            trains = self.banks.trainable and model.training and torch.is_grad_enabled()
            if trains and not all(bank.trains for bank in self.banks.opened.values()):
                raise RequestError(
                    "blocks of a memory bank are set to train, but this trainer leaves them as they are; expected MemoryTrainer, or "
                    "a trainer class with MemoryTrainerMixin. Or freeze the blocks: set_trainable(model, [3, 7]) trains only layers."
                )
            return self.banks.fetch(memory_ids, len(tokens), tokens.device, model.dtype)
        for batch in memory_blocks.values():
            if batch.num_rows != len(tokens):
                raise RequestError(
                    f"memory_blocks were fetched for {batch.num_rows} rows; expected {len(tokens)}, one for each text of the "
                    "batch."
                )
        return memory_blocks

    @classmethod
    def layer_arguments(cls, value: Any, name: str, layer: int) -> Keywords:
        return {"fetched": value[name].blocks_for(layer)}

    def check_continuous_batching(self, arguments: Keywords) -> None:
        """Refuse paths or blocks: tokens of a row fetch the same blocks, but belong to several requests."""
        for name in (IDS, BLOCKS):
            if arguments.get(name) is not None:
                raise RequestError(
                    f"{name} is given, and continuous batching lays the tokens of several requests in one row, where all would read "
                    "the same blocks; expected `generate`, or none."
                )

    def open_bank(self, folder: Path | None, arguments: Keywords) -> None:
        """Open the banks of all memories, or raise a `RequestError`; if absent, they may be opened later."""
        if folder is not None:
            self.banks.open(folder)

    def after_saving(self, folder: str | os.PathLike) -> None:
        """Write open banks into the folder of the weights."""
        for name, bank in self.banks.opened.items():
            bank.save(Path(folder, BANKS_FOLDER, name))

    def digest(self) -> str | None:
        """Return a digest of the blocks of all open banks; None if none is open."""
        return " ".join(f"{name} {bank.digest()}" for name, bank in self.banks.opened.items()) or None


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
    """Refuse a tree, by fingerprint, if a bank was trained with another, unless one grew from the other.

    `shape`, levels and branching, must be that of the banks. Paths may then name the nodes of a tree that grew from the bank's.
    """
    for name, layout in banks.layouts.items():
        needed = (layout.num_levels, layout.blocks.branching)
        if shape not in (None, needed):
            raise RequestError(
                f"the tree of {owner} has {shape[0]} levels of {shape[1]}, and memory {name!r} fetches blocks by a tree of "
                f"{needed[0]} levels of {needed[1]}; expected one tree. Give the one that the bank was trained with, or build one."
            )
    for name, bank in banks.opened.items():
        stored: MemoryBank = getattr(bank, "bank", bank)  # of a `TrainedBank`
        lineage = {*stored.description["grown_from"], *grown_from}
        if None not in (bank.tree, tree) and bank.tree != tree and not {bank.tree, tree} & lineage:
            raise RequestError(
                f"{owner} is of the tree with the fingerprint {str(tree)[:16]}..., and the model's bank was trained with "
                f"{str(bank.tree)[:16]}...; expected one tree, since a node has another topic in another tree. {remedy}"
            )
        stored.grow(roots)
        banks.layouts[name] = bank.layout = stored.layout
