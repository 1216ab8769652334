"""Gemma3 with memory."""

from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.gemma3.modeling_gemma3 import (
    Gemma3Attention,
    Gemma3DecoderLayer,
    Gemma3ForCausalLM,
    Gemma3MLP,
    Gemma3TextForSequenceClassification,
    Gemma3TextModel,
)

from midus_hf.memories.hosting.block import MemoryBlock
from midus_hf.memories.hosting.layer import HostLayer
from midus_hf.models.families import register_family
from midus_hf.models.host import MemoryConfig, MemoryModel
from midus_hf.models.language_model import MemoryForCausalLM
from midus_hf.models.task_heads import MemoryForClassification


class MidusGemma3Config(MemoryConfig, Gemma3TextConfig):
    """`Gemma3TextConfig` with a list of memory entries."""

    model_type = "midus_gemma3_text"
    memory: list | None = None
    head_kinds = ("ForSequenceClassification",)


class MidusGemma3Layer(HostLayer, Gemma3DecoderLayer):
    """`Gemma3DecoderLayer` that memories are attached to."""

    attention_output_norm = "post_attention_layernorm"
    mlp_output_norm = "post_feedforward_layernorm"
    attention_class = Gemma3Attention
    mlp_class = Gemma3MLP


class MidusGemma3Block(MemoryBlock, Gemma3DecoderLayer):
    """`Gemma3DecoderLayer` that was inserted for a memory."""

    attention_output_norm = "post_attention_layernorm"
    mlp_output_norm = "post_feedforward_layernorm"
    block_attention = Gemma3Attention


class MidusGemma3Model(MemoryModel, Gemma3TextModel):
    """`Gemma3TextModel` whose layers host memory."""

    config: MidusGemma3Config
    layer_classes = (MidusGemma3Layer,)
    block_classes = (MidusGemma3Block,)


class MidusGemma3ForSequenceClassification(MemoryForClassification, Gemma3TextForSequenceClassification):
    """`Gemma3TextForSequenceClassification` over a `MidusGemma3Model`."""

    config: MidusGemma3Config
    model_class = MidusGemma3Model


@register_family
class MidusGemma3ForCausalLM(MemoryForCausalLM, Gemma3ForCausalLM):
    """`Gemma3ForCausalLM` over a `MidusGemma3Model`."""

    config: MidusGemma3Config
    model_class = MidusGemma3Model
