"""Memories on their own, without a model."""

from typing import Any

import torch

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.config.options import read_options
from midus_hf.memories.module import build_memory
from midus_hf.memories.registry import MEMORY_TYPES


def build(memory_type: str, *, hidden_size: int, num_heads: int, head_dim: int = 0, **options: Any) -> Any:
    """A memory of a type for a model of these sizes, without norm unless the options say; `head_dim` is D / H by default."""
    sizes = ModelSizes(hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim)
    return build_memory(
        read_options(MEMORY_TYPES[memory_type], {"query_norm": "none", **options}, f"memory {memory_type}"), sizes
    )


# Types of memory whose heads retrieve slots by keys.
RETRIEVING = ("midus-hml", "midus-pkm", "midus-linear")


def retrieving(
    memory_type: str, *, hidden_size: int = 24, num_heads: int = 4, size: int = 6, seed: int = 0, **options: Any
) -> Any:
    """Build a memory of one of these types with `size` sub-keys on a side, or slots if it is linear; in training mode."""
    torch.manual_seed(seed)
    sizes = {"slots" if memory_type == "midus-linear" else "n": size}
    return build(memory_type, hidden_size=hidden_size, num_heads=num_heads, **{"k": 2, **sizes, **options})


def acting(memory: Any, seed: int = 0) -> Any:
    """The memory with every parameter and buffer moved off its start."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in memory.state_dict().items():
            noise = torch.randn(tensor.shape, generator=generator).to(tensor.dtype)
            tensor.copy_(noise.abs() + 0.1 if name == "query_variance" else noise)
    return memory


def read_by(memory: Any, batch: int = 2, tokens: int = 7, seed: int = 1) -> torch.Tensor:
    read = torch.randn(
        batch, tokens, memory.num_heads * memory.query_width, generator=torch.Generator().manual_seed(seed)
    )
    return read.to(memory.value_bank.dtype)
