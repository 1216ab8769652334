"""Models whose heads read the depth, built in memory from a tiny base."""

from typing import Any

import torch
from models.hosting import host_of
from tiny import NUM_LAYERS, tiny_model

from midus_hf.config.declared_tensors import ZEROS
from midus_hf.memories.moda.layer import ModaMemory

KINDS: dict[str, dict[str, Any]] = {
    "default": {},
    "reused": {"joining": "interpolated", "attention_slots": "reused"},
    "joint": {"joining": "joint", "attention_slots": "reused"},
    "attention": {"joining": "interpolated", "attention_slots": "reused", "ffn_slots": False},
    "bias": {"bias": True},
    "projected": {"attention_slots": "projected", "bias": True},
    "added to reused": {"attention_slots": "reused"},
    "some": {"layers": [0, 2, 3]},
}


def depth_model(
    family: str = "llama",
    kind: str = "default",
    dtype: torch.dtype = torch.float64,
    *,
    acting: bool = True,
    num_hidden_layers: int = NUM_LAYERS,
    base: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """A tiny model whose heads read the depth, in eval mode; one that does not act has zeros where a new one has them."""
    layers = list(range(num_hidden_layers))
    entry = {"type": "moda", "layers": layers, **KINDS[kind], **options}
    native = tiny_model(family, dtype, num_hidden_layers=num_hidden_layers, **(base or {}))
    model = host_of(native, entry)
    for memory in model.modules():
        if isinstance(memory, ModaMemory):
            start = set() if acting else {name for name, made in memory.declared.items() if made.initial == ZEROS}
            with torch.no_grad():
                for name, value in memory.named_parameters():
                    if name in start:
                        value.zero_()
                    else:
                        value.copy_(
                            0.2 + 0.7 * torch.rand_like(value)
                            if name == "depth_gate"
                            else 0.4 * torch.randn_like(value)
                        )
    return model
