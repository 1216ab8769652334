"""Edits of checkpoints: chapters set to zero, pruned, rounded and listed; and the null control that permutes rows of values."""
