"""Checkpoints that vLLM is compared on: bases of three families, and each method whose result vLLM can serve."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.models.gemma3.configuration_gemma3 import Gemma3TextConfig
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from material.smollm2 import smollm2_135m
from upscalers.runs.upscale import upscale

_BLOCKS = {"memory_tokens": 1024, "chapters": 256, "k": 4, "routing": "token"}
#: Methods that add a memory that looks at one token, with options.
MEMORY_METHODS: dict[str, dict[str, Any]] = {
    "midus-hml": {},
    "midus-pkm": {},
    "midus-linear": {},
    "ultramem-v2": {},
    "moc": _BLOCKS,
}
#: Methods whose result is a model of the base's type, with options.
DENSE_METHODS: dict[str, dict[str, Any]] = {
    "llama-pro": {},
    "solar": {},
    "lesa": {"hidden_size": 8, "epochs": 1},
    "opt-deus": {},
    "avg-deus": {},
    "linear-combination": {},
    "attenuated-copy": {},
    "slices": {"slices": [{"layers": [0, 3]}, {"layers": [1, 4]}]},
}

_RANDOM: dict[str, Any] = {
    "vocab_size": 8192,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 1024,
    "initializer_range": 0.06,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": None,
    "pad_token_id": 0,
}


def _random_base(config: Any) -> Callable[[Path], Path]:
    def save(folder: Path) -> Path:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        return folder

    return save


#: Functions by family that return the folder of a base, in which they may write. Weights of Qwen3 and Gemma 3 are random.
BASES: dict[str, Callable[[Path], Path]] = {
    "llama": lambda folder: smollm2_135m(),
    "qwen3": _random_base(Qwen3Config(**_RANDOM)),
    "gemma3_text": _random_base(
        Gemma3TextConfig(**_RANDOM, sliding_window=48, layer_types=["sliding_attention", "full_attention"] * 3)
    ),
}


def upscaled(base: Path, method: str, output: Path) -> Path:
    """Write an upscaled model in which everything new computes something, and return its folder.

    Tensors that are 0 at birth, so that the model computes what the base does, get noise.
    """
    options = MEMORY_METHODS.get(method, {}) | DENSE_METHODS.get(method, {})
    upscale(base=base, method=method, options=options, output=output, verify=False)
    model = AutoModelForCausalLM.from_pretrained(output, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    std = 0.2 if method in MEMORY_METHODS else 0.02
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                parameter.normal_(std=std, generator=generator)
    model.save_pretrained(output)
    return output
