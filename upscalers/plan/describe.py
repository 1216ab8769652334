"""Description of a layer of an upscaled model in words."""

from midus_hf.config.memory_entries import Memories
from upscalers.plan.plan import Plan


def describe_layer(plan: Plan, memories: Memories, layer: int) -> str:
    """Return where a layer comes from and which memories the upscaling attached to the layer, as text.

    Args:
        plan: Plan of the upscaling.
        memories: Memories of the upscaled model.
        layer: Index of the layer in the upscaled model, from 0.
    """
    new = [entry for entry in memories.attached_to(layer) if entry.name in plan.new_memories]
    return "".join((plan.describe(layer), *(f", with {entry.name} ({entry.site})" for entry in new)))
