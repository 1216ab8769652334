"""What a layer of an upscaled model is, in words."""

from midus_hf.config.memory_entries import Memories
from upscalers.plan.plan import Plan


def describe_layer(plan: Plan, memories: Memories, layer: int) -> str:
    """Where a layer comes from, and which memories the upscaling attached to it.

    Args:
        plan: Of the upscaling.
        memories: Of the upscaled model.
        layer: Its index in the upscaled model.
    """
    new = [entry for entry in memories.attached_to(layer) if entry.name in plan.new_memories]
    return "".join((plan.describe(layer), *(f", with {entry.name} ({entry.site})" for entry in new)))
