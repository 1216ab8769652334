"""Attention to keys and values of earlier layers (slots), joined with the sequence (MoDA)."""
