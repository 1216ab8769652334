"""Tiny random models of every family with memories of every type that retrieves slots."""

from pathlib import Path
from typing import Any

import torch
from models.hosting import host_config
from models.upscaled import give_values
from tiny import FAMILIES as TINY_FAMILIES
from transformers import PreTrainedModel

from midus_hf.memories.retrieval.layer import RetrievalMemory
from midus_hf.models import FAMILIES

MEMORY_LAYERS = [1, 3]

ENTRIES: dict[str, dict[str, Any]] = {
    "headwise": {"type": "headwise", "n": 8, "k": 3},
    "headwise-variant": {
        "type": "headwise", "n": 5, "k": 2, "query_norm": "layer",
    },
    "product-key": {"type": "product-key", "n": 8, "k": 3},
    "linear": {"type": "linear", "slots": 20, "k": 3},
}  # fmt: skip


def memory_model(family: str, entry: str = "headwise") -> PreTrainedModel:
    """A model of four layers, two of which are memory blocks with values, in eval mode."""
    config = TINY_FAMILIES[family].config()
    torch.manual_seed(0)
    memory = [{**ENTRIES[entry], "layers": MEMORY_LAYERS}]
    model = FAMILIES[config.model_type](host_config(config, memory))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
    give_values(model)
    return model.eval()


def memories(model: PreTrainedModel) -> dict[int, RetrievalMemory]:
    """The memory of each block, by layer."""
    return {layer: model.model.layers[layer].memory for layer in MEMORY_LAYERS}


def has_hooks(model: PreTrainedModel) -> bool:
    return any(m._forward_hooks or m._forward_pre_hooks for m in memories(model).values())


def write_text(path: Path, words: int = 200) -> Path:
    """A text of the words that `tiny_run.tiny_tokenizer` knows."""
    path.write_text(" ".join(f"w{3 + (7 * i * i) % 125}" for i in range(words)), encoding="utf-8")
    return path
