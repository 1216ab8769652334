"""Kernels of attention to the depth."""
