"""Edits of checkpoints: chapters set to zero, pruned and listed, values rounded, and the null control that permutes rows."""
