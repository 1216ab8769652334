"""MIDUS with head-wise memory, the paper's own."""

from midus_config.memories.headwise import HeadwiseOptions
from upscalers.methods.contract import register_method
from upscalers.methods.inserted_memory import InsertedMemoryMethod


@register_method("midus-hml")
class MidusHml(InsertedMemoryMethod):
    """Each attention head asks a memory of its own (section 4.2)."""

    summary = "memory blocks: attention of the next layer, then a product-key memory per head (identity at start)"
    options_class = HeadwiseOptions
