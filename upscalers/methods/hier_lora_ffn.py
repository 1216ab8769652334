"""LoRA memories of the feed-forward network, which a text fetches from a bank."""

from midus_config.memories.hierarchical import HierLoraFFNOptions
from upscalers.methods.contract import register_method
from upscalers.methods.fetched_memory import FetchedMemoryMethod


@register_method("hier-lora-ffn")
class HierLoraFFN(FetchedMemoryMethod):
    """Texts fetch low-rank factors that are added to the projections of the feed-forward networks."""

    summary = "low-rank factors of every feed-forward network, fetched for a text from a bank by its topic (identity at start)"
    memory_options = HierLoraFFNOptions
