"""Memories on their own, without a model."""

from typing import Any

from midus_hf.config import MEMORY_TYPES
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import read_options
from midus_hf.memory.registry import build_memory


def build(memory_type: str, *, hidden_size: int, num_heads: int, head_dim: int = 0, **options: Any) -> Any:
    """A memory of a type for a model of these sizes, without norm unless the options say; `head_dim` is D / H by default."""
    sizes = ModelSizes(hidden_size=hidden_size, num_heads=num_heads, head_dim=head_dim)
    return build_memory(
        read_options(MEMORY_TYPES[memory_type], {"query_norm": "none", **options}, f"memory {memory_type}"), sizes
    )
