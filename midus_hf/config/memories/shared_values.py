"""Memories whose heads read the same values, the baselines of MIDUS: linear (flat) memory, and product-key memory (PKM)."""

import math
from dataclasses import dataclass

from midus_hf.config.declarations import register_memory_type
from midus_hf.config.declared_tensors import ZEROS, DeclaredTensor, Normal, Uniform
from midus_hf.config.flops.rules import flops, linear, top_k, values_read
from midus_hf.config.memories.retrieval import (
    INNER_RESIDUAL_HELP,
    QUERY_NORM_HELP,
    RANDOM_SLOTS,
    QueryNorm,
    RetrievalOptions,
    check_bits,
    check_halves,
    check_retrieval_fit,
    check_size,
    in_bits,
    sub_key_flops,
    sub_keys,
    weighing_flops,
)
from midus_hf.config.memory_types import check_fit, check_options
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.config.options import option


@dataclass(kw_only=True)
class SharedValueOptions(RetrievalOptions):
    """Options of a memory whose heads read the same values of full width: `RetrievalOptions` with other defaults.

    The attention in front keeps its output projection, the block's input is added to the projection's output (MIDUS,
    equation 6), and queries are batch-normalised (section 5.2).
    """

    output_projection = True

    query_norm: QueryNorm = option("batch", QUERY_NORM_HELP)
    inner_residual: bool = option(True, INNER_RESIDUAL_HELP)

    def projection_and_values(self, sizes: ModelSizes, slots: int) -> dict[str, DeclaredTensor]:
        """Declare the query projection, which keeps the scale of its input, and the values, which start at zero."""
        hidden = sizes.hidden_size
        return {
            "query_projection.weight": DeclaredTensor((hidden, hidden), "projection", Normal(1.0 / math.sqrt(hidden))),
            **in_bits({"value_bank": DeclaredTensor((slots, hidden), "value", ZEROS)}, self.value_bits),
        }


@register_memory_type("linear")
@dataclass(kw_only=True)
class LinearOptions(SharedValueOptions):
    """Size of the memory (MIDUS, equations 4 and 5)."""

    controls = {"one-row": {"slots": 1, "k": 1}, **RANDOM_SLOTS}

    slots: int = option(4096, "number of values, and of keys per head")

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        width = self.query_width(sizes)
        return {
            **self.norm_tensors(sizes),
            **self.projection_and_values(sizes, self.slots),
            "slot_keys": DeclaredTensor((sizes.num_heads, self.slots, width), "key", Uniform(1.0 / math.sqrt(width))),
        }


@register_memory_type("product-key")
@dataclass(kw_only=True)
class ProductKeyOptions(SharedValueOptions):
    """Size of the memory (MIDUS, equations 11 to 15; Lample et al. 2019)."""

    controls = {"one-row": {"n": 1, "k": 1}, **RANDOM_SLOTS}

    n: int = option(64, "sub-keys per side; every head addresses the same n * n values")

    def tensors(self, sizes: ModelSizes) -> dict[str, DeclaredTensor]:
        return {
            **self.norm_tensors(sizes),
            **self.projection_and_values(sizes, self.n * self.n),
            **sub_keys(sizes.num_heads, self.n, self.query_width(sizes)),
        }


@check_fit.register
def check_shared_values_fit(options: SharedValueOptions, sizes: ModelSizes) -> None:
    check_retrieval_fit(options, sizes)
    check_bits("value_bits", options.value_bits, {"hidden_size": sizes.hidden_size})


@values_read.register
def shared_values_values_read(options: SharedValueOptions, sizes: ModelSizes) -> int:
    return sizes.num_heads * options.k * sizes.hidden_size


def projection_and_values_flops(options: SharedValueOptions, sizes: ModelSizes, rows: int) -> dict[str, int]:
    """Count the operations of the query projection and of the weighted sum of values."""
    hidden = sizes.hidden_size
    return {
        "query projection": linear(rows, hidden, hidden),
        "values": linear(rows, sizes.num_heads * options.k, hidden),
    }


@check_options.register
def check_linear_options(options: LinearOptions) -> None:
    check_size(options, "slots", "slot")


@flops.register
def linear_flops(
    options: LinearOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    """Count the operations as `flops` does. Every query is compared with every key of its head."""
    rows, queries = batch * tokens, batch * tokens * sizes.num_heads
    return {
        **projection_and_values_flops(options, sizes, rows),
        "scores": linear(queries, options.query_width(sizes), options.slots),
        "choice": top_k(queries, options.slots, options.k),
        **weighing_flops(options, sizes, rows),
    }


@check_options.register
def check_product_key_options(options: ProductKeyOptions) -> None:
    check_size(options, "n", "sub-key per side")


@check_fit.register
def check_product_key_fit(options: ProductKeyOptions, sizes: ModelSizes) -> None:
    check_shared_values_fit(options, sizes)
    check_halves(options, sizes)


@flops.register
def product_key_flops(
    options: ProductKeyOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    """Count the operations as `flops` does."""
    rows = batch * tokens
    return {
        **projection_and_values_flops(options, sizes, rows),
        **sub_key_flops(rows * sizes.num_heads, options.n, options.query_width(sizes), options.k),
        **weighing_flops(options, sizes, rows),
    }
