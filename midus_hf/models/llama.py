"""Llama with memory."""

from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaForCausalLM, LlamaModel

from midus_hf.models.block import MemoryBlock
from midus_hf.models.families import register_family
from midus_hf.models.host import MemoryConfig, MemoryForCausalLM, MemoryModel


class MidusLlamaConfig(MemoryConfig, LlamaConfig):
    """`LlamaConfig` with a list of memory entries."""

    model_type = "midus_llama"
    memory: list | None = None


class MidusLlamaMemoryBlock(MemoryBlock, LlamaDecoderLayer):
    """A `LlamaDecoderLayer` whose feed-forward network is a memory."""


class MidusLlamaModel(MemoryModel, LlamaModel):
    """`LlamaModel` with memory blocks among its layers."""

    config: MidusLlamaConfig
    memory_block_class = MidusLlamaMemoryBlock


@register_family
class MidusLlamaForCausalLM(MemoryForCausalLM, LlamaForCausalLM):
    """`LlamaForCausalLM` over a `MidusLlamaModel`."""

    config: MidusLlamaConfig
    model_class = MidusLlamaModel
