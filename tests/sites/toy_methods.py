"""Methods that give a base the toy memories."""

from sites.toy_memory import ToyAttentionOptions, ToyFfnOptions, ToyHeadsOptions, ToyIdsOptions, ToyOptions

from upscalers.methods.contract import register_method
from upscalers.methods.memory_methods import AttachedMemoryMethod


@register_method("toy")
class ToyMethod(AttachedMemoryMethod):
    """A low-rank map at any site outside the base's own modules."""

    summary = "a low-rank map, attached to layers"
    paper = None
    identity = True
    memory_options = ToyOptions


@register_method("toy-attention")
class ToyAttentionMethod(AttachedMemoryMethod):
    """Adapters inside attention."""

    summary = "low-rank maps beside the projections of attention"
    paper = None
    identity = True
    memory_options = ToyAttentionOptions


@register_method("toy-ffn")
class ToyFfnMethod(AttachedMemoryMethod):
    """Adapters inside the feed-forward network."""

    summary = "low-rank maps beside the projections of the feed-forward network"
    paper = None
    identity = True
    memory_options = ToyFfnOptions


@register_method("toy-heads")
class ToyHeadsMethod(AttachedMemoryMethod):
    """A map of what heads ask."""

    summary = "a map of each head's query, added to what the head gives"
    paper = None
    identity = True
    memory_options = ToyHeadsOptions


@register_method("toy-ids")
class ToyIdsMethod(AttachedMemoryMethod):
    """Rows by the ids of tokens."""

    summary = "a row for each hash of a token's id"
    paper = None
    identity = True
    memory_options = ToyIdsOptions
