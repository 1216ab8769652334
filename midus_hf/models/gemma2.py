"""Gemma2 with memory."""

from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2DecoderLayer, Gemma2ForCausalLM, Gemma2Model

from midus_hf.models.block import MemoryBlock
from midus_hf.models.families import register_family
from midus_hf.models.host import MemoryConfig, MemoryForCausalLM, MemoryModel


class MidusGemma2Config(MemoryConfig, Gemma2Config):
    """`Gemma2Config` with a list of memory entries."""

    model_type = "midus_gemma2"
    memory: list | None = None


class MidusGemma2MemoryBlock(MemoryBlock, Gemma2DecoderLayer):
    """A `Gemma2DecoderLayer` whose feed-forward network is a memory."""

    attention_output_norm = "post_attention_layernorm"


class MidusGemma2Model(MemoryModel, Gemma2Model):
    """`Gemma2Model` with memory blocks among its layers."""

    config: MidusGemma2Config
    memory_block_class = MidusGemma2MemoryBlock


@register_family
class MidusGemma2ForCausalLM(MemoryForCausalLM, Gemma2ForCausalLM):
    """`Gemma2ForCausalLM` over a `MidusGemma2Model`."""

    config: MidusGemma2Config
    model_class = MidusGemma2Model
