"""What a block is before anything was written to it."""

import hashlib

import torch

from midus_hf.config.fetched_blocks import BankLayout


def initial_block(layout: BankLayout, level: int, index: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    """The record of a block that was never written, `[numel]`: the same seed, the same bytes, in whatever order blocks are asked for.

    Args:
        layout: Of the bank.
        level: Of the block, counted from 1.
        index: Of its record.
        seed: Of the bank.
        dtype: Of the record; numbers are drawn in float32.
    """
    digest = hashlib.sha256(f"{seed}/{layout.memory_type}/{level}/{index}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    record = torch.zeros(layout.record_numel(level), dtype=torch.float32)
    for place in layout.records[level]:
        place.tensor.initial.fill(record[place.start : place.start + place.numel], generator)
    return record.to(dtype)
