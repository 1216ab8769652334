"""Qwen2 with memory."""

from transformers.models.qwen2.configuration_qwen2 import Qwen2Config
from transformers.models.qwen2.modeling_qwen2 import (
    Qwen2Attention,
    Qwen2DecoderLayer,
    Qwen2ForCausalLM,
    Qwen2ForQuestionAnswering,
    Qwen2ForSequenceClassification,
    Qwen2ForTokenClassification,
    Qwen2MLP,
    Qwen2Model,
)

from midus_hf.memories.hosting.block import MemoryBlock
from midus_hf.memories.hosting.layer import HostLayer
from midus_hf.models.families import register_family
from midus_hf.models.host import MemoryConfig, MemoryModel
from midus_hf.models.language_model import MemoryForCausalLM
from midus_hf.models.task_heads import MemoryForClassification, MemoryForQuestionAnswering


class MidusQwen2Config(MemoryConfig, Qwen2Config):
    """`Qwen2Config` with a list of memory entries."""

    model_type = "midus_qwen2"
    memory: list | None = None
    head_kinds = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class MidusQwen2Layer(HostLayer, Qwen2DecoderLayer):
    """`Qwen2DecoderLayer` that memories are attached to."""

    attention_class = Qwen2Attention
    mlp_class = Qwen2MLP


class MidusQwen2Block(MemoryBlock, Qwen2DecoderLayer):
    """`Qwen2DecoderLayer` that was inserted for a memory."""

    block_attention = Qwen2Attention


class MidusQwen2Model(MemoryModel, Qwen2Model):
    """`Qwen2Model` whose layers host memory."""

    config: MidusQwen2Config
    layer_classes = (MidusQwen2Layer,)
    block_classes = (MidusQwen2Block,)


class MidusQwen2ForSequenceClassification(MemoryForClassification, Qwen2ForSequenceClassification):
    """`Qwen2ForSequenceClassification` over a `MidusQwen2Model`."""

    config: MidusQwen2Config
    model_class = MidusQwen2Model


class MidusQwen2ForTokenClassification(MemoryForClassification, Qwen2ForTokenClassification):
    """`Qwen2ForTokenClassification` over a `MidusQwen2Model`."""

    config: MidusQwen2Config
    model_class = MidusQwen2Model


class MidusQwen2ForQuestionAnswering(MemoryForQuestionAnswering, Qwen2ForQuestionAnswering):
    """`Qwen2ForQuestionAnswering` over a `MidusQwen2Model`."""

    config: MidusQwen2Config
    model_class = MidusQwen2Model


@register_family
class MidusQwen2ForCausalLM(MemoryForCausalLM, Qwen2ForCausalLM):
    """`Qwen2ForCausalLM` over a `MidusQwen2Model`."""

    config: MidusQwen2Config
    model_class = MidusQwen2Model
