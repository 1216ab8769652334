"""Retrieval by Tucker-decomposed keys (UltraMemV2, section 3)."""
