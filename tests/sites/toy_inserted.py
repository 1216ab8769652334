"""A method that inserts layers for the toy memory, whose options attached toys have as well."""

from sites.toy_memory import ToyOptions

from upscalers.methods.contract import register_method
from upscalers.methods.memory_methods import InsertedMemoryMethod


@register_method("toy-inserted")
class ToyInserted(InsertedMemoryMethod):
    """Attention and a low-rank map in layers of their own."""

    summary = "layers of attention and a low-rank map"
    options_class = ToyOptions
