"""KV memories: keys and values beside the sequence, which a text fetches from a bank."""

from midus_config.memories.hierarchical import HierKVOptions
from upscalers.methods.contract import register_method
from upscalers.methods.fetched_memory import FetchedMemoryMethod


@register_method("hier-kv")
class HierKV(FetchedMemoryMethod):
    """Texts fetch keys and values that every token attends to beside the sequence."""

    summary = (
        "keys and values beside those of the sequence, fetched for a text from a bank by its topic (identity at start)"
    )
    memory_options = HierKVOptions
