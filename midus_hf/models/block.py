"""The inserted decoder layer: attention, then a memory in place of the feed-forward network."""

from typing import ClassVar

import torch

from midus_config.memory_types import InsertedOptions
from midus_config.model_sizes import ModelSizes
from midus_hf.memory.registry import build_memory


class MemoryBlock:
    """Mixin that turns a family's decoder layer into a MIDUS block, `M(x) = x + Mem(Attn'(LN(x)))` (equations 7 and 18).

    The family's layer is built first and then loses what a block does not have: the feed-forward network, every norm
    but the one before attention, and, unless the memory wants them, the output projection and the norm behind it. What
    is left keeps its names, its place in the cache and its class, so masks, caches, checkpointing and output capture
    treat it as any other layer. The memory's output goes straight into the residual stream: an output norm (Gemma) at
    its start value of zero would have a gradient of 1 / sqrt(eps).
    """

    attention_output_norm: ClassVar[str | None] = None
    """The norm that the family puts behind its attention's output projection."""

    def __init__(self, config, layer_idx: int, options: InsertedOptions):
        super().__init__(config, layer_idx)
        self.normalises_output = options.keeps_output_projection and self.attention_output_norm is not None
        self.adds_block_input = options.adds_block_input
        kept = {"self_attn", "input_layernorm", self.attention_output_norm if self.normalises_output else None}
        for name in [name for name, _ in self.named_children() if name not in kept]:
            delattr(self, name)
        if not options.keeps_output_projection:
            # A function, not an `nn.Identity`: a LoRA on every `o_proj` would find the module and refuse it.
            del self.self_attn.o_proj
            self.self_attn.o_proj = _unchanged
        self.memory = build_memory(options, ModelSizes.of(config))

    def forward(
        self,
        hidden_states: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        past_key_values=None,
        **kwargs,
    ) -> torch.Tensor:
        """Map the residual stream `[B, T, D]` to itself plus what the memory retrieves."""
        attention_output, _ = self.self_attn(
            hidden_states=self.input_layernorm(hidden_states),
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            **kwargs,
        )  # [B, T, H * d], or [B, T, D] behind an output projection
        if self.normalises_output:
            attention_output = getattr(self, self.attention_output_norm)(attention_output)
        if self.adds_block_input:
            attention_output = hidden_states + attention_output
        return self.memory(attention_output, hidden_states)


def _unchanged(heads_output: torch.Tensor) -> torch.Tensor:
    return heads_output
