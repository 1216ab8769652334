"""Baselines of MIDUS, whose heads read the same values: linear (flat) and product-key memory (PKM)."""

import math
from dataclasses import dataclass

from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor, ModelSizes, Normal, Uniform
from midus_hf.config.options import option
from midus_hf.memories.registry import register_memory
from midus_hf.memories.retrieval.options import (
    INNER_RESIDUAL_HELP,
    QUERY_NORM_HELP,
    RANDOM_SLOTS,
    QueryNorm,
    RetrievalOptions,
    sub_keys,
)


@dataclass(kw_only=True)
class SharedValueOptions(RetrievalOptions):
    """Options of a memory whose heads read the same values of full width.

    The attention keeps its output projection, the block's input is added to the projection's output (MIDUS, equation 6), and
    queries are batch-normalised (section 5.2).
    """

    output_projection = True

    query_norm: QueryNorm = option("batch", QUERY_NORM_HELP)
    inner_residual: bool = option(True, INNER_RESIDUAL_HELP)

    def projection_and_values(self, sizes: ModelSizes, slots: int) -> dict[str, DeclaredTensor]:
        """Declare a query projection that keeps the scale of its input, and values, zero at first."""
        hidden = sizes.hidden_size
        return {
            "query_projection.weight": DeclaredTensor((hidden, hidden), "projection", Normal(1.0 / math.sqrt(hidden))),
            "value_bank": DeclaredTensor((slots, hidden), "value", ZEROS),
        }


@register_memory("midus-linear")
@dataclass(kw_only=True)
class MidusLinearOptions(SharedValueOptions):
    """Size of the memory (MIDUS, equations 4 and 5)."""

    controls = {"one-row": {"slots": 1, "k": 1}, **RANDOM_SLOTS}
    size_option = ("slots", "slot")

    slots: int = option(4096, "number of values, and of keys per head")

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        width = self.query_width(sizes)
        return {
            **self.norm_tensors(sizes),
            **self.projection_and_values(sizes, self.slots),
            "slot_keys": DeclaredTensor((sizes.num_heads, self.slots, width), "key", Uniform(1.0 / math.sqrt(width))),
        }


@register_memory("midus-pkm")
@dataclass(kw_only=True)
class MidusPkmOptions(SharedValueOptions):
    """Size of the memory (MIDUS, equations 11 to 15; Lample et al. 2019)."""

    controls = {"one-row": {"n": 1, "k": 1}, **RANDOM_SLOTS}

    n: int = option(64, "sub-keys per side; every head addresses the same n * n values")

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        return {
            **self.norm_tensors(sizes),
            **self.projection_and_values(sizes, self.n * self.n),
            **sub_keys(sizes.num_heads, self.n, self.query_width(sizes)),
        }
