"""Linear, or flat, memory behind attention, as MIDUS compares itself with it."""

import dataclasses
from typing import Any

import torch
from torch import nn

from midus_hf.memory.registry import register_memory
from midus_hf.memory.retrieval import check_whole
from midus_hf.memory.shared_values import SharedValueMemory, SharedValueOptions
from midus_hf.ops.flat_key import flat_key_topk
from midus_hf.ops.precision import without_autocast


@dataclasses.dataclass(kw_only=True)
class LinearOptions(SharedValueOptions):
    """Options of a linear memory, beside those of `SharedValueOptions`.

    Args:
        slots: N, values and keys per head. Default: 4096.

    Raises:
        ValueError: If `slots` or `k` is not a whole number or not positive, `k` exceeds `slots`, or another value is
            not one of those named.
    """

    slots: int = 4096

    def __post_init__(self) -> None:
        super().__post_init__()
        check_whole("slots", self.slots)
        if not 1 <= self.k <= self.slots:
            raise ValueError(f"k is {self.k}; expected 1 <= k <= slots = {self.slots}. Lower k or raise slots.")


@register_memory("linear", LinearOptions)
class LinearMemory(SharedValueMemory):
    """A key a slot and head, compared with every query, over shared values of full width (MIDUS, equations 4 and 5).

    Args:
        hidden_size: D; a multiple of `num_heads`.
        num_heads: H, lookups per token.
        slots: N. Default: 4096.
        k: Slots retrieved a head and token. Default: 4.
        norm_and_gate: `query_norm`, `temperature` and `gate`, as in `RetrievalOptions`.

    Raises:
        ValueError: If `hidden_size` is no multiple of `num_heads`.
    """

    key_value_parameters = ("slot_keys", "value_bank")

    def __init__(self, *, hidden_size: int, num_heads: int, slots: int = 4096, k: int = 4, **norm_and_gate: Any):
        super().__init__(hidden_size=hidden_size, num_heads=num_heads, slots=slots, k=k, **norm_and_gate)
        self.slot_keys = nn.Parameter(torch.empty(num_heads, slots, self.query_width))
        self.reset_parameters()

    def select(self, query: torch.Tensor, backend: str = "auto") -> tuple[torch.Tensor, torch.Tensor]:
        return flat_key_topk(query, self.slot_keys, self.k, backend=backend)

    def sub_key_scores(self, query: torch.Tensor) -> list[torch.Tensor]:
        score_dtype = torch.promote_types(query.dtype, torch.float32)
        with without_autocast(query.device.type):
            keys = self.slot_keys.to(query.dtype).to(score_dtype)
            return [torch.einsum("...hd,hnd->...hn", query.to(score_dtype), keys)]

    def extra_repr(self) -> str:
        return f"num_heads={self.num_heads}, slots={len(self.value_bank)}, k={self.k}, query_norm={self.query_norm}"
