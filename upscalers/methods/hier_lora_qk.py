"""LoRA memories of query and key projections, which a text fetches from a bank."""

from midus_config.memories.hierarchical import HierLoraQKOptions
from upscalers.methods.contract import register_method
from upscalers.methods.fetched_memory import FetchedMemoryMethod


@register_method("hier-lora-qk")
class HierLoraQK(FetchedMemoryMethod):
    """Texts fetch low-rank factors that are added to the query and key projections."""

    summary = "low-rank factors of query and key projections, fetched for a text from a bank by its topic (identity at start)"
    memory_options = HierLoraQKOptions
