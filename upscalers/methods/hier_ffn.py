"""FFN memories: hidden units of the feed-forward network, which a text fetches from a bank."""

from midus_config.memories.hierarchical import HierFFNOptions
from upscalers.methods.contract import register_method
from upscalers.methods.fetched_memory import FetchedMemoryMethod


@register_method("hier-ffn")
class HierFFN(FetchedMemoryMethod):
    """Texts fetch hidden units that widen every feed-forward network."""

    summary = (
        "hidden units of every feed-forward network, fetched for a text from a bank by its topic (identity at start)"
    )
    memory_options = HierFFNOptions
