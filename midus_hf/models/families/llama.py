"""Llama with memory."""

from transformers.models.llama.configuration_llama import LlamaConfig
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaForCausalLM,
    LlamaForQuestionAnswering,
    LlamaForSequenceClassification,
    LlamaForTokenClassification,
    LlamaMLP,
    LlamaModel,
)

from midus_hf.memories.hosting.block import MemoryBlock
from midus_hf.memories.hosting.layer import HostLayer
from midus_hf.models.families import register_family
from midus_hf.models.host import MemoryConfig, MemoryModel
from midus_hf.models.language_model import MemoryForCausalLM
from midus_hf.models.task_heads import MemoryForClassification, MemoryForQuestionAnswering


class MidusLlamaConfig(MemoryConfig, LlamaConfig):
    """`LlamaConfig` with a list of memory entries."""

    model_type = "midus_llama"
    memory: list | None = None
    head_kinds = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class MidusLlamaLayer(HostLayer, LlamaDecoderLayer):
    """`LlamaDecoderLayer` that memories are attached to."""

    attention_class = LlamaAttention
    mlp_class = LlamaMLP


class MidusLlamaBlock(MemoryBlock, LlamaDecoderLayer):
    """`LlamaDecoderLayer` that was inserted for a memory."""

    block_attention = LlamaAttention


class MidusLlamaModel(MemoryModel, LlamaModel):
    """`LlamaModel` whose layers host memory."""

    config: MidusLlamaConfig
    layer_classes = (MidusLlamaLayer,)
    block_classes = (MidusLlamaBlock,)


class MidusLlamaForSequenceClassification(MemoryForClassification, LlamaForSequenceClassification):
    """`LlamaForSequenceClassification` over a `MidusLlamaModel`."""

    config: MidusLlamaConfig
    model_class = MidusLlamaModel


class MidusLlamaForTokenClassification(MemoryForClassification, LlamaForTokenClassification):
    """`LlamaForTokenClassification` over a `MidusLlamaModel`."""

    config: MidusLlamaConfig
    model_class = MidusLlamaModel


class MidusLlamaForQuestionAnswering(MemoryForQuestionAnswering, LlamaForQuestionAnswering):
    """`LlamaForQuestionAnswering` over a `MidusLlamaModel`."""

    config: MidusLlamaConfig
    model_class = MidusLlamaModel


@register_family
class MidusLlamaForCausalLM(MemoryForCausalLM, LlamaForCausalLM):
    """`LlamaForCausalLM` over a `MidusLlamaModel`."""

    config: MidusLlamaConfig
    model_class = MidusLlamaModel
