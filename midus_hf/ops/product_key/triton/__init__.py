"""Kernels that select product keys, and kernels of the gradients."""
