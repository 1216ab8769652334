"""Heads that also read what earlier layers wrote at their own position (Mixture-of-Depths Attention, section 2)."""

from collections.abc import Sequence
from typing import Any

import torch

from midus_hf.config.declared_tensors import ModelSizes
from midus_hf.memories.hosting.heads import HeadsOutput, SequenceHeads, require_log_sum_exp
from midus_hf.memories.moda.options import ModaOptions, SlotSource
from midus_hf.memories.moda.site import ModaSite
from midus_hf.memories.module import MemoryModule
from midus_hf.memories.registry import register_layer
from midus_hf.ops.moda.op import depth_attention
from midus_hf.ops.moda.reference import join_factors, joint_attention


@register_layer(ModaOptions)
class ModaMemory(MemoryModule):
    """A layer's part of attention over the depth: a gate per head, and projections of the slots that the layer writes."""

    sites = (ModaSite,)

    options: ModaOptions

    def __init__(self, options: ModaOptions, sizes: ModelSizes):
        super().__init__(options, sizes)
        self.kv_heads = sizes.num_key_value_heads

    @classmethod
    def check_attention(cls, implementation: str | None) -> None:
        """Refuse an implementation that does not return the log-sum-exp of its softmax."""
        require_log_sum_exp(implementation)

    def forward(self, read: torch.Tensor, *, slot: SlotSource | None = None, **depth: Any) -> Any:
        """Write a slot, or read the slots of earlier layers.

        Args:
            read: Hidden states `[B, T, D]` if a slot is written; else queries `[B, H, T, d]`, rotated as the slots are.
            slot: Source of the slot to write. Default: none, slots are read.
            depth: Arguments of `attend` other than the queries, if slots are read.

        Returns:
            A key and a value, each `[B, K, T, d]`, before norm and rotation; or the result of `attend`.
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
    ) -> HeadsOutput:
        """Attend to the sequence and to the slots, and join both results (`joint_attention`).

        Args:
            query: `[B, H, T, d]`, rotated as the keys of the slots are.
            sequence: The layer's attention to the sequence.
            keys: n tensors `[B, K, T, d]`, from the oldest slot to the newest.
            values: n tensors `[B, K, T, d]`, in the same order.

        Returns:
            The output of the heads, `[B, T, H, d]`, and attention weights to the sequence, if they are known, which sum to 1 minus
            the weight of the depth.
        """
        output, weights, lse = sequence.with_log_sum()
        read, depth_lse = depth_attention(query, keys, values, sequence.scaling, sequence.softcap)
        gate = lse.new_ones(read.shape[1]) if self.gate is None else self.gate  # [H]
        gate = gate[:, None].expand_as(depth_lse)
        joined = joint_attention(output.transpose(1, 2), lse, read, depth_lse, gate, self.is_added)
        if weights is not None:
            of_sequence, _ = join_factors(lse, depth_lse, gate, self.is_added)
            weights = weights * of_sequence.unsqueeze(-1).to(weights.dtype)
        return joined.transpose(1, 2), weights

    @property
    def gate(self) -> torch.Tensor | None:
        """The gate c of each head, `[H]`, from 0 to 1; None if c is always 1."""
        return None if self.options.joining == "joint" else _Bounded.apply(self.depth_gate)

    @property
    def is_added(self) -> bool:
        """True if heads also add their read of the depth, times 1 - c (`joining` is `added`)."""
        return self.options.joining == "added"


class _Bounded(torch.autograd.Function):
    """Numbers clamped to 0 ... 1. The gradient passes unchanged, unless a step along it would leave the range.

    So a gate of 0 learns, and no gate moves so far out of the range that it cannot come back.
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
