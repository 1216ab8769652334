"""The method that attaches the memory."""

from tests.upscalers.offset.options import OffsetOptions
from upscalers.methods.contract import register_method
from upscalers.methods.memory_methods import AttachedMemoryMethod


@register_method("offset")
class OffsetMethod(AttachedMemoryMethod):
    summary = "a vector after a layer, in a file next to the weights"
    paper = None
    identity = True
    memory_options = OffsetOptions
