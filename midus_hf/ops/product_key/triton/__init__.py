"""Kernels that select product keys, and those of the gradient."""
