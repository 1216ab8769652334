"""MIDUS with product-key memory, which the paper compares its own with."""

from dataclasses import dataclass

from upscalers.checkpoint.base_model import BaseModel
from upscalers.methods.contract import register_method
from upscalers.methods.memory_block import MemoryMethod, SharedValueOptions
from upscalers.request.options import option


@dataclass
class ProductKeyMemoryOptions(SharedValueOptions):
    """Size of the memory."""

    n: int = option(64, "sub-keys per side; every head addresses the same n * n values")

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_slots("n", "sub-key a side")


@register_method("midus-pkm")
class MidusPkm(MemoryMethod):
    """Heads have product keys of their own and share values of full width, which are summed (sections 4.2 and 5.2)."""

    summary = "memory blocks: attention of the next layer, then product keys over shared values (identity at start)"
    options_class = ProductKeyMemoryOptions
    memory_type = "product-key"

    def check(self, base: BaseModel) -> None:
        super().check(base)
        self.check_halves(base)
