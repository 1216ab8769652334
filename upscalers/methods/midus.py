"""MIDUS with head-wise memory, the paper's own, and with the memories that the paper compares it with."""

from midus_hf.config.memories.headwise import HeadwiseOptions
from midus_hf.config.memories.linear import LinearOptions
from midus_hf.config.memories.product_key import ProductKeyOptions
from upscalers.methods.contract import register_method
from upscalers.methods.memory_methods import InsertedMemoryMethod


@register_method("midus-hml")
class MidusHml(InsertedMemoryMethod):
    """Each attention head asks a memory of its own (section 4.2)."""

    summary = "memory blocks: attention of the next layer, then a product-key memory per head (identity at start)"
    options_class = HeadwiseOptions


@register_method("midus-linear")
class MidusLinear(InsertedMemoryMethod):
    """Heads compare their query with a key per slot and share values of full width (equations 4 and 5, section 5.2)."""

    summary = "memory blocks: attention of the next layer, then a key per slot over shared values (identity at start)"
    options_class = LinearOptions


@register_method("midus-pkm")
class MidusPkm(InsertedMemoryMethod):
    """Heads have product keys of their own and share values of full width, which are summed (sections 4.2 and 5.2)."""

    summary = "memory blocks: attention of the next layer, then product keys over shared values (identity at start)"
    options_class = ProductKeyOptions
