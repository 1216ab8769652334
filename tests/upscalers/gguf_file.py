"""A tiny Llama written as a GGUF file, with the gguf package."""

from pathlib import Path

import gguf
import torch
from tiny import tiny_model
from transformers import LlamaForCausalLM

NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OUTER_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(path: Path, quantisation: gguf.GGMLQuantizationType) -> LlamaForCausalLM:
    """Write the tiny Llama, its matrices quantised so, and return what was written, before quantisation."""
    model = tiny_model("llama", hidden_size=64, intermediate_size=96, num_key_value_heads=4)
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    tokens = ["<unk>", "<s>", "</s>", "t", "h", "th"]
    tokens += [f"word{index}" for index in range(len(tokens), config.vocab_size)]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["t h"])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, tensor in model.state_dict().items():
        stem, _, kind = name.rpartition(".")
        if stem in OUTER_NAMES:
            stored = f"{OUTER_NAMES[stem]}.{kind}"
        else:
            _, _, layer, inner = stem.split(".", 3)
            stored = f"blk.{layer}.{NAMES[inner]}.{kind}"
            if inner in ("self_attn.q_proj", "self_attn.k_proj"):
                tensor = _interleaved(tensor, config.num_attention_heads)
        if tensor.dim() == 1:
            writer.add_tensor(stored, tensor.numpy())
        else:
            writer.add_tensor(stored, gguf.quantize(tensor.numpy(), quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The order of rows that GGUF gives to what rotary embeddings turn."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()
