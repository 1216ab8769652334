"""MIDUS with linear memory, which the paper compares its own with."""

from dataclasses import dataclass

from upscalers.methods.contract import register_method
from upscalers.methods.memory_block import MemoryMethod, SharedValueOptions
from upscalers.request.options import option


@dataclass
class LinearMemoryOptions(SharedValueOptions):
    """Size of the memory."""

    slots: int = option(4096, "values, and keys per head")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_slots("slots", "slot")


@register_method("midus-linear")
class MidusLinear(MemoryMethod):
    """Heads compare their query with a key a slot and share values of full width (equations 4 and 5, section 5.2)."""

    summary = "memory blocks: attention of the next layer, then a key a slot over shared values (identity at start)"
    options_class = LinearMemoryOptions
    memory_type = "linear"
