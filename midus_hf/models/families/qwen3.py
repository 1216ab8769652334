"""Qwen3 with memory."""

from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3Attention,
    Qwen3DecoderLayer,
    Qwen3ForCausalLM,
    Qwen3ForQuestionAnswering,
    Qwen3ForSequenceClassification,
    Qwen3ForTokenClassification,
    Qwen3MLP,
    Qwen3Model,
)

from midus_hf.memories.hosting.block import MemoryBlock
from midus_hf.memories.hosting.layer import HostLayer
from midus_hf.models.families import register_family
from midus_hf.models.host import MemoryConfig, MemoryModel
from midus_hf.models.language_model import MemoryForCausalLM
from midus_hf.models.task_heads import MemoryForClassification, MemoryForQuestionAnswering


class MidusQwen3Config(MemoryConfig, Qwen3Config):
    """`Qwen3Config` with a list of memory entries."""

    model_type = "midus_qwen3"
    memory: list | None = None
    head_kinds = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


class MidusQwen3Layer(HostLayer, Qwen3DecoderLayer):
    """`Qwen3DecoderLayer` that memories are attached to."""

    attention_class = Qwen3Attention
    mlp_class = Qwen3MLP


class MidusQwen3Block(MemoryBlock, Qwen3DecoderLayer):
    """`Qwen3DecoderLayer` that was inserted for a memory."""

    block_attention = Qwen3Attention


class MidusQwen3Model(MemoryModel, Qwen3Model):
    """`Qwen3Model` whose layers host memory."""

    config: MidusQwen3Config
    layer_classes = (MidusQwen3Layer,)
    block_classes = (MidusQwen3Block,)


class MidusQwen3ForSequenceClassification(MemoryForClassification, Qwen3ForSequenceClassification):
    """`Qwen3ForSequenceClassification` over a `MidusQwen3Model`."""

    config: MidusQwen3Config
    model_class = MidusQwen3Model


class MidusQwen3ForTokenClassification(MemoryForClassification, Qwen3ForTokenClassification):
    """`Qwen3ForTokenClassification` over a `MidusQwen3Model`."""

    config: MidusQwen3Config
    model_class = MidusQwen3Model


class MidusQwen3ForQuestionAnswering(MemoryForQuestionAnswering, Qwen3ForQuestionAnswering):
    """`Qwen3ForQuestionAnswering` over a `MidusQwen3Model`."""

    config: MidusQwen3Config
    model_class = MidusQwen3Model


@register_family
class MidusQwen3ForCausalLM(MemoryForCausalLM, Qwen3ForCausalLM):
    """`Qwen3ForCausalLM` over a `MidusQwen3Model`."""

    config: MidusQwen3Config
    model_class = MidusQwen3Model
