"""Kernels of attention to chapters."""
