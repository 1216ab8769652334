"""Providers that goals and profiles know by their names; reports are made where torch is not installed."""

OURS = "sorted"
"""The provider that ops choose by themselves."""

COMPILED = ("compiled", "expand-compiled", "expand-max-autotune")
"""Plain PyTorch under `torch.compile`: what there is to be faster than."""
