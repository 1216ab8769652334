"""Mixture of Chapters: a routed bank of latent memory tokens, attached to some layers."""

from midus_config.memories.chapters import ChaptersOptions
from upscalers.checkpoint.base_model import BaseModel
from upscalers.methods.attached_memory import AttachedMemoryMethod
from upscalers.methods.contract import register_method
from upscalers.methods.papers import MIXTURE_OF_CHAPTERS
from upscalers.request.errors import RequestError


@register_method("moc")
class MixtureOfChapters(AttachedMemoryMethod):
    """Layers read, by cross-attention, chapters of a bank that a router chooses for their tokens."""

    summary = (
        "a bank of memory tokens in chapters, read by cross-attention in a quarter of the layers (identity at start)"
    )
    paper = MIXTURE_OF_CHAPTERS
    identity = True
    memory_options = ChaptersOptions
    default_layers = 0.25

    def check(self, base: BaseModel) -> None:
        super().check(base)
        if self.options.bank_bits is not None:
            raise RequestError(
                f"bank_bits is {self.options.bank_bits}, but a new bank has yet to learn, which integers cannot; expected "
                "null. Train the model, then round its bank with midus-chapters quantise."
            )
