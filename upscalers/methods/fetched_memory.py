"""What methods share whose memory is fetched from a bank beside the checkpoint: no tensor of the checkpoint is new."""

from upscalers.methods.attached_memory import AttachedMemoryMethod
from upscalers.methods.papers import HIERARCHICAL_MEMORIES


class FetchedMemoryMethod(AttachedMemoryMethod):
    """Lets layers of the base compute with blocks that each text fetches, one per level of a tree of topics.

    The bank is made beside the checkpoint, its blocks never written: it takes four bytes for each block until it is trained.
    """

    paper = HIERARCHICAL_MEMORIES
    identity = True
    default_layers = "all"
