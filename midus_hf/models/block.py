"""Decoder layer that is inserted for a memory, and the attention before the memory."""

from typing import Any, ClassVar

import torch
from torch import nn

from midus_hf.config.memory_entries import Memories, inserted_options
from midus_hf.memory.registry import build_memory
from midus_hf.models.memory_inputs import MemoryInputs
from midus_hf.models.norms import NamesNorms


class MemoryBlock(NamesNorms):
    """Mixin that turns a family's decoder layer into a MIDUS block, `M(x) = x + Mem(Attn'(LN(x)))` (equations 7 and 18).

    The family's layer is built first, so its parts keep their names, their place in the cache and their class: masks, caches,
    checkpointing and output capture treat the block as any other layer. The block then drops the feed-forward network, every norm
    except the one before attention, and, unless the memory wants them, attention's output projection and output norm. The memory's
    output is added directly to the residual stream: an output norm (Gemma) would give a zero output a gradient of 1 / sqrt(eps).

    Args:
        config: Config of the model.
        layer_idx: Index of the layer.
        memories: Memories of the model.
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
        self.memory_class = type(self.memory)  # stored, since PEFT may wrap the memory
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
        """Return the residual stream behind this layer. Arguments that are not listed here are the family layer's.

        Args:
            hidden_states: The residual stream before this layer, `[B, T, D]`.
            memory_inputs: Inputs of the pass for memories. Default: none.
            kwargs: Other arguments of the family's attention.
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
    """Mixin for a family's attention in a memory block, whose output projection can be removed. The forward is the family's own."""

    def drop_output_projection(self) -> None:
        """Remove the output projection, so that attention returns the heads' outputs side by side."""
        del self.o_proj
        # A function, not an `nn.Identity`: PEFT would find the module for a LoRA on every `o_proj`, and refuse it.
        self.o_proj = _unchanged


def _unchanged(heads_output: torch.Tensor) -> torch.Tensor:
    return heads_output
