"""Attention to slots of the depth (keys and values of earlier layers), joined with the sequence (MoDA)."""
