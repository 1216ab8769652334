"""The head-wise memory layer (HML) of MIDUS."""

import math

import torch

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.midus_hml.options import MidusHmlOptions
from midus_hf.memories.registry import register_layer
from midus_hf.memories.retrieval.layer import RetrievalMemory
from midus_hf.ops.midus_hml.op import headwise_memory
from midus_hf.ops.product_key.op import product_key_topk


@register_layer(MidusHmlOptions)
class MidusHmlMemory(RetrievalMemory):
    """A memory per head, queried by its output of any width (MIDUS, section 4.2, equations 11 to 17)."""

    row_keys: torch.Tensor
    column_keys: torch.Tensor
    value_transform: torch.Tensor

    def __init__(self, options: MidusHmlOptions, sizes: ModelSizes):
        super().__init__(options, sizes)
        self.head_dim, self.value_dim = self.query_width, sizes.hidden_size // sizes.num_heads

    def queries(self, attention_output: torch.Tensor, track_statistics: bool = True) -> torch.Tensor:
        by_head = attention_output.reshape(*attention_output.shape[:-1], self.num_heads, self.head_dim)
        return self.addressed(by_head, track_statistics)

    def select(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return product_key_topk(query, self.row_keys, self.column_keys, self.k)

    def forward(self, attention_output: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return values for the heads' outputs side by side `[B, T, H * d]`, plus `residual` if given."""
        shape = attention_output.shape[:-1]
        tokens = math.prod(shape)  # S = B * T; `numel` would fix the sizes of a traced graph
        flat = attention_output.reshape(tokens, self.num_heads, self.head_dim)  # [S, H, d]
        query, by_head = self.addressed(flat), None
        if residual is not None:
            by_head = residual.reshape(tokens, self.num_heads, self.value_dim)
        expanded = None if self.decode_cache is None else self.decode_cache.read(self, attention_output)
        bank, transform = (self.value_bank, self.value_transform) if expanded is None else (expanded, None)
        keys = (self.row_keys, self.column_keys)
        output = headwise_memory(query, *keys, bank, transform, self.k, residual=by_head)  # [S, H, D / H]
        return output.reshape(*shape, self.num_heads * self.value_dim)
