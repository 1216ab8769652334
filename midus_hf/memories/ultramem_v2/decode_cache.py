"""Normalised keys and the singular vectors of cores, computed once for a generation."""

from midus_hf.memories.decode_cache import MAX_CACHED, DecodeCache, decode_cache_of
from midus_hf.memories.ultramem_v2.layer import UltraMemV2Memory, keys_and_vectors


@decode_cache_of(UltraMemV2Memory)
def normalised_keys_and_vectors(memory: UltraMemV2Memory) -> DecodeCache | None:
    """Return a cache for keys and vectors; None for many keys."""
    if 2 * memory.row_keys.numel() > MAX_CACHED:
        return None
    names = ("row_keys", "column_keys", "key_norm_weight", "core", "row_vector")
    return DecodeCache(names, keys_and_vectors, as_stored=True)
