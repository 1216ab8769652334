"""Attention to the slots of the depth, joined with attention to the sequence (MoDA)."""
