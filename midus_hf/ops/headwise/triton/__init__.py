"""Kernels of head-wise lookup."""
