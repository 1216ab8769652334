"""A warning of memories that cannot learn, however long they train."""

import warnings
from collections.abc import Mapping

from torch import nn

from midus_hf.memory.registry import MemoryModule


def warn_of_dead_memories(model: nn.Module, layers: Mapping[int, nn.Module]) -> bool:
    """Warn of layers whose memory values are zero and frozen, if anything of the model trains.

    Nothing there has a gradient then: keys, queries and the attention in front reach the output through values alone.

    Args:
        model: What goes into training mode.
        layers: Its layers, by index.

    Returns:
        Whether there was something to warn of.
    """
    dead = [index for index, layer in layers.items() if _is_dead(layer)]
    if not dead or not any(parameter.requires_grad for parameter in model.parameters()):
        return False
    warnings.warn(_message(dead), stacklevel=3)
    return True


def _is_dead(layer: nn.Module) -> bool:
    """Whether every memory in a layer, PEFT's copies of it included, is frozen while its values are zero."""
    memories = [module for module in layer.modules() if isinstance(module, MemoryModule) and module.names_of("value")]
    adapted = {getattr(module, "parameter_name", None) for module in layer.modules()}  # by LoRA's `target_parameters`
    return bool(memories) and all(_values_are_frozen_at_zero(memory, adapted) for memory in memories)


def _values_are_frozen_at_zero(memory: MemoryModule, adapted: set[str | None]) -> bool:
    """False also where that cannot be seen at once: on the meta device, and of parameters that are sharded.

    Values that were seen to be anything but zero are not looked at again, for a Trainer says `train` at every step.
    """
    names = memory.names_of("value")
    values = [memory.declared_tensor(name) for name in names]
    if any(value.requires_grad for value in values) or not adapted.isdisjoint(
        name.rpartition(".")[2] for name in names
    ):
        return False
    if any(type(value) is not nn.Parameter or value.is_meta or value.numel() == 0 for value in values):
        return False
    memory.values_were_set = memory.values_were_set or any(value.any().item() for value in values)
    return not memory.values_were_set


def _message(layers: list[int]) -> str:
    which = f"layer {layers[0]}" if len(layers) == 1 else f"layers {', '.join(map(str, layers))}"
    return (
        f"the memory values of {which} are zero and frozen, so nothing there has an effect or a gradient, adapters "
        "included. Let them train: with midus_hf.training.set_trainable(model), or, with PEFT, "
        "get_peft_model(model, midus_hf.training.lora_config(model))."
    )
