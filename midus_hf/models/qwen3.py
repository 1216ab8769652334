"""Qwen3 with memory."""

from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3ForCausalLM, Qwen3Model

from midus_hf.models.block import MemoryBlock
from midus_hf.models.families import register_family
from midus_hf.models.host import MemoryConfig, MemoryForCausalLM, MemoryModel


class MidusQwen3Config(MemoryConfig, Qwen3Config):
    """`Qwen3Config` with a list of memory entries."""

    model_type = "midus_qwen3"
    memory: list | None = None


class MidusQwen3MemoryBlock(MemoryBlock, Qwen3DecoderLayer):
    """A `Qwen3DecoderLayer` whose feed-forward network is a memory."""


class MidusQwen3Model(MemoryModel, Qwen3Model):
    """`Qwen3Model` with memory blocks among its layers."""

    config: MidusQwen3Config
    memory_block_class = MidusQwen3MemoryBlock


@register_family
class MidusQwen3ForCausalLM(MemoryForCausalLM, Qwen3ForCausalLM):
    """`Qwen3ForCausalLM` over a `MidusQwen3Model`."""

    config: MidusQwen3Config
    model_class = MidusQwen3Model
