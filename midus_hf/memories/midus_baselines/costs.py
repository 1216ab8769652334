"""FLOPs of linear and of product-key memory, and the values that a token reads."""

from midus_hf.config.flops import linear, top_k
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.flops import flops_of, values_read_of
from midus_hf.memories.midus_baselines.options import LinearOptions, ProductKeyOptions, SharedValueOptions
from midus_hf.memories.retrieval.costs import sub_key_flops, weighing_flops


@values_read_of(SharedValueOptions)
def shared_values_values_read(options: SharedValueOptions, sizes: ModelSizes) -> int:
    return sizes.num_heads * options.k * sizes.hidden_size


def projection_and_values_flops(options: SharedValueOptions, sizes: ModelSizes, rows: int) -> dict[str, int]:
    """Count the operations of the query projection and of the weighted sum of values."""
    hidden = sizes.hidden_size
    return {
        "query projection": linear(rows, hidden, hidden),
        "values": linear(rows, sizes.num_heads * options.k, hidden),
    }


@flops_of(LinearOptions)
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


@flops_of(ProductKeyOptions)
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
