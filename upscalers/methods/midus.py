"""MIDUS with the paper's head-wise memory, and the memories that the paper compares."""

from midus_hf.memories.midus.options import MidusHmlOptions, MidusLinearOptions, MidusPkmOptions
from upscalers.methods.contract import register_method
from upscalers.methods.memory_methods import InsertedMemoryMethod


@register_method("midus-hml")
class MidusHml(InsertedMemoryMethod):
    """Blocks with a separate memory for each attention head (section 4.2)."""

    summary = "memory layers: attention of the next layer, then a product-key memory per head (identity at start)"
    options_class = MidusHmlOptions


@register_method("midus-linear")
class MidusLinear(InsertedMemoryMethod):
    """Blocks with one key per slot for each head, and shared full-width values (eq. 4, 5, section 5.2)."""

    summary = "memory layers: attention of the next layer, then a key per slot over shared values (identity at start)"
    options_class = MidusLinearOptions


@register_method("midus-pkm")
class MidusPkm(InsertedMemoryMethod):
    """Blocks with product keys per head, and shared full-width values (sections 4.2 and 5.2)."""

    summary = "memory layers: attention of the next layer, then product keys over shared values (identity at start)"
    options_class = MidusPkmOptions
