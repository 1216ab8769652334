"""Attention to the slots of the depth (keys and values of earlier layers), joined with attention to the sequence (MoDA)."""
