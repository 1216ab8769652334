"""The service that fetches the blocks of the texts of a pass from the checkpoint's banks."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from midus_hf.config.errors import RequestError
from midus_hf.memories.entries import Memories
from midus_hf.memories.hierarchical.bank.fetched import FetchedBatch
from midus_hf.memories.hierarchical.bank.model_banks import Banks
from midus_hf.memories.hierarchical.options import block_layouts
from midus_hf.memories.hosting.bank_folder import BankService
from midus_hf.memories.hosting.parts import Keywords
from midus_hf.memories.hosting.service import HostStack
from midus_hf.memories.module import MemoryModule

# Names of arguments of a forward pass: paths whose blocks the rows fetch, and blocks that were fetched before.
IDS, BLOCKS = "memory_ids", "memory_blocks"


class BlockService(BankService):
    """Blocks that the texts of a pass fetch from the checkpoint's banks, as `fetched`, a `FetchedLayer`."""

    key = "fetched"
    is_required = True

    def __init__(self, model: HostStack, memories: Memories, hosted: Mapping[tuple[str, int], MemoryModule]):
        super().__init__(model, memories, hosted)
        self.banks = model.own_banks = Banks(block_layouts(memories))
        model.memory_input_names |= {IDS, BLOCKS}

    def of_pass(self, model: HostStack, arguments: Keywords, own: Keywords) -> Mapping[str, FetchedBatch]:
        """Return the blocks of the texts of the pass, by the name of the memory.

        Raises:
            RequestError: If both paths and blocks are given, or blocks for another number of texts; or if the blocks shall train, and
                nothing trains them.
        """
        memory_ids, memory_blocks = own.get(IDS), own.get(BLOCKS)
        if memory_ids is not None and memory_blocks is not None:
            raise RequestError("memory_ids and memory_blocks are given; expected one of them.")
        if memory_ids is None and memory_blocks is None and not self.banks.read_without_ids:
            return {}
        tokens = arguments["inputs_embeds"] if arguments["input_ids"] is None else arguments["input_ids"]
        if memory_blocks is None:
            if model.training and torch.is_grad_enabled():
                self.banks.check_training()
            return _fetch(self.banks, memory_ids, len(tokens), tokens.device, model.dtype)
        for batch in memory_blocks.values():
            if batch.num_rows != len(tokens):
                raise RequestError(
                    f"memory_blocks were fetched for {batch.num_rows} rows; expected {len(tokens)}, one for each text of the "
                    "batch."
                )
        return memory_blocks

    @staticmethod
    def given(value: Any, name: str, layer: int) -> Keywords:
        """Return the blocks of the layer."""
        return {"fetched": value[name].blocks_for(layer)}

    def check_continuous_batching(self, arguments: Keywords) -> None:
        """Refuse paths or blocks: all tokens of a row fetch the same blocks, but they belong to several requests."""
        for name in (IDS, BLOCKS):
            if arguments.get(name) is not None:
                raise RequestError(
                    f"{name} is given, and continuous batching lays the tokens of several requests in one row, where all would read "
                    "the same blocks; expected `generate`, or none."
                )

    def open_bank(self, folder: Path | None, arguments: Keywords) -> None:
        """Open the banks of all memories, or raise a `RequestError`; if they are not available, they may be opened later."""
        if folder is not None:
            self.banks.open(folder)

    def after_saving(self, folder: str | os.PathLike) -> None:
        """Write open banks into the folder of the weights."""
        self.banks.save(folder)

    def digest(self) -> str | None:
        """Return a digest of the blocks of all open banks; None if none is open."""
        return " ".join(f"{name} {bank.digest()}" for name, bank in self.banks.opened.items()) or None


@torch.compiler.disable
def _fetch(
    banks: Banks, memory_ids: torch.Tensor | None, batch: int, device: torch.device, dtype: torch.dtype
) -> dict[str, FetchedBatch]:
    return banks.fetch(memory_ids, batch, device, dtype)
