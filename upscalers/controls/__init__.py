"""Null controls of memories, made from a trained checkpoint."""
