"""MIDUS with linear memory, which the paper compares its own with."""

from midus_config.memories.linear import LinearOptions
from upscalers.methods.contract import register_method
from upscalers.methods.inserted_memory import InsertedMemoryMethod


@register_method("midus-linear")
class MidusLinear(InsertedMemoryMethod):
    """Heads compare their query with a key per slot and share values of full width (equations 4 and 5, section 5.2)."""

    summary = "memory blocks: attention of the next layer, then a key per slot over shared values (identity at start)"
    options_class = LinearOptions
