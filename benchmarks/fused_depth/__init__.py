"""Attention to the sequence and the depth by one kernel: a rival of what the package runs, timed beside it."""
