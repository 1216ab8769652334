"""The decoder layer that was inserted for a memory, and the attention in front of it."""

from typing import Any, ClassVar

import torch
from torch import nn

from midus_hf.config.memory_entries import Memories, inserted_options
from midus_hf.memory.registry import build_memory
from midus_hf.models.memory_inputs import MemoryInputs
from midus_hf.models.norms import NamesNorms


class MemoryBlock(NamesNorms):
    """Mixin that turns a family's decoder layer into a MIDUS block, `M(x) = x + Mem(Attn'(LN(x)))` (equations 7 and 18).

    The family's layer is built first, so what it has keeps its name, its place in the cache and its class: masks, caches,
    checkpointing and output capture treat it as any other layer. It loses the feed-forward network, every norm but the one in front
    of attention, and, unless the memory wants them, the output projection and the norm behind it. The memory's output goes straight
    into the residual stream: an output norm (Gemma) at its start value of zero would have a gradient of 1 / sqrt(eps).

    Args:
        config: Of the model.
        layer_idx: Index of the layer.
        memories: Of the model.
    """

    block_attention_class: ClassVar[type[nn.Module]]
    self_attn: Any

    def __init__(self, config, layer_idx: int, memories: Memories):
        super().__init__(config, layer_idx)
        self.layer_idx = layer_idx
        entry = memories.inserted[layer_idx]
        options = inserted_options(entry)
        output_norm = self.attention_output_norm if options.keeps_output_projection else None
        self.normalises_output, self.adds_block_input = output_norm is not None, options.adds_block_input
        for name in [
            name for name, _ in self.named_children() if name not in ("self_attn", self.attention_norm, output_norm)
        ]:
            delattr(self, name)
        self.self_attn = self.block_attention_class(config, layer_idx)
        if not options.keeps_output_projection:
            self.self_attn.drop_output_projection()
        self.memory = build_memory(options, memories.sizes, entry.layers.index(layer_idx), len(entry.layers))
        self.memory_class = type(self.memory)  # what PEFT wraps does not tell its class
        self.asks = bool(self.memory.inputs or self.memory.asks)

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        memory_inputs: MemoryInputs | None = None,
        **kwargs,
    ) -> torch.Tensor:
        """Map the residual stream `[B, T, D]` to itself behind this layer.

        Args:
            hidden_states: `[B, T, D]`.
            attention_mask: As the family's layer takes it.
            position_ids: As the family's layer takes them.
            past_key_values: As the family's layer takes them.
            memory_inputs: What the pass brings to memories. Default: nothing.
            kwargs: What the family's attention takes.
        """
        attention_output, _ = self.self_attn(
            hidden_states=self.normalised(self.attention_norm, hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )  # [B, T, H * d], or [B, T, D] with an output projection
        if self.normalises_output:
            attention_output = self.normalised(self.attention_output_norm, attention_output)
        if self.adds_block_input:
            attention_output = hidden_states + attention_output
        if self.asks and memory_inputs is not None:
            inputs = memory_inputs.of(self.memory_class, "", self.layer_idx)
            return self.memory(attention_output, hidden_states, **inputs)
        return self.memory(attention_output, hidden_states)


class BlockAttention:
    """Mixin for a family's attention in a memory block, which may lack its output projection. The forward is the family's own."""

    def drop_output_projection(self) -> None:
        """Give the heads' outputs side by side."""
        del self.o_proj
        # A function, not an `nn.Identity`: a LoRA on every `o_proj` would find the module and refuse it.
        self.o_proj = _unchanged


def _unchanged(heads_output: torch.Tensor) -> torch.Tensor:
    return heads_output
