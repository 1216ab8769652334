"""The values of every head, expanded once for a generation."""

from midus_hf.memories.decode_cache import DecodeCache, decode_cache_of
from midus_hf.memories.midus_hml.layer import MidusHmlMemory
from midus_hf.ops.midus_hml.op import MAX_EXPANDED, expand_values


@decode_cache_of(MidusHmlMemory)
def expanded_values(memory: MidusHmlMemory) -> DecodeCache | None:
    """Return a cache for the values of all heads; None for more values than `MAX_EXPANDED`."""
    if memory.num_heads * memory.value_bank.numel() > MAX_EXPANDED:
        return None
    return DecodeCache(("value_bank", "value_transform"), expand_values)
