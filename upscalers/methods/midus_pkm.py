"""MIDUS with product-key memory, which the paper compares its own with."""

from midus_config.memories.product_key import ProductKeyOptions
from upscalers.methods.contract import register_method
from upscalers.methods.inserted_memory import InsertedMemoryMethod


@register_method("midus-pkm")
class MidusPkm(InsertedMemoryMethod):
    """Heads have product keys of their own and share values of full width, which are summed (sections 4.2 and 5.2)."""

    summary = "memory blocks: attention of the next layer, then product keys over shared values (identity at start)"
    options_class = ProductKeyOptions
