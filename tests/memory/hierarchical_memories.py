"""Memories of a small model and random blocks that its texts fetch."""

import dataclasses

import torch

from midus_hf.banks.fetched import FetchedBatch
from midus_hf.config.fetched_blocks import BankLayout
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.hierarchical.options import (
    HierFFNOptions,
    HierKVOptions,
    HierLoraFFNOptions,
    HierLoraQKOptions,
    HierLoraVOOptions,
)
from midus_hf.memories.module import build_memory

SIZES = ModelSizes(hidden_size=12, num_heads=6, head_dim=4, num_key_value_heads=2, intermediate_size=10, num_layers=4)
GEGLU = dataclasses.replace(SIZES, activation="gelu_pytorch_tanh")
LAYERS = (1, 3)
TYPES = {
    "hier-ffn": HierFFNOptions,
    "hier-lora-qk": HierLoraQKOptions,
    "hier-lora-vo": HierLoraVOOptions,
    "hier-lora-ffn": HierLoraFFNOptions,
    "hier-kv": HierKVOptions,
}
WIDTHS = {
    "hier-lora-qk": {"query": (12, 24), "key": (12, 8)},
    "hier-lora-vo": {"value": (12, 8), "output_projection": (24, 12)},
    "hier-lora-ffn": {"gate": (12, 10), "up": (12, 10), "down": (10, 12)},
}
# Which of the blocks that there are each of five rows has; level 3 has none, and on level 4 all have one.
BLOCKS = {1: [0, 1, 0, 2, 1], 2: [3, 0, 0, 1, 2], 4: [0, 0, 0, 0, 0]}


def options_of(kind, **changes):
    return TYPES[kind](**{"sizes": [3, 1, 0, 2], "branching": 4, **changes})


def layout_of(options, sizes=SIZES, layers=LAYERS):
    return BankLayout(options.type, layers, options.fetched(sizes))


def fetch(kind, blocks=None, dtype=torch.float64, sizes=SIZES, **changes):
    """Random blocks that want gradients, and which row has which."""
    layout = layout_of(options_of(kind, **changes), sizes)
    generator = torch.Generator().manual_seed(4)
    blocks = {level: torch.tensor(of_row) for level, of_row in (blocks or BLOCKS).items()}
    records = {
        level: torch.randn(
            max(blocks[level].tolist()) + 1, layout.record_numel(level), dtype=torch.float64, generator=generator
        )
        .to(dtype)
        .requires_grad_()
        for level in layout.levels
    }
    return FetchedBatch(layout, records, blocks)


def memory_of(kind, sizes=SIZES, **changes):
    return build_memory(options_of(kind, **changes), sizes).double()


def states(*shape, seed=9, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float64, generator=generator).to(dtype).requires_grad_()
