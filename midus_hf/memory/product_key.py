"""Product-key memory (PKM) behind attention, as MIDUS compares itself with it."""

import dataclasses
from typing import Any

import torch
from torch import nn

from midus_hf.memory.registry import register_memory
from midus_hf.memory.retrieval import check_whole
from midus_hf.memory.shared_values import SharedValueMemory, SharedValueOptions
from midus_hf.ops.product_key import product_key_topk, sub_key_scores


@dataclasses.dataclass(kw_only=True)
class ProductKeyOptions(SharedValueOptions):
    """Options of a product-key memory, beside those of `SharedValueOptions`.

    Args:
        n: Sub-keys per side; every head addresses the same `n * n` values. Default: 64.

    Raises:
        ValueError: If `n` or `k` is not a whole number or not positive, `k` exceeds `n`, or another value is not one
            of those named.
    """

    n: int = 64

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("n", self.n)
        if self.n < 1:
            raise ValueError(f"n is {self.n}; expected at least one sub-key a side.")
        if not 1 <= self.k <= self.n:
            raise ValueError(f"k is {self.k}; expected 1 <= k <= n = {self.n}. Lower k or raise n.")


@register_memory("product-key", ProductKeyOptions)
class ProductKeyMemory(SharedValueMemory):
    """Product keys per head over shared values of full width (MIDUS, equations 11 to 15; Lample et al. 2019).

    Args:
        hidden_size: D; a multiple of `num_heads`, each of whose shares is even.
        num_heads: H, lookups per token.
        n: Sub-keys per side. Default: 64.
        k: Slots retrieved a head and token. Default: 4.
        norm_and_gate: `query_norm`, `temperature` and `gate`, as in `RetrievalOptions`.

    Raises:
        ValueError: If `hidden_size` is no multiple of `num_heads`, or D / H is odd.
    """

    key_value_parameters = ("row_keys", "column_keys", "value_bank")

    def __init__(self, *, hidden_size: int, num_heads: int, n: int = 64, k: int = 4, **norm_and_gate: Any):
        super().__init__(hidden_size=hidden_size, num_heads=num_heads, slots=n * n, k=k, **norm_and_gate)
        if self.query_width % 2:
            raise ValueError(
                f"hidden_size / num_heads is {self.query_width}; expected an even number, half for rows and half for "
                "columns."
            )
        self.n = n
        self.row_keys = nn.Parameter(torch.empty(num_heads, n, self.query_width // 2))
        self.column_keys = nn.Parameter(torch.empty(num_heads, n, self.query_width // 2))
        self.reset_parameters()

    def select(self, query: torch.Tensor, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
        return product_key_topk(query, self.row_keys, self.column_keys, self.k, backend=backend)

    def sub_key_scores(self, query: torch.Tensor) -> list[torch.Tensor]:
        return list(sub_key_scores(query, self.row_keys, self.column_keys))

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, n={self.n}, k={self.k}, query_norm={self.query_norm}"
