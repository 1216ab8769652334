"""A bank of a small model with two layers that fetch, and what is written into it."""

from pathlib import Path

import torch

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.hierarchical.bank import MemoryBank, create_bank
from midus_hf.memories.hierarchical.options import BankLayout, HierFFNOptions

SIZES = ModelSizes(hidden_size=8, num_heads=2, num_key_value_heads=1, intermediate_size=12, num_layers=3)
LLAMA_1B = ModelSizes(hidden_size=2048, num_heads=32, num_key_value_heads=8, intermediate_size=8192, num_layers=16)
LAYERS = (0, 2)


def layout_of(options=None, sizes=SIZES, layers=LAYERS):
    options = options or HierFFNOptions(sizes=[3, 0, 2], branching=4)
    return BankLayout(options.type, layers, options.fetched(sizes))


def made(folder, layout=None, dtype=torch.float32, seed=5):
    create_bank(folder, layout or layout_of(), dtype, seed)
    return folder


def opened(folder, layout=None):
    return MemoryBank(folder, layout or layout_of())


def record_of(layout, level, number, dtype=torch.float32):
    return torch.randn(layout.record_numel(level), generator=torch.Generator().manual_seed(number)).to(dtype)


def on_disk(folder):
    return sum(path.stat().st_blocks * 512 for path in Path(folder).iterdir())
