"""Declarations and prices of the keys that queries are compared with."""

import math

from midus_hf.config.declared_tensors import DeclaredTensor, Uniform
from midus_hf.config.flops.rules import linear, top_k


def sub_keys(num_heads: int, n: int, query_width: int) -> dict[str, DeclaredTensor]:
    """Declare row and column keys `[H, n, w]`, w = query_width / 2, uniform within +-1 / sqrt(w) (Lample et al.)."""
    width = query_width // 2
    keys = DeclaredTensor((num_heads, n, width), "key", key_initial(width))
    return {"row_keys": keys, "column_keys": keys}


def sub_key_flops(queries: int, n: int, query_width: int, k: int) -> dict[str, int]:
    """Count the operations that find the k best pairs of sub-keys: k rows, k columns, then k of the k * k sums of both."""
    return {
        "scores": 2 * linear(queries, query_width // 2, n),
        "choice": 2 * top_k(queries, n, k) + queries * k * k + top_k(queries, k * k, k),
    }


def key_initial(width: int) -> Uniform:
    """Return the initial values of keys of a width: uniform within +-1 / sqrt(width)."""
    return Uniform(1.0 / math.sqrt(width))
