"""Attention to the sequence and the depth by one kernel, an alternative to the package's own that is timed beside it."""
