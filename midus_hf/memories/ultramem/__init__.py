"""UltraMemV2."""
