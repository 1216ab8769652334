"""FLOPs of linear and of product-key memory, and the values that a token reads."""

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.flops import flops_of, linear, top_k, values_read_of
from midus_hf.memories.midus_baselines.options import MidusLinearOptions, MidusPkmOptions, SharedValueOptions
from midus_hf.memories.midus_hml.costs import sub_key_flops, weighing_flops


@values_read_of(SharedValueOptions)
def shared_values_read(options: SharedValueOptions, sizes: ModelSizes) -> int:
    return sizes.num_heads * options.k * sizes.hidden_size


@flops_of(SharedValueOptions)
def shared_value_flops(
    options: SharedValueOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    """Count the operations; every query is compared with every flat key of its head, or with sub-keys."""
    rows, queries, hidden = batch * tokens, batch * tokens * sizes.num_heads, sizes.hidden_size
    width = options.query_width(sizes)
    if isinstance(options, MidusLinearOptions):
        choosing = {
            "scores": linear(queries, width, options.slots),
            "choice": top_k(queries, options.slots, options.k),
        }
    else:
        assert isinstance(options, MidusPkmOptions)
        choosing = sub_key_flops(queries, options.n, width, options.k)
    return {
        "query projection": linear(rows, hidden, hidden),
        "values": linear(rows, sizes.num_heads * options.k, hidden),
        **choosing,
        **weighing_flops(options, sizes, rows),
    }
