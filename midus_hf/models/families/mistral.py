"""Mistral with memory."""

from transformers.models.mistral.configuration_mistral import MistralConfig
from transformers.models.mistral.modeling_mistral import (
    MistralAttention,
    MistralDecoderLayer,
    MistralForCausalLM,
    MistralForQuestionAnswering,
    MistralForSequenceClassification,
    MistralForTokenClassification,
    MistralMLP,
    MistralModel,
)

from midus_hf.memories.hosting.block import MemoryBlock
from midus_hf.memories.hosting.layer import HostLayer
from midus_hf.models.families import register_family
from midus_hf.models.host import MemoryConfig, MemoryModel
from midus_hf.models.language_model import MemoryForCausalLM
from midus_hf.models.task_heads import MemoryForClassification, MemoryForQuestionAnswering


class MidusMistralConfig(MemoryConfig, MistralConfig):
    """`MistralConfig` with a list of memory entries."""

    model_type = "midus_mistral"
    memory: list | None = None
    head_kinds = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class MidusMistralLayer(HostLayer, MistralDecoderLayer):
    """`MistralDecoderLayer` that memories are attached to."""

    attention_class = MistralAttention
    mlp_class = MistralMLP


class MidusMistralBlock(MemoryBlock, MistralDecoderLayer):
    """`MistralDecoderLayer` that was inserted for a memory."""

    block_attention = MistralAttention


class MidusMistralModel(MemoryModel, MistralModel):
    """`MistralModel` whose layers host memory."""

    config: MidusMistralConfig
    layer_classes = (MidusMistralLayer,)
    block_classes = (MidusMistralBlock,)


class MidusMistralForSequenceClassification(MemoryForClassification, MistralForSequenceClassification):
    """`MistralForSequenceClassification` over a `MidusMistralModel`."""

    config: MidusMistralConfig
    model_class = MidusMistralModel


class MidusMistralForTokenClassification(MemoryForClassification, MistralForTokenClassification):
    """`MistralForTokenClassification` over a `MidusMistralModel`."""

    config: MidusMistralConfig
    model_class = MidusMistralModel


class MidusMistralForQuestionAnswering(MemoryForQuestionAnswering, MistralForQuestionAnswering):
    """`MistralForQuestionAnswering` over a `MidusMistralModel`."""

    config: MidusMistralConfig
    model_class = MidusMistralModel


@register_family
class MidusMistralForCausalLM(MemoryForCausalLM, MistralForCausalLM):
    """`MistralForCausalLM` over a `MidusMistralModel`."""

    config: MidusMistralConfig
    model_class = MidusMistralModel
