"""Names of the providers that goals and profiles refer to. Reports need these names without torch installed."""

OURS = "sorted"
"""The provider that ops choose by themselves."""

COMPILED = ("compiled", "expand-compiled", "expand-max-autotune")
"""Plain PyTorch under `torch.compile`, which ops should beat."""
