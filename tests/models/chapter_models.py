"""Models with Mixture of Chapters attached, built in memory from a tiny base: no checkpoint, no upscaler."""

from typing import Any

import torch
from models.hosting import host_of
from tiny import tiny_model
from transformers import PreTrainedModel

from midus_hf.memories.moc.layer import MocMemory
from midus_hf.memories.module import MemoryTables

SMALL: dict[str, Any] = {"memory_tokens": 24, "chapters": 12, "k": 2, "chunk_size": 3}
LAYERS = (1, 3)

# How far tensors are spread where memories act: hidden states of a tiny model are small, and routers shall have clear
# opinions.
_SPREAD = {"router_weight": 8.0, "router_bias": 0.5, "norm_weight": 1.0}


def entry(name: str = "chapters", layers: tuple[int, ...] = LAYERS, **options: Any) -> dict[str, Any]:
    """An entry of `memory` in a config."""
    site = options.pop("site", "behind-attention")
    return {"type": "moc", "name": name, "site": site, "layers": list(layers), **SMALL, **options}


def chapter_pair(
    family: str = "llama",
    *,
    acting: bool = True,
    dtype: torch.dtype = torch.float64,
    memory: list[dict[str, Any]] | None = None,
    config: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A tiny base with these changes of its config, and the same model with one memory or these entries, both in eval mode.

    By default in float64, in which passes that compute in another order still choose the same chapters.
    """
    base = tiny_model(family, dtype, **(config or {}))
    model = host_of(base, *(memory or [entry(**options)]), seed=7)
    if acting:
        act(model)
    return base, model


def chapter_model(family: str = "llama", **kwargs: Any) -> PreTrainedModel:
    """The second of `chapter_pair`."""
    return chapter_pair(family, **kwargs)[1]


def act(model: torch.nn.Module, seed: int = 3) -> None:
    """Fill every tensor of the memories."""
    generator = torch.Generator().manual_seed(seed)
    for module in model.modules():
        if isinstance(module, MocMemory | MemoryTables):
            for name, parameter in module.named_parameters():
                spread = _SPREAD.get(name, 0.3)
                with torch.no_grad():
                    parameter.copy_(spread * torch.randn(parameter.shape, generator=generator))


def memories_of(model: torch.nn.Module) -> list[MocMemory]:
    """The layers of Mixture of Chapters of a model."""
    return [module for module in model.modules() if isinstance(module, MocMemory)]
