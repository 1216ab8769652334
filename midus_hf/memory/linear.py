"""Linear, or flat, memory behind attention, as MIDUS compares itself with it."""

import torch

from midus_config.installed import not_carried
from midus_config.memories.linear import LinearOptions
from midus_hf.memory.registry import register_memory
from midus_hf.memory.shared_values import SharedValueMemory
from midus_hf.ops.dispatch.precision import without_autocast
from midus_hf.ops.product_key.flat import flat_key_topk


@register_memory("linear")
class LinearMemory(SharedValueMemory):
    """A key per slot and head, compared with every query, over shared values of full width (MIDUS, equations 4 and 5).

    Args:
        options: `LinearOptions`.
        sizes: Of the model.
    """

    options: LinearOptions
    slot_keys: torch.Tensor

    def select(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return flat_key_topk(query, self.slot_keys, self.k)

    def sub_key_scores(self, query: torch.Tensor) -> list[torch.Tensor]:
        score_dtype = torch.promote_types(query.dtype, torch.float32)
        with without_autocast(query.device.type):
            keys = self.slot_keys.to(query.dtype).to(score_dtype)
            return [torch.einsum("...hd,hnd->...hn", query.to(score_dtype), keys)]

    @not_carried
    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, slots={len(self.value_bank)}, k={self.k}, query_norm={self.query_norm}"
