"""Product-key memory (PKM) behind attention, as MIDUS compares itself with it."""

import torch

from midus_config.installed import not_carried
from midus_config.memories.product_key import ProductKeyOptions
from midus_config.model_sizes import ModelSizes
from midus_hf.memory.registry import register_memory
from midus_hf.memory.shared_values import SharedValueMemory
from midus_hf.ops.product_key.op import product_key_topk
from midus_hf.ops.product_key.reference import sub_key_scores


@register_memory("product-key")
class ProductKeyMemory(SharedValueMemory):
    """Product keys per head over shared values of full width (MIDUS, equations 11 to 15; Lample et al. 2019).

    Args:
        options: `ProductKeyOptions`.
        sizes: Of the model.
    """

    row_keys: torch.Tensor
    column_keys: torch.Tensor

    def __init__(self, options: ProductKeyOptions, sizes: ModelSizes):
        super().__init__(options, sizes)
        self.n = options.n

    def select(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return product_key_topk(query, self.row_keys, self.column_keys, self.k)

    def sub_key_scores(self, query: torch.Tensor) -> list[torch.Tensor]:
        return list(sub_key_scores(query, self.row_keys, self.column_keys))

    @not_carried
    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, n={self.n}, k={self.k}, query_norm={self.query_norm}"
