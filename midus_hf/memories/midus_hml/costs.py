"""FLOPs of head-wise memory, and the values that a token reads."""

from midus_hf.config.flops import linear
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.flops import flops_of, values_read_of
from midus_hf.memories.midus_hml.options import HeadwiseOptions
from midus_hf.memories.retrieval.costs import sub_key_flops, weighing_flops


@values_read_of(HeadwiseOptions)
def headwise_values_read(options: HeadwiseOptions, sizes: ModelSizes) -> int:
    return sizes.num_heads * options.k * (sizes.hidden_size // sizes.num_heads)


@flops_of(HeadwiseOptions)
def headwise_flops(
    options: HeadwiseOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    """Count the operations as `flops` does.

    Like the op, this applies transforms to the retrieved sum of each token, or to each row of the bank if rows are
    fewer.
    """
    rows, width = batch * tokens, sizes.hidden_size // sizes.num_heads
    transformed = min(rows, options.n * options.n) * sizes.num_heads
    return {
        **sub_key_flops(rows * sizes.num_heads, options.n, options.query_width(sizes), options.k),
        "values": linear(rows * sizes.num_heads, options.k, width) + linear(transformed, width, width),
        **weighing_flops(options, sizes, rows),
    }
