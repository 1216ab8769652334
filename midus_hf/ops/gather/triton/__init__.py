"""Kernels of weighted sums of table rows and of their gradients."""
