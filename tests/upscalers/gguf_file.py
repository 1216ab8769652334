"""A tiny model written as a GGUF file, with the gguf package."""

from pathlib import Path
from typing import Any

import gguf
import torch
from tiny import tiny_model
from transformers.modeling_gguf_pytorch_utils import TensorProcessor, get_gguf_hf_weights_map


def write_gguf(
    path: Path,
    quantisation: gguf.GGMLQuantizationType,
    architecture: str = "llama",
    heads_in_header: int | None = None,
) -> Any:
    """Write a tiny model, and return what was written, before quantisation.

    Args:
        path: Where to.
        quantisation: Of its matrices.
        architecture: The family, which GGUF calls by the same name.
        heads_in_header: A number of heads of keys that the tensors do not have.
    """
    model = tiny_model(architecture, hidden_size=64, intermediate_size=96, num_key_value_heads=4)
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(heads_in_header or config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if architecture == "llama":
        writer.add_rope_dimension_count(config.head_dim)
    else:
        head_dim = getattr(config, "head_dim", config.hidden_size // config.num_attention_heads)
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
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
    names = {name: stored for stored, name in get_gguf_hf_weights_map(model, TensorProcessor()).items()}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            tensor = _interleaved(tensor, config.num_attention_heads)
        if architecture == "gemma2" and name.endswith("norm.weight"):
            tensor = tensor + 1
        if tensor.dim() == 1:
            writer.add_tensor(names[name], tensor.numpy())
        else:
            writer.add_tensor(names[name], gguf.quantize(tensor.numpy(), quantisation), raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return model


def _interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The order of rows that GGUF gives to what rotary embeddings turn."""
    return weight.reshape(heads, 2, -1, weight.shape[1]).transpose(1, 2).reshape(weight.shape).contiguous()
