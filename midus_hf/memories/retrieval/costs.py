"""FLOPs that are the same for all memories of slots."""

from midus_hf.config.flops import SOFTMAX, layer_norm, linear, top_k
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memories.retrieval.options import RetrievalOptions


def weighing_flops(options: RetrievalOptions, sizes: ModelSizes, rows: int) -> dict[str, int]:
    """Count the operations of the query norm, the softmax over slots and the residual adds.

    The query norm has one count, whether its statistics come from features, from a batch or from running statistics.
    """
    queries = rows * sizes.num_heads
    return {
        "query norm": 0 if options.query_norm == "none" else layer_norm(queries, options.query_width(sizes)),
        "weights": queries * options.k * SOFTMAX,
        "residual adds": rows * sizes.hidden_size * (2 if options.inner_residual else 1),
    }


def sub_key_flops(queries: int, n: int, query_width: int, k: int) -> dict[str, int]:
    """Count the operations that find the k best pairs of sub-keys: k rows, k columns, then k of the k * k sums of both."""
    return {
        "scores": 2 * linear(queries, query_width // 2, n),
        "choice": 2 * top_k(queries, n, k) + queries * k * k + top_k(queries, k * k, k),
    }
