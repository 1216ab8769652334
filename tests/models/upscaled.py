"""Models with memory blocks, made of a tiny base by copying tensors: no checkpoint."""

from typing import Any

import torch
from models.hosting import host_config
from tiny import tiny_model
from transformers import PreTrainedModel

from midus_hf.memories.module import MemoryModule
from midus_hf.models import FAMILIES

# Where the blocks stand by default: one between base layers 0 and 1, one between 2 and 3.
NEW_LAYERS = (1, 4)
# Small sizes of each type of memory.
SIZES: dict[str, dict[str, int]] = {
    "midus-hml": {"n": 8, "k": 3}, "midus-pkm": {"n": 8, "k": 3}, "midus-linear": {"slots": 20, "k": 3},
}  # fmt: skip


def donors(new_layers: tuple[int, ...], base_layers: int) -> list[tuple[int, bool]]:
    """For each layer: the base layer it takes tensors from (blocks: the next one), and if it is a block."""
    layers = range(base_layers + len(new_layers))
    before = [sum(each not in new_layers for each in range(layer)) for layer in layers]
    return [(min(base, base_layers - 1), layer in new_layers) for layer, base in zip(layers, before, strict=True)]


def memory_config(
    base: PreTrainedModel, new_layers: tuple[int, ...] = NEW_LAYERS, memory_type: str = "midus-hml", **options: Any
) -> Any:
    """The config of `base` with blocks of one type of memory at `new_layers`."""
    rows = donors(new_layers, base.config.num_hidden_layers)
    changes = {"num_hidden_layers": len(rows)}
    if getattr(base.config, "layer_types", None):
        changes["layer_types"] = [base.config.layer_types[donor] for donor, _ in rows]
    entry = {"type": memory_type, "layers": list(new_layers), **SIZES[memory_type], **options}
    return host_config(base.config, [entry] if new_layers else None, **changes)


def upscaled_model(
    family: str,
    *,
    acting: bool = True,
    new_layers: tuple[int, ...] = NEW_LAYERS,
    dtype: torch.dtype = torch.float32,
    memory_type: str = "midus-hml",
    memory_options: dict[str, Any] | None = None,
    **config_changes: Any,
) -> PreTrainedModel:
    """A tiny base, with changes of its config, with memory blocks at `new_layers`, in eval mode."""
    base = tiny_model(family, dtype, **config_changes)
    torch.manual_seed(7)
    config = memory_config(base, new_layers, memory_type, **(memory_options or {}))
    model = FAMILIES[base.config.model_type](config).to(dtype).eval()
    taken, upscaled = base.state_dict(), model.state_dict()
    for layer, (donor, _) in enumerate(donors(new_layers, base.config.num_hidden_layers)):
        for name in [name for name in upscaled if name.startswith(f"model.layers.{layer}.")]:
            source = taken.get(name.replace(f"layers.{layer}.", f"layers.{donor}.", 1))
            if source is not None:
                upscaled[name] = source
    upscaled.update({name: tensor for name, tensor in taken.items() if ".layers." not in name})
    model.load_state_dict(upscaled)
    generator = torch.Generator().manual_seed(3)
    for module in model.modules() if acting else ():
        if isinstance(module, MemoryModule):
            with torch.no_grad():
                module.value_bank.normal_(generator=generator)
    return model
