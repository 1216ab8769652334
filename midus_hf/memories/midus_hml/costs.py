"""FLOPs of head-wise memory, which the baselines share in part, and the values that a token reads."""

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.flops import SOFTMAX, flops_of, layer_norm, linear, top_k, values_read_of
from midus_hf.memories.midus_hml.options import MidusHmlOptions
from midus_hf.memories.retrieval.options import RetrievalOptions


def weighing_flops(options: RetrievalOptions, sizes: ModelSizes, rows: int) -> dict[str, int]:
    """Count the operations of the query norm, in any mode, the softmax over slots and the residual adds."""
    queries = rows * sizes.num_heads
    return {
        "query norm": 0 if options.query_norm == "none" else layer_norm(queries, options.query_width(sizes)),
        "weights": queries * options.k * SOFTMAX,
        "residual adds": rows * sizes.hidden_size * (2 if options.inner_residual else 1),
    }


def sub_key_flops(queries: int, n: int, query_width: int, k: int) -> dict[str, int]:
    """Count operations that find the k best pairs of sub-keys: k rows, k columns, k of k * k sums."""
    return {
        "scores": 2 * linear(queries, query_width // 2, n),
        "choice": 2 * top_k(queries, n, k) + queries * k * k + top_k(queries, k * k, k),
    }


@values_read_of(MidusHmlOptions)
def midus_hml_values_read(options: MidusHmlOptions, sizes: ModelSizes) -> int:
    return sizes.num_heads * options.k * (sizes.hidden_size // sizes.num_heads)


@flops_of(MidusHmlOptions)
def midus_hml_flops(
    options: MidusHmlOptions, sizes: ModelSizes, batch: int, tokens: int, index: int, count: int
) -> dict[str, int]:
    """Count the operations; like the op, transform each token's sum, or each row if rows are fewer."""
    rows, width = batch * tokens, sizes.hidden_size // sizes.num_heads
    transformed = min(rows, options.n * options.n) * sizes.num_heads
    return {
        **sub_key_flops(rows * sizes.num_heads, options.n, options.query_width(sizes), options.k),
        "values": linear(rows * sizes.num_heads, options.k, width) + linear(transformed, width, width),
        **weighing_flops(options, sizes, rows),
    }
