"""Memories that MIDUS compares to head-wise memory: one table of values for all heads."""

import torch
from torch import nn

from midus_hf.memories.midus_baselines.options import MidusLinearOptions, MidusPkmOptions
from midus_hf.memories.registry import register_layer
from midus_hf.memories.retrieval.layer import RetrievalMemory
from midus_hf.ops.gather.op import weighted_gather
from midus_hf.ops.product_key.op import product_key_topk
from midus_hf.ops.product_key.reference import flat_key_topk


class SharedValueMemory(RetrievalMemory):
    """A memory with a query projection, keys per head, and values that all heads read and sum over."""

    query_projection: nn.Linear

    def queries(self, attention_output: torch.Tensor, track_statistics: bool = True) -> torch.Tensor:
        query = self.query_projection(attention_output)  # [B, T, D]
        query = query.unflatten(-1, (self.num_heads, self.query_width))
        return self.addressed(query, track_statistics)

    def forward(self, attention_output: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return values `[B, T, D]`, summed over heads (MIDUS, equation 15), plus `residual` if given."""
        scores, slots = self.select(self.queries(attention_output))  # [B, T, H, k]
        bank, weights = self.value_bank.to(attention_output.dtype), scores.softmax(dim=-1)
        output = weighted_gather(bank, slots.flatten(-2), weights.flatten(-2))  # [B, T, D]
        return output if residual is None else (residual + output).to(residual.dtype)


@register_layer(MidusLinearOptions)
class MidusLinearMemory(SharedValueMemory):
    """Keys, all compared with every query, over shared values of full width (MIDUS, equations 4 and 5)."""

    slot_keys: torch.Tensor

    def select(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flat_key_topk(query, self.slot_keys, self.k)


@register_layer(MidusPkmOptions)
class MidusPkmMemory(SharedValueMemory):
    """Product keys over shared values of full width (MIDUS, equations 11 to 15; Lample et al. 2019)."""

    row_keys: torch.Tensor
    column_keys: torch.Tensor

    def select(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return product_key_topk(query, self.row_keys, self.column_keys, self.k)
