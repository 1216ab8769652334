"""Initial values of blocks that were never written."""

import hashlib

import torch

from midus_hf.config.fetched_blocks import BankLayout


def initial_block(layout: BankLayout, level: int, index: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the initial record of a block, `[numel]`, drawn in float32 and cast to `dtype`.

    The same seed gives the same bytes, in whatever order blocks are read, and however far the tree has grown.

    Args:
        level: Level of the block, counted from 1.
        index: Node within the level; -1 for the generic memory.
    """
    first_grown = layout.blocks.branching**level
    number = first_grown if index < 0 else index + (index >= first_grown)
    digest = hashlib.sha256(f"{seed}/{layout.memory_type}/{level}/{number}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    record = torch.zeros(layout.record_numel(level), dtype=torch.float32)
    for tensor_place in layout.records[level]:
        tensor_place.tensor.initial.fill(
            record[tensor_place.start : tensor_place.start + tensor_place.numel], generator
        )
    return record.to(dtype)
