"""Heads that also read what earlier layers wrote at their own position (Mixture-of-Depths Attention, section 2)."""

from collections.abc import Sequence
from typing import Any

import torch

from midus_hf.config.memories.depth_attention import DepthAttentionOptions, SlotSource
from midus_hf.config.model_sizes import ModelSizes
from midus_hf.memory.registry import MemoryModule, register_memory
from midus_hf.memory.sequence_heads import SequenceHeads
from midus_hf.ops.depth.joining import Depth

_VALUES = ("attention_value", "ffn_value")
"""What names of the tensors begin with that make values of slots."""


@register_memory("depth-attention")
class DepthAttention(MemoryModule):
    """What a layer has for attention over the depth: a gate per head, and projections of the slots that it writes.

    Args:
        options: `DepthAttentionOptions`.
        sizes: Of the model.
    """

    options: DepthAttentionOptions

    def __init__(self, options: DepthAttentionOptions, sizes: ModelSizes):
        super().__init__(options, sizes)
        self.kv_heads = sizes.num_key_value_heads

    def forward(self, read: torch.Tensor, *, slot: SlotSource | None = None, **depth: Any) -> Any:
        """Write a slot, or read those of earlier layers.

        Args:
            read: What there is to read: `[B, T, D]` for a slot, queries `[B, H, T, d]` as slots are rotated otherwise.
            slot: Which slot to write. Default: none.
            depth: What `attend` takes beside queries, if there is none to write.

        Returns:
            A key and a value, `[B, K, T, d]`, in front of norm and rotation; or what `attend` returns.
        """
        return self.attend(read, **depth) if slot is None else self._project(read, slot)

    def _project(self, read: torch.Tensor, source: SlotSource) -> tuple[torch.Tensor, torch.Tensor]:
        key, value = (self._projected(read, f"{source}_{part}") for part in ("key", "value"))
        return key, value

    def _projected(self, read: torch.Tensor, name: str) -> torch.Tensor:
        projected = getattr(self, name)(read)
        if self.options.bias:
            projected = projected + getattr(self, f"{name}_bias")
        return projected.unflatten(-1, (self.kv_heads, -1)).transpose(1, 2)

    def attend(
        self,
        query: torch.Tensor,
        *,
        sequence: SequenceHeads,
        keys: Sequence[torch.Tensor],
        values: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read the sequence and the slots, and join both (`joint_attention`).

        Args:
            query: `[B, H, T, d]`, rotated as keys are.
            sequence: What heads read of the sequence.
            keys: n of `[B, K, T, d]`, from the oldest slot to the newest.
            values: n of `[B, K, T, d]`.

        Returns:
            `[B, T, H, d]`; attention weights, if the sequence's are known.
        """
        return sequence.joined(
            Depth(query, keys, values, sequence.scaling, sequence.softcap, self.gate, self.is_added)
        )

    @property
    def gate(self) -> torch.Tensor | None:
        """c of each head, `[H]`; None where it is 1."""
        return None if self.options.joining == "joint" else _Bounded.apply(self.depth_gate)

    @property
    def is_added(self) -> bool:
        """Whether what is read of the depth is added to the sequence's, as far as c leaves it."""
        return self.options.joining == "added"

    def names_it_acts_through(self) -> list[str]:
        gates = self.names_of("gate")
        if self.options.joining != "added":
            return gates
        # Zero values still have a share in what opens another layer's gate, so a layer without a gate of its own is left out, as is
        # one whose own keys and values are read.
        values = [name for name in self.names_of("projection") if name.startswith(_VALUES)]
        return [*values, *gates] if values and gates and self.options.attention_slots != "reused" else []


class _Bounded(torch.autograd.Function):
    """A number from 0 to 1; its gradient is that of the number unless it would lead further out.

    So a gate of 0 learns, and none ends where it cannot come back from.
    """

    @staticmethod
    def forward(ctx: Any, raw: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(raw)
        return raw.clamp(0, 1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        (raw,) = ctx.saved_tensors
        (gradient,) = gradients
        outward = ((raw <= 0) & (gradient > 0)) | ((raw >= 1) & (gradient < 0))
        return gradient.masked_fill(outward, 0)
