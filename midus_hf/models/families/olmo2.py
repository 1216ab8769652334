"""Olmo2 with memory."""

from transformers.models.olmo2.configuration_olmo2 import Olmo2Config
from transformers.models.olmo2.modeling_olmo2 import (
    Olmo2Attention,
    Olmo2DecoderLayer,
    Olmo2ForCausalLM,
    Olmo2ForSequenceClassification,
    Olmo2MLP,
    Olmo2Model,
)

from midus_hf.memories.hosting.block import MemoryBlock
from midus_hf.memories.hosting.layer import HostLayer
from midus_hf.models.families import register_family
from midus_hf.models.host import MemoryConfig, MemoryModel
from midus_hf.models.language_model import MemoryForCausalLM
from midus_hf.models.task_heads import MemoryForClassification


class MidusOlmo2Config(MemoryConfig, Olmo2Config):
    """`Olmo2Config` with a list of memory entries."""

    model_type = "midus_olmo2"
    memory: list | None = None
    head_kinds = ("ForSequenceClassification",)


class MidusOlmo2Layer(HostLayer, Olmo2DecoderLayer):
    """`Olmo2DecoderLayer` that memories are attached to."""

    attention_norm = None
    attention_output_norm = "post_attention_layernorm"
    mlp_output_norm = "post_feedforward_layernorm"
    attention_class = Olmo2Attention
    mlp_class = Olmo2MLP


class MidusOlmo2Block(MemoryBlock, Olmo2DecoderLayer):
    """`Olmo2DecoderLayer` that was inserted for a memory."""

    attention_norm = None
    attention_output_norm = "post_attention_layernorm"
    mlp_output_norm = "post_feedforward_layernorm"
    block_attention = Olmo2Attention


class MidusOlmo2Model(MemoryModel, Olmo2Model):
    """`Olmo2Model` whose layers host memory."""

    config: MidusOlmo2Config
    layer_classes = (MidusOlmo2Layer,)
    block_classes = (MidusOlmo2Block,)


class MidusOlmo2ForSequenceClassification(MemoryForClassification, Olmo2ForSequenceClassification):
    """`Olmo2ForSequenceClassification` over a `MidusOlmo2Model`."""

    config: MidusOlmo2Config
    model_class = MidusOlmo2Model


@register_family
class MidusOlmo2ForCausalLM(MemoryForCausalLM, Olmo2ForCausalLM):
    """`Olmo2ForCausalLM` over a `MidusOlmo2Model`."""

    config: MidusOlmo2Config
    model_class = MidusOlmo2Model
