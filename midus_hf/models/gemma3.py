"""Gemma3 (text) with memory."""

from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import Gemma3DecoderLayer, Gemma3ForCausalLM, Gemma3TextModel

from midus_hf.models.block import MemoryBlock
from midus_hf.models.families import register_family
from midus_hf.models.host import MemoryConfig, MemoryForCausalLM, MemoryModel


class MidusGemma3Config(MemoryConfig, Gemma3TextConfig):
    """`Gemma3TextConfig` with a list of memory entries."""

    model_type = "midus_gemma3_text"
    memory: list | None = None


class MidusGemma3MemoryBlock(MemoryBlock, Gemma3DecoderLayer):
    """A `Gemma3DecoderLayer` whose feed-forward network is a memory."""

    attention_output_norm = "post_attention_layernorm"


class MidusGemma3Model(MemoryModel, Gemma3TextModel):
    """`Gemma3TextModel` with memory blocks among its layers."""

    config: MidusGemma3Config
    memory_block_class = MidusGemma3MemoryBlock


@register_family
class MidusGemma3ForCausalLM(MemoryForCausalLM, Gemma3ForCausalLM):
    """`Gemma3ForCausalLM` over a `MidusGemma3Model`."""

    config: MidusGemma3Config
    model_class = MidusGemma3Model
