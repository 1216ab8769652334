"""Decoder layer that is inserted for a memory."""

from typing import ClassVar

import torch
from torch import nn
from transformers import PreTrainedConfig

from midus_hf.memories.entries import Memories
from midus_hf.memories.hosting.inputs import MemoryInputs
from midus_hf.memories.hosting.parts import LayerNames, MissingPart, projection_name
from midus_hf.memories.module import build_memory
from midus_hf.memories.options import InsertedOptions


class MemoryBlock(LayerNames):
    """Mixin that turns a family's decoder layer into a MIDUS block, `M(x) = x + Mem(Attn'(LN(x)))` (equations 7 and 18).

    The family's layer is built first, so its parts keep their names, their place in the cache and their class: masks, caches,
    checkpointing and output capture treat the block as any other layer. The block then drops the feed-forward network, every norm
    except the one before attention, and, unless the memory wants them, attention's output projection and output norm. The memory's
    output is added directly to the residual stream: an output norm (Gemma) would give a zero output a gradient of 1 / sqrt(eps).
    """

    # Class of the attention whose heads a memory can read; None if the family's layers have none.
    block_attention: ClassVar[type[nn.Module] | None] = None

    def host(self, config: PreTrainedConfig, layer_idx: int, memories: Memories) -> None:
        """Drop what the block does not need of a layer of the family, whose class has just become this one, and build its memory.

        Raises:
            RequestError: If the layer has no attention whose heads a memory can read.
        """
        self.layer_idx, entry = layer_idx, memories.inserted[layer_idx]
        options = entry.options
        assert isinstance(options, InsertedOptions)
        self.attention_name, self.adds_block_input = self.mixer_name, options.inner_residual
        self.output_norm = self.attention_output_norm if options.output_projection else None
        kept = self.attention_name, self.attention_norm, self.output_norm
        for name in [name for name, _ in self.named_children() if name not in kept]:
            delattr(self, name)
        for name in [*self._parameters, *self._buffers]:  # such as Gemma 4's factor of a layer's output
            delattr(self, name)
        if self.block_attention is None or not isinstance(getattr(self, self.attention_name), self.block_attention):
            raise MissingPart(f"layer {layer_idx} of class {self.family_class.__name__}", "inserted")
        if not options.output_projection:  # attention then returns the heads' outputs side by side
            attention = getattr(self, self.attention_name)
            name = projection_name(attention, "output_projection")
            delattr(attention, name)
            setattr(attention, name, _NoProjection())
        sizes = memories.sizes.at(layer_idx)
        self.memory = build_memory(options, sizes, entry.layers.index(layer_idx), len(entry.layers))
        self.memory_class = type(self.memory)  # stored, since PEFT may wrap the memory
        self.takes_inputs = bool(self.memory.forward_arguments or self.memory.services)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *args: object,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        memory_inputs: MemoryInputs | None = None,
        **kwargs: object,
    ) -> torch.Tensor:
        """Return the residual stream behind this layer. Arguments that are not listed here are the family layer's.

        Args:
            hidden_states: The residual stream before this layer, `[B, T, D]`.
            args: Inputs of parts that the block dropped, such as the per-layer embeddings of Gemma 4; not used.
            memory_inputs: Inputs of the pass for memories. Default: none.
            kwargs: Other arguments of the family's attention.
        """
        attention_output, _ = getattr(self, self.attention_name)(
            hidden_states=hidden_states
            if self.attention_norm is None
            else getattr(self, self.attention_norm)(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            **kwargs,
        )  # [B, T, H * d], or [B, T, D] with an output projection
        if self.output_norm is not None:
            attention_output = getattr(self, self.output_norm)(attention_output)
        if self.adds_block_input:
            attention_output = hidden_states + attention_output
        if self.takes_inputs and memory_inputs is not None:
            inputs = memory_inputs.arguments_for(self.memory_class, "", self.layer_idx)
            return self.memory(attention_output, hidden_states, **inputs)
        return self.memory(attention_output, hidden_states)


class _NoProjection:
    """Stand-in for a removed projection. A module would not do: PEFT would find a module for a LoRA on every `o_proj`.

    Some families' projections take the index of the layer as well.
    """

    def __init__(self) -> None:
        self.weight = torch.empty(0)  # some families draw the weight themselves, from a normal distribution

    def __call__(self, heads_output: torch.Tensor, *_: object) -> torch.Tensor:
        """Return the outputs of the heads unchanged."""
        return heads_output
