"""Gemma2 with memory."""

from transformers.models.gemma2.configuration_gemma2 import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import (
    Gemma2Attention,
    Gemma2DecoderLayer,
    Gemma2ForCausalLM,
    Gemma2ForSequenceClassification,
    Gemma2ForTokenClassification,
    Gemma2MLP,
    Gemma2Model,
)

from midus_hf.memories.hosting.block import MemoryBlock
from midus_hf.memories.hosting.layer import HostLayer
from midus_hf.models.families import register_family
from midus_hf.models.host import MemoryConfig, MemoryModel
from midus_hf.models.language_model import MemoryForCausalLM
from midus_hf.models.task_heads import MemoryForClassification


class MidusGemma2Config(MemoryConfig, Gemma2Config):
    """`Gemma2Config` with a list of memory entries."""

    model_type = "midus_gemma2"
    memory: list | None = None
    head_kinds = ("ForSequenceClassification", "ForTokenClassification")


class MidusGemma2Layer(HostLayer, Gemma2DecoderLayer):
    """`Gemma2DecoderLayer` that memories are attached to."""

    attention_output_norm = "post_attention_layernorm"
    mlp_output_norm = "post_feedforward_layernorm"
    attention_class = Gemma2Attention
    mlp_class = Gemma2MLP


class MidusGemma2Block(MemoryBlock, Gemma2DecoderLayer):
    """`Gemma2DecoderLayer` that was inserted for a memory."""

    attention_output_norm = "post_attention_layernorm"
    mlp_output_norm = "post_feedforward_layernorm"
    block_attention = Gemma2Attention


class MidusGemma2Model(MemoryModel, Gemma2Model):
    """`Gemma2Model` whose layers host memory."""

    config: MidusGemma2Config
    layer_classes = (MidusGemma2Layer,)
    block_classes = (MidusGemma2Block,)


class MidusGemma2ForSequenceClassification(MemoryForClassification, Gemma2ForSequenceClassification):
    """`Gemma2ForSequenceClassification` over a `MidusGemma2Model`."""

    config: MidusGemma2Config
    model_class = MidusGemma2Model


class MidusGemma2ForTokenClassification(MemoryForClassification, Gemma2ForTokenClassification):
    """`Gemma2ForTokenClassification` over a `MidusGemma2Model`."""

    config: MidusGemma2Config
    model_class = MidusGemma2Model


@register_family
class MidusGemma2ForCausalLM(MemoryForCausalLM, Gemma2ForCausalLM):
    """`Gemma2ForCausalLM` over a `MidusGemma2Model`."""

    config: MidusGemma2Config
    model_class = MidusGemma2Model
