"""LoRA memories of value and output projections, which a text fetches from a bank."""

from midus_config.memories.hierarchical import HierLoraVOOptions
from upscalers.methods.contract import register_method
from upscalers.methods.fetched_memory import FetchedMemoryMethod


@register_method("hier-lora-vo")
class HierLoraVO(FetchedMemoryMethod):
    """Texts fetch low-rank factors that are added to the value and output projections."""

    summary = "low-rank factors of value and output projections, fetched for a text from a bank by its topic (identity at start)"
    memory_options = HierLoraVOOptions
