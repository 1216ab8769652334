"""The keys and values of all memory tokens, projected once for a generation."""

from functools import partial

from midus_hf.memories.decode_cache import MAX_CACHED, DecodeCache, decode_cache_of
from midus_hf.memories.moc.layer import MocMemory, derive_all


@decode_cache_of(MocMemory)
def projected_bank(memory: MocMemory) -> DecodeCache | None:
    """Return a cache for keys and values of the whole bank; None for a large bank."""
    if 2 * memory.options.memory_tokens * memory.num_heads * memory.head_dim > MAX_CACHED:
        return None
    names = ("bank", "key_projection.weight", "value_projection.weight")
    return DecodeCache(names, partial(derive_all, memory.options))
