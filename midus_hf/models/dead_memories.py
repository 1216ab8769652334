"""Warning of memories that cannot learn, however long they train."""

import warnings
from collections.abc import Mapping
from operator import attrgetter

from torch import nn

from midus_hf.config.declared_tensors import ZEROS, Role
from midus_hf.memory.registry import MemoryModule
from midus_hf.models.host import MemoryModel, training_begins

# Roles of tensors that leave a memory without effect while they are zero, with the plural used in the warning.
_SILENT: dict[Role, str] = {"value": "values", "projection": "projections", "gate": "gates"}


@training_begins.register
def _(model: MemoryModel) -> None:
    """Warn, once per model, of memories that cannot learn however long they train."""
    if not getattr(model, "warned_of_dead_memories", False):
        model.warned_of_dead_memories = warn_of_dead_memories(model, dict(enumerate(model.layers)))


def warn_of_dead_memories(model: nn.Module, layers: Mapping[int, nn.Module]) -> bool:
    """Warn of layers whose memory values, projections or gates are zero and frozen, if anything of the model trains.

    These memories have no gradient, since their other tensors reach the output only through the zero tensors.

    Args:
        model: The model that goes into training mode.
        layers: The model's layers, by index.

    Returns:
        Whether a warning was given.
    """
    dead = {index: word for index, layer in layers.items() if (word := _dead_through(layer)) is not None}
    if not dead or not any(parameter.requires_grad for parameter in model.parameters()):
        return False
    warnings.warn(_message(dead), stacklevel=5)
    return True


def _dead_through(layer: nn.Module) -> str | None:
    """Return which tensors of a layer's memories, PEFT's copies included, are zero and frozen; None if a memory can learn."""
    memories = {module: _silent_names(module) for module in layer.modules() if isinstance(module, MemoryModule)}
    memories = {memory: names for memory, names in memories.items() if names}
    adapted = {getattr(module, "parameter_name", None) for module in layer.modules()}  # by LoRA's `target_parameters`
    if not memories or not all(_are_frozen_at_zero(memory, names, adapted) for memory, names in memories.items()):
        return None
    memory, names = next(iter(memories.items()))
    return _SILENT[memory.declared[names[0]].role]


def _silent_names(memory: MemoryModule) -> list[str]:
    return [name for name in memory.names_it_acts_through() if memory.declared[name].initial == ZEROS]


def _are_frozen_at_zero(memory: MemoryModule, names: list[str], adapted: set[str | None]) -> bool:
    """Return whether all named tensors are zero and frozen; False if their values are unknown (on the meta device, or sharded)."""
    parents = [name.rpartition(".")[0] for name in names]
    if any(parent and type(attrgetter(parent)(memory)) is not nn.Linear for parent in parents):
        return False  # the parent is an adapter, which may train
    values = [memory.declared_tensor(name) for name in names]
    if any(value.requires_grad for value in values) or not adapted.isdisjoint(
        name.rpartition(".")[2] for name in names if "." not in name
    ):
        return False
    if any(type(value) is not nn.Parameter or value.is_meta or value.numel() == 0 for value in values):
        return False
    # A Trainer calls `train` at every step: what was nonzero once is not read again.
    memory.values_were_set = memory.values_were_set or any(value.any().item() for value in values)
    return not memory.values_were_set


def _message(dead: Mapping[int, str]) -> str:
    which = f"layer {min(dead)}" if len(dead) == 1 else f"layers {', '.join(map(str, dead))}"
    return (
        f"the memory {' and '.join(dict.fromkeys(dead.values()))} of {which} are zero and frozen, so the memories there have no "
        "effect and no gradient, adapters included. Let them train: with midus_hf.training.set_trainable(model), or, with PEFT, "
        "get_peft_model(model, midus_hf.training.lora_config(model))."
    )
