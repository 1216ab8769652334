"""Qwen2 with memory."""

from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import Qwen2DecoderLayer, Qwen2ForCausalLM, Qwen2Model

from midus_hf.models.block import MemoryBlock
from midus_hf.models.families import register_family
from midus_hf.models.host import MemoryConfig, MemoryForCausalLM, MemoryModel


class MidusQwen2Config(MemoryConfig, Qwen2Config):
    """`Qwen2Config` with a list of memory entries."""

    model_type = "midus_qwen2"
    memory: list | None = None


class MidusQwen2MemoryBlock(MemoryBlock, Qwen2DecoderLayer):
    """A `Qwen2DecoderLayer` whose feed-forward network is a memory."""


class MidusQwen2Model(MemoryModel, Qwen2Model):
    """`Qwen2Model` with memory blocks among its layers."""

    config: MidusQwen2Config
    memory_block_class = MidusQwen2MemoryBlock


@register_family
class MidusQwen2ForCausalLM(MemoryForCausalLM, Qwen2ForCausalLM):
    """`Qwen2ForCausalLM` over a `MidusQwen2Model`."""

    config: MidusQwen2Config
    model_class = MidusQwen2Model
