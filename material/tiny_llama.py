"""A Llama of six layers with random weights, and the tokenizer of SmolLM2: for runs that shall take seconds."""

import json
from pathlib import Path

from material.cache import cached_folder
from material.smollm2 import smollm2_135m

_CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "initializer_range": 0.05,
}


def tiny_llama() -> Path:
    """The folder: random weights of one seed in float32, config and tokenizer (13 MB)."""
    return cached_folder("tiny-llama-1", _make)


def _make(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_135m())
    tokenizer.save_pretrained(folder)
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = {**_CONFIG, "vocab_size": len(tokenizer), **tokens}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
