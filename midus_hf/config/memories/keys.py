"""Keys that queries are compared with."""

import math

from midus_hf.config.declared_tensors import DeclaredTensor, Uniform
from midus_hf.config.flops.rules import linear, top_k


def sub_keys(num_heads: int, n: int, query_width: int) -> dict[str, DeclaredTensor]:
    """Row and column keys `[H, n, query_width / 2]`: uniform in +-1 over the square root of their width (Lample et al.)."""
    width = query_width // 2
    keys = DeclaredTensor((num_heads, n, width), "key", key_initial(width))
    return {"row_keys": keys, "column_keys": keys}


def sub_key_flops(queries: int, n: int, query_width: int, k: int) -> dict[str, int]:
    """Operations that find the k best pairs of sub-keys: k rows, k columns, and k among the k * k sums of both."""
    return {
        "scores": 2 * linear(queries, query_width // 2, n),
        "choice": 2 * top_k(queries, n, k) + queries * k * k + top_k(queries, k * k, k),
    }


def key_initial(width: int) -> Uniform:
    """What keys of a width start as."""
    return Uniform(1.0 / math.sqrt(width))
